import math
from typing import Any

import pytest

import gymtune.rewards
from gymtune.rewards import Checker, Component, Episode, NumericChecker, Verdict, failed_calls, gt_component, unfinished
from gymtune.tools import Outcome, ToolResult


def episode(**state: Any) -> Episode:
    return Episode(gt=5, messages=[], **state)


def result(outcome: Outcome) -> ToolResult:
    return ToolResult("c", "t", outcome, "")


@pytest.mark.parametrize(
    ("state", "fires"),
    [
        ({}, {"turn"}),
        ({"terminated": True, "scored": True}, {"turn", "scored", "end"}),
        ({"truncated": True, "scored": True}, {"turn", "scored", "truncated", "end"}),
        ({"truncated": True}, {"turn", "truncated", "end"}),
    ],
)
def test_when_each_moment_fires(state: dict[str, bool], fires: set[str]) -> None:
    moments = ("turn", "scored", "truncated", "end")
    assert {w for w in moments if Component(w, w, lambda _: 0.0).fires(episode(**state))} == fires


@pytest.mark.parametrize(("answer", "value", "success"), [("5", 1.0, True), ("6", 0.0, False), ("what?", 0.0, False)])
def test_gt_scores_the_answer_and_notes_success(answer: str, value: float, success: bool) -> None:
    state = episode(answer=answer)
    component = gt_component(NumericChecker())
    assert (component.name, component.when, component.value(state), state.success) == ("gt", "scored", value, success)


def test_gt_is_none_where_the_checker_broke() -> None:
    class Broken(Checker):
        def verdict(self, answer: str, gt: Any) -> Verdict:
            raise RuntimeError

    state = episode(answer="5", success=True)
    assert gt_component(Broken(), name="mine").value(state) is None
    assert state.success is None


def test_failed_calls_counts_this_turns_failures() -> None:
    failures = ["parse_error", "unknown_tool", "schema_violation", "timeout", "exception"]
    state = episode(results=[result(o) for o in Outcome], all_results=[result(Outcome.timeout)] * 9)
    assert failed_calls.value(state) == -len(failures)
    assert {o for o in Outcome if failed_calls.value(episode(results=[result(o)]))} == set(failures)


def test_no_failure_is_zero_and_not_minus_zero() -> None:
    value = failed_calls.value(episode())
    assert value is not None
    assert math.copysign(1.0, value) == 1.0


def test_unfinished_is_minus_one_when_cut() -> None:
    assert (unfinished.when, unfinished.value(episode(truncated=True))) == ("truncated", -1.0)


def test_names() -> None:
    assert gymtune.rewards.__all__ == sorted(gymtune.rewards.__all__)
    assert (unfinished.name, failed_calls.name) == ("unfinished", "failed_calls")
