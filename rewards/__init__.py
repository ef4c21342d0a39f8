"""Checkers of `gt` and reward components: what an episode is worth, and by which parts."""

from .checker import Checker, Verdict, VerdictKind, check, check_episode
from .components import Component, When, failed_calls, gt_component, unfinished
from .episode import Episode, FinishReason
from .functions import ConversationScorer, RewardFunction, Scores, call_function, call_scorer, load_function
from .numeric import NumericChecker
from .registry import CHECKERS, component_names, get_checker, get_component, get_preset, preset_names
from .trial import AttackReport, try_checker

__all__ = [
    "AttackReport",
    "CHECKERS",
    "Checker",
    "Component",
    "ConversationScorer",
    "Episode",
    "FinishReason",
    "NumericChecker",
    "RewardFunction",
    "Scores",
    "Verdict",
    "VerdictKind",
    "When",
    "call_function",
    "call_scorer",
    "check",
    "check_episode",
    "component_names",
    "failed_calls",
    "get_checker",
    "get_component",
    "get_preset",
    "gt_component",
    "load_function",
    "preset_names",
    "try_checker",
    "unfinished",
]
