"""Components: the named parts of a reward, each with the moment at which it fires.

An env sums `weight * value` of the components that fire on a turn. A component that returns None (its checker broke)
is left out of the sum and flagged by the env.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .checker import Checker, check_episode
from .episode import Episode

#: `turn`: after every action. `scored`: when `gt` is scored. `truncated`: when the episode was cut. `end`: on any end.
#: `total`: on any end, after all the others, so that it can see what they earned.
When = Literal["turn", "scored", "truncated", "end", "total"]


@dataclass(frozen=True, slots=True)
class Component:
    """One named part of a reward: its moment and its value (None when it cannot be told).

    `checker` is there for the component that scores `gt`, so that the contract check can try to fool it.
    """

    name: str
    when: When
    value: Callable[[Episode], float | None]
    checker: Checker | None = None

    def fires(self, episode: Episode) -> bool:
        """Tell whether this component counts on the turn that `episode` has just finished."""
        match self.when:
            case "turn":
                return True
            case "scored":
                return episode.scored
            case "truncated":
                return episode.truncated
            case "end" | "total":
                return episode.over


def gt_component(checker: Checker, name: str = "gt") -> Component:
    """Return the component that scores the answer against `gt` and notes the episode's success."""

    def value(episode: Episode) -> float | None:
        verdict = check_episode(checker, episode)
        episode.success = verdict.success
        return verdict.score

    return Component(name, "scored", value, checker)


#: -1 when the episode was cut (length, context, deadline, turns) before the agent was done.
unfinished = Component("unfinished", "truncated", lambda episode: -1.0)

#: -1 for each call of this turn that failed (parse error, unknown tool, schema violation, exception, timeout).
failed_calls = Component("failed_calls", "turn", lambda episode: float(-sum(r.failed for r in episode.results)))
