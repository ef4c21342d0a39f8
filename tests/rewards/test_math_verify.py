import signal
import threading
from typing import Any

import pytest

from gymtune.rewards import Verdict, check
from gymtune.rewards.math_verify import MathVerifyChecker

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("answer", "gt", "right"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        ("The answer is 0.333333333.", "1/3", True),
        (r"\boxed{\log_2 8 + x}", "x + 3", True),  # a function, beyond the built-in checker
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", True),
        ("<answer>10</answer>", 10, True),
        ("(1, 2)", "$(1,2)$", True),
        ("the 2nd answer is x", 2, False),
        ("42 dollars per 7 days", 7, False),
        ("5 or 6", 6, False),
        ("$5$ and $6$", 6, False),
        ("+".join(["1"] * 3000), 1, False),
        ("five", 5, False),
    ],
)
def test_answers(answer: str, gt: Any, right: bool) -> None:
    assert check(MathVerifyChecker(), answer, gt).success is right


def test_a_bomb_is_broken_and_the_next_answer_is_judged() -> None:
    verdict = check(MathVerifyChecker(timeout=0.5), "9^{9^{9^9}}", 5)
    assert (verdict.kind, verdict.score) == ("broken", None)
    assert "Timeout" in verdict.detail
    assert check(MathVerifyChecker(timeout=60), r"\boxed{0.25}", "1/4").success is True


def test_words_do_not_reach_the_library() -> None:
    for answer, kind in [("9^{9^{9^9}}", "broken"), ("seven times 9^{9^{9^9}}", "wrong"), (r"\text{seven}", "right")]:
        assert check(MathVerifyChecker(timeout=0.5), answer, "seven").kind == kind


def test_it_works_off_the_main_thread_and_leaves_an_alarm_alone() -> None:
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(check(MathVerifyChecker(), "0.25", "1/4")))
    signal.alarm(500)
    try:
        thread.start()
        thread.join()
        assert signal.alarm(0) > 400
    finally:
        signal.alarm(0)
    assert [verdict.success for verdict in verdicts] == [True]
