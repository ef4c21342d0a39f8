"""Checkers of `gt` and reward components: what an episode is worth, and by which parts."""

from .checker import Checker, Verdict, VerdictKind, check
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
    "failed_calls",
    "gt_component",
    "unfinished",
]
