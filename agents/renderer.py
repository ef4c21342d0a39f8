"""Renderer: messages <-> tokens by the model's own chat template. It only ever appends.

The first messages are rendered once. After that, what the agent sampled stays as it was sampled, and what the env
said is rendered as a *delta*: the text that the template puts between an assistant turn and the next generation
prompt, found by rendering a short probe conversation. History is never rendered again, so a template that strips old
thinking or rewrites calls cannot change a token the policy has sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..tools.chat_format import ChatFormat
from ..tools.errors import ConfigError, DataError, ModelError
from ..tools.messages import FunctionCall, Message
from .chat_format_probe import probe_chat_format
from .shield import Shield

_PROBE = "GymtuneProbe"
_OURS = ("messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize")

THINKING = ("open_thinking", "enable_thinking")
"""Arguments by which templates open or close thinking: MiniMind's, and that of Qwen3 and its kin."""


class Renderer:
    """Turns messages into token ids for one tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template; it is not changed.
        chat_format: the model family's call format (None: the one in which the template writes calls).
        chat_template: takes the place of the tokenizer's own template.
        template_options: arguments of the template (`{"enable_thinking": False}`), each one that it reads.

    `stop_ids` are the ids that end a turn: what the template closes an assistant turn with, and the tokenizer's eos.

    Raises:
        ModelError: there is no template, it refuses a plain conversation, or nothing ends a turn.
        ConfigError: the template does not read an argument of `template_options`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_format: ChatFormat | None = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        self.template_options = dict(template_options or {})
        if not self.chat_template:
            raise ModelError(f"{self._name}: the tokenizer has no chat template; give one with --chat-template FILE")
        for name in self.template_options:
            self._refuse_unread(name)
        self._variants: dict[str, Renderer] = {}
        self.chat_format = chat_format or probe_chat_format(tokenizer, self.chat_template)
        self._shield = Shield(tokenizer, self.chat_format.special_tokens)
        self._alone: dict[tuple[str, ...], str | None] = {}
        self._template_shows_tools = self._probe_tools()
        self._turn_end = self._probe_turn_end()
        self.stop_ids = self._find_stop_ids()
        self._last_prompt: tuple[str, list[int]] = ("", [])
        #: The generation prompt itself opens the thinking span: what is sampled begins inside it.
        self.thinking_open = self._probe_thinking()

    @classmethod
    def from_folder(cls, folder: str | Path, **options: Any) -> Renderer:
        """Load the tokenizer of a model folder. Raises ModelError when there is none, or none that can be read."""
        from transformers import AutoTokenizer

        if not (Path(folder) / "tokenizer_config.json").is_file():
            raise ModelError(f"{folder}: no tokenizer_config.json; a model folder holds its tokenizer")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder}: the tokenizer cannot be read: {error}") from error
        return cls(tokenizer, **options)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of vocabulary and template: trajectories with another one hold another model's ids.

        Arguments of the template are no part of it: an episode names its own in its metadata.
        """
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        content = json.dumps([vocabulary, self.chat_template], sort_keys=True)
        return blake2b(content.encode(), digest_size=8).hexdigest()

    def with_options(self, options: Mapping[str, Any]) -> Renderer:
        """Return the renderer whose template gets `options` over the arguments of this one; the same one every time.

        Raises ConfigError for an argument that the template does not read.
        """
        merged = self.template_options | dict(options)
        if merged == self.template_options:
            return self
        key = json.dumps(merged, sort_keys=True)
        if key not in self._variants:
            self._variants[key] = Renderer(
                self.tokenizer,
                chat_format=self.chat_format,
                chat_template=self.chat_template,
                template_options=merged,
            )
        return self._variants[key]

    def thinking(self, is_open: bool) -> Renderer:
        """Return the renderer whose template is told to open thinking, or not to. Raises ConfigError: it cannot be."""
        told = {name: is_open for name in THINKING if self._reads(name)}
        if not told:
            raise ConfigError(
                f"thinking_ratio: the chat template of {self._name} reads neither {' nor '.join(THINKING)}, so nothing "
                "opens or closes its thinking; leave thinking_ratio out"
            )
        return self.with_options(told)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the ids of `messages` up to and including the generation prompt.

        Raises DataError for a conversation that the template refuses.
        """
        key = json.dumps([messages, tools])
        if key != self._last_prompt[0]:  # the samples of a group come one after another
            self._last_prompt = (key, self._render(messages, tools, generation_prompt=True))
        return list(self._last_prompt[1])

    def conversation(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the ids of a conversation that is over, to its last token: what a reward model reads.

        Raises DataError for one that the template refuses.
        """
        return self._render(messages, tools, generation_prompt=False)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
    ) -> list[int]:
        if tools and not self._template_shows_tools:
            messages, tools = self._inject_tools(messages, tools), []
        marked, marked_tools, hidden = self._shield.hide(messages, tools)
        from jinja2.exceptions import TemplateError

        try:
            return hidden.encode(self._template(marked, marked_tools, generation_prompt=generation_prompt))
        except TemplateError as error:
            raise DataError(f"the chat template of {self._name} refuses the conversation: {error}") from error

    def delta(self, messages: Sequence[Message], last_id: int | None = None) -> list[int] | None:
        """Return the ids that continue a sampled assistant turn: its end, `messages`, the next generation prompt.

        `last_id` is the last sampled id: a stop token that was sampled is not added a second time. None when the
        template cannot continue a history (the caller then starts a new segment).
        """
        marked, _, hidden = self._shield.hide(messages)
        text = self._delta_text(marked)
        if text is None:
            return None
        ids = hidden.encode(text)
        ending = ids[: len(self._encode_plain(self._turn_end))]
        return ids[ending.index(last_id) + 1 :] if last_id in self.stop_ids and last_id in ending else ids

    def assistant_ids(self, text: str) -> list[int]:
        """Return the ids an agent that writes `text` would have sampled, its stop token included.

        Call and thinking markup become their tokens; control tokens in the text do not. Where the generation prompt
        opened the thinking span, the text goes on inside it.
        """
        start, end = self.chat_format.think_open, self.chat_format.think_close
        if self.thinking_open and text.startswith(start):
            text = text.removeprefix(start).removeprefix("\n")
        elif self.thinking_open and end not in text:
            text = f"\n{end}\n\n{text}"
        return [*self._shield.encode_own(text), self.stop_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids, without the stop token that ended them."""
        ids = list(ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # -- templates ---------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def _reads(self, name: str) -> bool:
        """Whether the template's text holds this name; of a tokenizer with several templates, one of them."""
        texts = [self.chat_template] if isinstance(self.chat_template, str) else list(self.chat_template.values())
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)

    def _refuse_unread(self, name: str) -> None:
        if name in _OURS:
            raise ConfigError(f"chat template argument {name!r}: the renderer gives it itself; leave it out")
        if not self._reads(name):
            raise ConfigError(f"chat template argument {name!r}: the template of {self._name} does not read it")

    def _template(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.chat_template if isinstance(self.chat_template, str) else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.template_options,
            )
        )

    def _try_template(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool
    ) -> str | None:
        """Render, or None when the template refuses the conversation."""
        from jinja2.exceptions import TemplateError

        try:
            return self._template(messages, tools, generation_prompt=generation_prompt)
        except (TemplateError, TypeError):  # the template's own refusal, or its code met what it cannot take
            return None

    def _inject_tools(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Put the tool schemas into the system message, for templates that ignore `tools=`."""
        told = self.chat_format.tools_prompt(tools)
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
        return [{"role": "system", "content": told}, *messages]

    # -- probes ------------------------------------------------------------------------------------------------

    def _delta_text(self, messages: Sequence[Message]) -> str | None:
        """Return what the template puts after an assistant's words when `messages` answer them.

        None when it refuses such a conversation, changes what stood before, or does not end the turn as it should.
        """
        calls = tuple(m.get("tool_call_id", "") for m in messages if m["role"] == "tool")
        history = self._probe_history(calls)
        if calls not in self._alone:
            self._alone[calls] = self._try_template(history, generation_prompt=False)
        alone = self._alone[calls]
        whole = self._try_template([*history, *messages], generation_prompt=True)
        if alone is None or whole is None:
            return None
        marks = alone.count(_PROBE)
        (before, end), (head, tail) = self._split_at_mark(alone, marks), self._split_at_mark(whole, marks)
        if before != head or not tail.startswith(end) or not end.endswith(self._turn_end):
            return None
        return tail[len(end) - len(self._turn_end) :]

    def _split_at_mark(self, text: str, number: int) -> tuple[str, str]:
        """Split after the probe's mark of that number; an empty thinking span, put in by some, is left out."""
        parts = text.split(_PROBE)
        empty = f"{self.chat_format.think_open}\n\n{self.chat_format.think_close}\n\n"
        return _PROBE.join(parts[:number]).replace(empty, ""), _PROBE.join(parts[number:])

    def _probe_history(self, call_ids: Sequence[str]) -> list[Message]:
        """A short conversation whose last turn is the assistant's, with the calls that the env answers."""
        assistant: Message = {"role": "assistant", "content": _PROBE}
        if call_ids:
            function: FunctionCall = {"name": _PROBE, "arguments": {}}
            assistant["tool_calls"] = [{"id": i, "type": "function", "function": function} for i in call_ids]
        return [{"role": "user", "content": "x"}, assistant]

    def _probe_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
        text = self._try_template([{"role": "user", "content": "x"}], [tool], generation_prompt=True)
        return text is not None and _PROBE in text

    def _probe_turn_end(self) -> str:
        """Return what the template puts after an assistant's content at the end of a conversation."""
        text = self._try_template(self._probe_history(()), generation_prompt=False)
        if text is None or _PROBE not in text:
            raise ModelError(f"{self._name}: the chat template cannot render a user and an assistant message")
        return text.rpartition(_PROBE)[2]

    def _probe_thinking(self) -> bool:
        text = self._template([{"role": "user", "content": "x"}], [], generation_prompt=True)
        return text.rstrip().endswith(self.chat_format.think_open)

    def _find_stop_ids(self) -> tuple[int, ...]:
        """The id that closes an assistant turn first (it is what an expert's text ends with), then the eos."""
        eos = self.tokenizer.eos_token_id
        ends = self._encode_plain(self._turn_end.strip())
        first = ends[:1] if len(ends) == 1 else []
        found = dict.fromkeys([*first, *([eos] if eos is not None else [])])
        if not found:
            raise ModelError(f"{self._name}: neither an eos token nor an end of turn in the template")
        return tuple(found)

    def _encode_plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
