"""Checkers of `gt` and reward components: what an episode is worth, and by which parts."""

from .checker import Checker, Verdict, VerdictKind, check, check_episode
from .choice import ChoiceChecker
from .components import Component, When, failed_calls, gt_component, unfinished
from .contains import ContainsGt
from .episode import Episode, FinishReason
from .exact import ExactChecker
from .expression import ExpressionChecker
from .functions import ConversationScorer, RewardFunction, Scores, call_function, call_scorer, load_function
from .json_equal import JsonEqual
from .numeric import NumericChecker
from .preference import PreferenceChecker
from .registry import CHECKERS, component_names, get_checker, get_component, get_preset, preset_names
from .state_equal import StateEqual
from .tool_calls_match import ToolCallsMatch
from .trial import AttackReport, try_checker

__all__ = [
    "AttackReport",
    "CHECKERS",
    "Checker",
    "ChoiceChecker",
    "Component",
    "ContainsGt",
    "ConversationScorer",
    "Episode",
    "ExactChecker",
    "ExpressionChecker",
    "FinishReason",
    "JsonEqual",
    "NumericChecker",
    "PreferenceChecker",
    "RewardFunction",
    "Scores",
    "StateEqual",
    "ToolCallsMatch",
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
