from typing import Any

import pytest

from gymtune.rewards import check
from gymtune.rewards.exact import ExactChecker


@pytest.mark.parametrize(
    ("answer", "gt", "right"),
    [
        ("paris", "Paris", True),
        ("Paris!", "«Paris»", True),
        ("New\n York", "New York", True),
        ("not guilty", "not guilty", True),
        ("The verdict stands: the answer is not guilty.", "not guilty", True),
        ("The answer is not guilty.", "guilty", False),
        ("ﬁne", "fine", True),  # NFKC
        ("résumé", "résumé", True),  # one composed, one not
        ("Answer: 42", 42, True),
        ("Paris\nLondon", "Paris", False),
        ("C++", "C", False),
        ("-5", 5, False),
        ("<answer>Paris</answer>, or so", "Paris", False),
        ("<answer>Paris", "Paris", False),
    ],
)
def test_equality(answer: str, gt: Any, right: bool) -> None:
    assert check(ExactChecker(), answer, gt).success is right


def test_case_counts_when_asked() -> None:
    assert check(ExactChecker(casefold=False), "paris", "Paris").success is False
    assert check(ExactChecker(casefold=False), "Paris", "Paris").success is True


@pytest.mark.parametrize("gt", [None, [], "", ["a", ""], "...", True, {"a": 1}, ["a", None]])
def test_a_gt_that_is_no_text_is_broken(gt: Any) -> None:
    assert check(ExactChecker(), "a", gt).kind == "broken"
