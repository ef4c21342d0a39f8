from typing import Any

import pytest

from gymtune.rewards import check
from gymtune.rewards.choice import ChoiceChecker

STATED = [
    "{}",
    "({})",
    "{}.",
    "{})",
    "**{}**",
    "The answer is {}.",
    "Answer: ({})",
    r"\boxed{{{}}}",
    "{}. A dog",
    "({}) Rome",
]


@pytest.mark.parametrize("form", STATED)
def test_a_letter_is_right_for_itself_alone(form: str) -> None:
    for stated in "ABCDEFGHIJ":
        for wanted in "ABCDEFGHIJ":
            assert check(ChoiceChecker(), form.format(stated), wanted).success is (stated == wanted), (form, stated)


@pytest.mark.parametrize(
    "answer",
    [
        "A or B",
        "A and B",
        "A/B",
        "(A)(B)",
        "A B",
        "A) B)",
        "B) C",
        "B) Paris (C) Rome",
        "B) All of them",
        "B) or not",
        "The answer is b",  # a letter in lower case is a word, but where it stands alone
        "Why not B?",
        "B?",
        "K",
        "be",
        "B) " + "x" * 1000,
    ],
)
def test_no_single_letter(answer: str) -> None:
    assert check(ChoiceChecker(), answer, "B").success is False


def test_an_option_text_may_hold_capitals() -> None:
    for text in ("B) Vitamin A", "B. I think", "(B) The U.N. charter", "B: Plan C it is"):
        assert check(ChoiceChecker(), text, "B").success is True, text


@pytest.mark.parametrize("gt", [None, "", "b", "K", "AB", 1, ["B"], "B) Paris"])
def test_a_gt_that_is_no_letter_is_broken(gt: Any) -> None:
    assert check(ChoiceChecker(), "B", gt).kind == "broken"
