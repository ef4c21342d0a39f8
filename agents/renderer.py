"""Renderer: messages <-> tokens by the model's own chat template. It only ever appends.

The first messages are rendered once. After that, what the agent sampled stays as it was sampled, and what the env
said is rendered as a *delta*: the text that the template puts between an assistant turn and the next generation
prompt, found by rendering a short probe conversation. History is never rendered again, so a template that strips old
thinking or rewrites calls cannot change a token the policy has sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..tools.chat_format import ChatFormat, get_chat_format
from ..tools.errors import ModelError
from ..tools.messages import FunctionCall, Message

_PROBE = "GymtuneProbe"
_SHIELD = "GymtuneShield"


class Renderer:
    """Turns messages into token ids for one tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        chat_format: the model family's call format (found from the template when None).
        chat_template: replaces the tokenizer's own template.
        template_options: passed to the template (`enable_thinking=False`).

    `stop_ids` are the ids that end a turn: the tokenizer's eos and what the template closes an assistant turn with.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_format: ChatFormat | None = None,
        chat_template: str | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_options = template_options or {}
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        if not tokenizer.chat_template:
            raise ModelError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template; give one with --chat-template FILE"
            )
        self.chat_format = chat_format or get_chat_format("hermes")
        added = tokenizer.get_added_vocab()
        specials = set(tokenizer.all_special_tokens)
        #: Text that becomes a special token if an env says it; for the agent's and the system's own words only the
        #: control tokens are taken away (they may write `<tool_call>`).
        self._added = _any_of(added)
        self._control = _any_of(token for token in added if token in specials)
        self._befores: dict[tuple[str, ...], str | None] = {}
        self._template_shows_tools = self._probe_tools()
        self._turn_end = self._probe_turn_end()
        self.stop_ids = self._find_stop_ids()
        #: The generation prompt itself opens the thinking span: what is sampled begins inside it.
        self.thinking_open = self._probe_thinking()

    @classmethod
    def from_folder(cls, folder: str | Path, **options: Any) -> Renderer:
        """Load the tokenizer of a model folder. Raises ModelError when there is none."""
        from transformers import AutoTokenizer

        if not (Path(folder) / "tokenizer_config.json").is_file():
            raise ModelError(f"{folder}: no tokenizer_config.json; a model folder holds its tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return cls(tokenizer, **options)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of vocabulary and template: trajectories with another one hold another model's ids."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        content = json.dumps([vocabulary, self.tokenizer.chat_template, self.template_options], sort_keys=True)
        return blake2b(content.encode(), digest_size=8).hexdigest()

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the ids of `messages` up to and including the generation prompt."""
        return self._encode(list(messages), list(tools), generation_prompt=True)

    def delta(self, messages: Sequence[Message], last_id: int | None = None) -> list[int] | None:
        """Return the ids that continue a sampled assistant turn: its end, `messages`, the next generation prompt.

        `last_id` is the last sampled id: a stop token that was sampled is not added a second time. None when the
        template cannot continue a history (the caller then starts a new segment).
        """
        calls = tuple(m.get("tool_call_id", "") for m in messages if m["role"] == "tool")
        before = self._before(calls)
        shielded, pieces = self._shield(list(messages))
        after = self._try_template([*self._probe_history(calls), *shielded], generation_prompt=True)
        if before is None or after is None or not after.startswith(before + self._turn_end):
            return None
        ids = self._encode_text(after[len(before) :], pieces)
        return ids[1:] if ids and ids[0] == last_id else ids

    def assistant_ids(self, text: str) -> list[int]:
        """Return the ids an agent that writes `text` would have sampled, its stop token included.

        Call and thinking markup become their tokens; control tokens in the text do not.
        """
        return [*self._encode_pieces(text, self._control), self.stop_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids, without the stop token that ended them."""
        ids = list(ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # -- templates ---------------------------------------------------------------------------------------------

    def _template(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.template_options,
            )
        )

    def _encode(self, messages: list[Message], tools: list[dict[str, Any]], *, generation_prompt: bool) -> list[int]:
        if tools and not self._template_shows_tools:
            messages, tools = self._inject_tools(messages, tools), []
        shielded, pieces = self._shield([messages, tools])
        text = self._template(shielded[0], shielded[1], generation_prompt=generation_prompt)
        return self._encode_text(text, pieces)

    def _inject_tools(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
        """Put the tool schemas into the system message, for templates that ignore `tools=`."""
        told = self.chat_format.tools_prompt(tools)
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
        return [{"role": "system", "content": told}, *messages]

    def _probe_history(self, call_ids: Sequence[str]) -> list[Message]:
        """A short conversation whose last turn is the assistant's, with the calls that the env answers."""
        assistant: Message = {"role": "assistant", "content": _PROBE}
        if call_ids:
            function: FunctionCall = {"name": _PROBE, "arguments": {}}
            assistant["tool_calls"] = [{"id": i, "type": "function", "function": function} for i in call_ids]
        return [{"role": "user", "content": _PROBE}, assistant]

    def _before(self, call_ids: tuple[str, ...]) -> str | None:
        """Return the rendered probe without its end of turn; None when the template refuses or changes that end."""
        if call_ids not in self._befores:
            text = self._try_template(self._probe_history(call_ids), generation_prompt=False)
            stable = text is not None and text.endswith(self._turn_end)
            self._befores[call_ids] = text.removesuffix(self._turn_end) if text is not None and stable else None
        return self._befores[call_ids]

    def _try_template(self, messages: Sequence[Message], *, generation_prompt: bool) -> str | None:
        """Render, or None when the template refuses the conversation."""
        from jinja2.exceptions import TemplateError

        try:
            return self._template(messages, [], generation_prompt=generation_prompt)
        except TemplateError:
            return None

    def _probe_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
        text = self._template([{"role": "user", "content": "x"}], [tool], generation_prompt=True)
        return _PROBE in text

    def _probe_turn_end(self) -> str:
        """Return what the template puts after an assistant's content at the end of a conversation."""
        text = self._template(self._probe_history(()), [], generation_prompt=False)
        return text.rpartition(_PROBE)[2]

    def _probe_thinking(self) -> bool:
        text = self._template([{"role": "user", "content": "x"}], [], generation_prompt=True)
        return text.rstrip().endswith(self.chat_format.think_open)

    def _find_stop_ids(self) -> tuple[int, ...]:
        """The id that closes an assistant turn first (it is what an expert's text ends with), then the eos."""
        eos = self.tokenizer.eos_token_id
        ends = self.tokenizer.encode(self._turn_end.strip(), add_special_tokens=False)
        first = ends[:1] if len(ends) == 1 else []
        found = dict.fromkeys([*first, *([eos] if eos is not None else [])])
        if not found:
            raise ModelError(f"{self.tokenizer.name_or_path}: neither an eos token nor an end of turn in the template")
        return tuple(found)

    # -- text to ids, hostile text included ----------------------------------------------------------------------

    def _shield(self, data: Any, pattern: re.Pattern[str] | None = None) -> tuple[Any, dict[str, str]]:
        """Replace special-token text inside messages and tools by plain marks, so that no template can bring it back.

        Returns the data with marks and what each mark stands for.
        """
        pieces: dict[str, str] = {}
        prefix = _SHIELD

        def mark(match: re.Match[str]) -> str:
            nonlocal prefix
            while not pieces and prefix in str(data):  # the data itself must not hold a mark
                prefix += "y"
            name = f"{prefix}{len(pieces)}x"
            pieces[name] = match[0]
            return name

        def walk(value: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(value, str):
                return pattern.sub(mark, value)
            if isinstance(value, dict):
                inner = self._control if value.get("role") in ("assistant", "system") else pattern
                return {walk(k, inner): walk(v, inner) for k, v in value.items()}
            return [walk(item, pattern) for item in value] if isinstance(value, list | tuple) else value

        return walk(data, pattern or self._added), pieces

    def _encode_text(self, text: str, pieces: dict[str, str]) -> list[int]:
        """Encode rendered text; what stood behind a mark is encoded so that it makes no special token."""
        if not pieces:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, pieces)) + ")", text):
            if part in pieces:
                ids.extend(self._encode_plain(pieces[part]))
            elif part:
                ids.extend(self.tokenizer.encode(part, add_special_tokens=False))
        return ids

    def _encode_pieces(self, text: str, pattern: re.Pattern[str]) -> list[int]:
        shielded, pieces = self._shield(text, pattern)
        return self._encode_text(shielded, pieces)

    def _encode_plain(self, token: str) -> list[int]:
        """Encode the text of a special token as ordinary text, cut after its first character."""
        encode = self.tokenizer.encode
        return [*encode(token[:1], add_special_tokens=False), *encode(token[1:], add_special_tokens=False)]


def _any_of(tokens: Any) -> re.Pattern[str]:
    """Return a pattern that matches any of `tokens`, the longest first (nothing when there are none)."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")
