"""Shield: special-token text in messages becomes plain text, whatever a template does with it.

Before a template runs, each such text is replaced by a mark of letters and digits; after it has run, what stands
behind a mark is encoded in two halves, of which no tokenizer makes a special token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from ..tools.messages import Message

_MARK = "GymtuneShield"


class Shield:
    """The special tokens of one tokenizer; `markup` are those by which its model calls tools.

    What users, tools and schemas say may hold neither control tokens nor markup such as `<tool_call>`; the agent's
    and the system's own words may hold markup, the agent's also `markup`.
    """

    def __init__(self, tokenizer: Any, markup: Sequence[str] = ()) -> None:
        added = tokenizer.added_tokens_decoder.values()
        control = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._tokenizer = tokenizer
        self._control = _any_of(control)
        self._own = _any_of(control - set(markup))
        # Runs of blanks are added tokens of some tokenizers; they forge nothing.
        self._every = _any_of(control | {token.content for token in added if token.content.strip()})

    def hide(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[Message], list[dict[str, Any]], Hidden]:
        """Return copies of messages and tools with marks, and what stands behind these."""
        hidden = Hidden(self._tokenizer, [*messages, *tools])
        allowed = {"assistant": self._own, "system": self._control}
        marked = [hidden.mark(m, allowed.get(m["role"], self._every)) for m in messages]
        return marked, hidden.mark(list(tools), self._every), hidden

    def encode_own(self, text: str) -> list[int]:
        """Encode an agent's own words: markup becomes its tokens, control tokens in it do not."""
        hidden = Hidden(self._tokenizer, text)
        return hidden.encode(hidden.mark(text, self._own))


class Hidden:
    """What was replaced in one conversation. The marks begin with a text that `data` does not hold."""

    def __init__(self, tokenizer: Any, data: Any) -> None:
        self._tokenizer, self._prefix = tokenizer, _MARK
        self._marks: dict[str, str] = {}  # text -> mark
        written = str(data)
        if _MARK in written:  # no text holds its own digest
            self._prefix += blake2b(written.encode("utf-8", "surrogatepass")).hexdigest() + "n"

    def mark(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """Return `value` (text, or lists and dicts of it) with a mark in place of every match."""
        if isinstance(value, str):
            return pattern.sub(lambda match: self._marks.setdefault(match[0], self._next()), value)
        if isinstance(value, dict):
            return {self.mark(k, pattern): self.mark(v, pattern) for k, v in value.items()}
        return [self.mark(item, pattern) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> list[int]:
        """Encode text that a template made of marked data."""
        ids: list[int] = []
        texts = {mark: text for text, mark in self._marks.items()}
        for part in re.split(f"({self._prefix}[0-9]+x)", text) if texts else [text]:
            hidden = texts.get(part)
            for piece in (part,) if hidden is None else (hidden[:1], hidden[1:]):
                if piece:
                    ids.extend(self._tokenizer.encode(piece, add_special_tokens=False))
        return ids

    def _next(self) -> str:
        return f"{self._prefix}{len(self._marks)}x"


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `tokens`, the longest first (nothing when there are none)."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")
