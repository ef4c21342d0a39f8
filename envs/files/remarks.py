"""Remarks: what is odd about a record that a trainer can use all the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ...tools.messages import Message
from .answers import boxed
from .records import Record, shown_key

_LONG_GT = 200  # characters; a longer text is no answer that a checker could find stated
_COLUMNS = ("messages", "conversations", "prompt", "chosen", "rejected", "completion")
_MESSAGE_KEYS = {"role", "content", "name", "tools", "tool_calls", "tool_call_id", "reasoning_content", "from", "value"}


def remarks(record: Record) -> Iterator[str]:
    """Yield the remarks on a record, each a name to count by."""
    if _out_of_order(record):
        yield "roles out of order"
    if record.kind == "preference" and record.reply("chosen") == record.reply("rejected"):
        yield "chosen equals rejected"
    if record.kind == "agentic":
        if not record.gt:
            yield "gt is empty"
        elif not record.tools:
            yield "gt not reachable: no tools"
    if record.kind == "verifiable" and isinstance(record.gt, str):
        yield from _on_answer(record, record.gt)
    known = {tool["function"]["name"] for tool in record.tools}
    if known and any(name not in known for name in _called(record)):
        yield "calls a tool that it has no schema of"


def unused_keys(record: Record, value: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of a record that nobody reads, those of its messages as `conversations[].weight`."""
    if record.kind == "trajectories":
        return  # ours: an unknown key is refused where a trajectory is read
    yield from map(shown_key, record.metadata)
    for column in _COLUMNS:
        messages = value.get(column)
        if isinstance(messages, list):
            keys = set().union(*messages) - _MESSAGE_KEYS
            yield from (f"{column}[].{shown_key(key)}" for key in keys)


def _conversations(record: Record) -> Iterator[Sequence[Message]]:
    yield from ((*record.prompt, *reply.messages) for reply in record.replies)
    if not record.replies:
        yield record.prompt


def _called(record: Record) -> Iterator[str]:
    for messages in _conversations(record):
        for message in messages:
            yield from (call["function"]["name"] for call in message.get("tool_calls", ()))


def _out_of_order(record: Record) -> bool:
    """Whether a system message is not the first, one speaker speaks twice in a row, or a reply ends unanswered."""
    for messages in _conversations(record):
        roles = [message["role"] for message in messages]
        # an assistant may speak again after calls: gold on file need not hold their results
        spoken = ["calls" if message.get("tool_calls") else message["role"] for message in messages]
        if "system" in roles[1:] or any(one == other not in ("tool", "calls") for one, other in pairwise(spoken)):
            return True
        if record.replies and record.kind != "trajectories" and roles[-1] != "assistant":
            return True
    return False


def _on_answer(record: Record, gt: str) -> Iterator[str]:
    if len(gt) > _LONG_GT or "\n" in gt:
        yield "gt not reachable: too long to be stated"
    reference = record.reply("reference")
    if reference is not None:
        text = reference[-1]["content"]
        end = text.replace(",", "").rstrip(" \t\r\n.$*")
        if not end.endswith(gt.replace(",", "")) and boxed(text) != gt:
            yield "reference does not end in gt"
