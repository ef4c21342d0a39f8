"""How a tool call ended: one outcome a cause, so that a metric never confuses a bad format with a slow tool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .messages import Message


class Outcome(StrEnum):
    """The cause by which a call ended. The tool was not run for the first three (but see `Tool.on_violation`)."""

    parse_error = "parse_error"
    unknown_tool = "unknown_tool"
    schema_violation = "schema_violation"
    timeout = "timeout"
    exception = "exception"
    truncated = "truncated"
    ok = "ok"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call came to.

    Args:
        tool_call_id: Id of the call that this answers.
        name: Tool that the model asked for; empty when its markup named none.
        outcome: How the call ended.
        content: Text for the model.
        seconds: Wall-clock time of the tool itself; 0 when it was not run.
        violation: Where the arguments break the tool's schema, also when the tool was run all the same.
    """

    tool_call_id: str
    name: str
    outcome: Outcome
    content: str
    seconds: float = 0.0
    violation: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the model got an error instead of a result (a result cut short is still a result)."""
        return self.outcome not in (Outcome.ok, Outcome.truncated)

    def message(self) -> Message:
        """Return the tool message that carries the content back to the model."""
        return {"role": "tool", "tool_call_id": self.tool_call_id, "name": self.name, "content": self.content}
