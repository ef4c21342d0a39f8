"""Row: a record as the file has it; Record: what it says, whatever the file's kind; Fault: what is wrong with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...tools.messages import Message

Kind = Literal["preference", "prompts", "agentic", "verifiable", "unpaired", "sft", "bfcl", "trajectories"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Label = Literal["chosen", "rejected", "good", "bad", "reference"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file: its object, or what came in place of one (`error`, at `path` where that is known).

    `line` is the line of a JSONL file, the number of the row in any other.
    """

    line: int
    value: dict[str, Any] | None
    error: str | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """Messages that follow a record's prompt, an assistant message first, and what the file says of them."""

    label: Label
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Args:
        kind: What the file is.
        line: Line of a JSONL file; number of the record, from 1, in any other file.
        prompt: What a reply follows; ends with a user or a tool message.
        replies: By kind: preference has `chosen` and `rejected`; unpaired one `good` or `bad`; SFT one `reference`;
            trajectories one, `good` or `bad` by their success (`reference` where that is not known); prompts, agentic
            and verifiable a `reference` where the file holds an answer.
        gt: What a checker compares with. Verifiable: text where the file has text or a number (59.0 is "59").
        tools: Schemas in OpenAI form, each checked. Records share them: not to be changed.
        metadata: Every other key of the record.
    """

    kind: Kind
    line: int
    prompt: tuple[Message, ...]
    replies: tuple[Reply, ...] = ()
    gt: Any = None
    tools: tuple[dict[str, Any], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def reply(self, label: Label) -> tuple[Message, ...] | None:
        """Return the messages of the reply with that label, or None where the record has none."""
        return next((reply.messages for reply in self.replies if reply.label == label), None)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong: the line (as in `Record`), the path in the record, what was wanted there and what came.

    `rule` names the sort of fault, for counting.
    """

    line: int
    path: str
    wanted: str
    came: str
    rule: str = "shape"

    def __str__(self) -> str:
        where = f"line {self.line}, {self.path}" if self.path else f"line {self.line}"
        return f"{where}: wanted {self.wanted}, came {self.came}"


class Faults(list[Fault]):
    """The faults of one record, gathered while it is read."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line

    def add(self, path: str, wanted: str, came: str, rule: str = "shape") -> None:
        """Note one fault at `path`."""
        self.append(Fault(self.line, path, wanted, came, rule))


def shown_key(key: str) -> str:
    """Return a key of a file as it may be printed: cut, and without control characters."""
    return repr(key[:_SHOWN])[1:-1]


_SHOWN = 60  # characters of a value, keys of an object


def shown(value: Any) -> str:
    """Return a short text that says what a JSON value is."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}... ({len(value)} characters)"
        case list():
            return f"a list of {len(value)}"
        case dict():
            keys = ", ".join(map(shown_key, list(value)[:8]))
            return f"an object with the keys {keys}"[: _SHOWN + 40] if value else "an empty object"
        case _:
            return repr(value)[:_SHOWN]
