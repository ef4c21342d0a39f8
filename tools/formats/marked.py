"""What formats share whose calls begin with a mark."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from ..chat_format import ChatFormat, ParsedCall
from .call_json import Document, skip_space


class MarkedFormat(ChatFormat):
    """A format whose calls begin with `mark`; every mark outside of another call makes at least one call."""

    mark: ClassVar[str]

    def scan(self, text: str, turn: int) -> tuple[str, tuple[ParsedCall, ...]]:
        """Split text into content and calls. What stands outside of the calls is content."""
        document = Document(text)
        ids = (self.call_id(turn, index) for index in count())
        content: list[str] = []
        calls: list[ParsedCall] = []
        position = 0
        while (start := document.find(self.mark, position)) >= 0:
            content.append(document[position:start])
            found, position = self.read(document, start, ids)
            calls += found
        content.append(document[position:])
        return "".join(content), tuple(calls)

    @abstractmethod
    def read(self, document: Document, start: int, ids: Iterator[str]) -> tuple[list[ParsedCall], int]:
        """Read what the mark at `start` begins; return its calls, one at least, and the position after them."""


def find_end(document: Document, stop: int, opening: str, closing: str, *, whole: bool) -> tuple[int, str | None]:
    """Return the position after the call whose inside stops at `stop`, and what is wrong with how it ends.

    A broken call (not `whole`) ends with its closing tag or before the next opening one; looking no further keeps
    this linear.
    """
    after = skip_space(document, stop)
    if document.startswith(closing, after):
        return after + len(closing), None
    next_opening = document.find(opening, stop)
    limit = len(document) if next_opening < 0 else next_opening
    end = document.find(closing, stop, limit)
    if end < 0:
        return limit, f"{closing} is missing" + ("" if next_opening < 0 else f" before the next {opening}")
    return end + len(closing), f"there is text between the call and {closing}" if whole else None
