"""Action: the assistant's text, with why it ended."""

from __future__ import annotations

from typing import Self, get_args

from ..rewards.episode import FinishReason
from ..tools.errors import EnvError, closest

_REASONS = get_args(FinishReason)


class Action(str):
    """What the agent said: a `str`, so that a plain string is an action too (it means `stop`).

    `finish_reason` is `length` when the sampler was cut, `context` or `deadline` (with an empty text) when no further
    turn could be sampled. `thinking_open` says that the generation prompt itself opened the thinking span.
    """

    finish_reason: FinishReason
    thinking_open: bool

    def __new__(cls, text: str = "", finish_reason: FinishReason = "stop", thinking_open: bool = False) -> Self:
        """Make an action from its text.

        Raises EnvError for an unknown finish reason: one taken for `stop` would pass a cut text off as a finished one.
        """
        if finish_reason not in _REASONS:
            raise EnvError(f"unknown finish reason {finish_reason!r}.{closest(str(finish_reason), _REASONS)}")
        action = super().__new__(cls, text)
        action.finish_reason = finish_reason
        action.thinking_open = thinking_open
        return action

    @classmethod
    def of(cls, text: str) -> Action:
        """Return `text` itself when it is an action, else the action that ended by `stop`."""
        return text if isinstance(text, Action) else cls(text)
