"""Episode: the state of one run through an env, as rewards see it. The env writes it, components read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..tools.messages import Message
from ..tools.outcomes import ToolResult

#: Why the agent's last action ended. `stop` is the only one by its own will.
FinishReason = Literal["stop", "length", "context", "deadline"]


@dataclass(slots=True)
class Episode:
    """One run through one task.

    `turn` counts finished actions; `answer` is the last assistant text without thinking and calls; `results`
    are the tool results of this turn only, `all_results` those of the whole episode. `success` alone is written by a
    component, the one that scores `gt`: None until then, and when its checker broke.
    """

    gt: Any
    messages: list[Message]
    turn: int = 0
    answer: str = ""
    results: list[ToolResult] = field(default_factory=list)
    all_results: list[ToolResult] = field(default_factory=list)
    scored: bool = False
    terminated: bool = False
    truncated: bool = False
    stop_reason: str | None = None
    success: bool | None = None

    @property
    def over(self) -> bool:
        """True once no action is wanted any more."""
        return self.terminated or self.truncated
