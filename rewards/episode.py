"""Episode: the state of one run through an env, as rewards see it. The env writes it, components read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..tools.chat_format import ParsedCall, ParsedTurn
from ..tools.messages import Message
from ..tools.outcomes import ToolResult
from ..tools.toolbox import Toolbox

#: Why the agent's last action ended. `stop` is the only one by its own will.
FinishReason = Literal["stop", "length", "context", "deadline"]


@dataclass(slots=True)
class Episode:
    """One run through one task.

    The first `opening` messages are the task's own. `turn` counts finished actions: `texts` are what the agent wrote,
    `turns` what the one parser read in it, `answer` the last of them without thinking and calls. `results` are the
    tool results of this turn only, `all_results` those of the whole episode. `state` returns what the tools' world
    looks like now (None where they have none). `earned` is what has been paid so far, the components of this turn
    included as they come. `success` alone is written by a component, the one that scores `gt`: None until then, and
    when its checker broke.
    """

    gt: Any
    messages: list[Message]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    toolbox: Toolbox = field(default_factory=lambda: Toolbox([]))
    state: Callable[[], Any] = lambda: None
    opening: int = 0
    turn: int = 0
    answer: str = ""
    texts: list[str] = field(default_factory=list)
    turns: list[ParsedTurn] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    all_results: list[ToolResult] = field(default_factory=list)
    earned: float = 0.0
    scored: bool = False
    terminated: bool = False
    truncated: bool = False
    stop_reason: str | None = None
    success: bool | None = None

    @property
    def over(self) -> bool:
        """True once no action is wanted any more."""
        return self.terminated or self.truncated

    @property
    def calls(self) -> list[ParsedCall]:
        """Every call the agent wrote, in order, malformed ones among them."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def question(self) -> str:
        """What the agent was asked: the task's own user messages."""
        return "\n".join(m["content"] for m in self.messages[: self.opening] if m["role"] == "user")
