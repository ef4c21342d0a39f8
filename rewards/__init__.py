"""Checkers of `gt` and reward components: what an episode is worth, and by which parts."""

from .checker import Checker, Verdict, VerdictKind, check, check_episode
from .components import Component, When, failed_calls, gt_component, unfinished
from .episode import Episode, FinishReason
from .numeric import NumericChecker

__all__ = [
    "Checker",
    "Component",
    "Episode",
    "FinishReason",
    "NumericChecker",
    "Verdict",
    "VerdictKind",
    "When",
    "check",
    "check_episode",
    "failed_calls",
    "gt_component",
    "unfinished",
]
