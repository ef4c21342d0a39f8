"""Every checker, by registry: its own cases, and the adversarial kinds made from each gt."""

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gymtune.rewards import Checker, NumericChecker, Verdict, check
from gymtune.rewards.attacks import candidates, text_attacks
from gymtune.rewards.choice import ChoiceChecker
from gymtune.rewards.contains import ContainsGt
from gymtune.rewards.exact import ExactChecker
from gymtune.rewards.expression import ExpressionChecker
from gymtune.rewards.registry import CHECKERS as NAMED
from gymtune.rewards.trial import try_checker

for spec in NAMED.values():
    importlib.import_module(spec.partition(":")[0])


def all_checkers(base: type[Checker] = Checker) -> Iterator[type[Checker]]:
    for sub in base.__subclasses__():
        if sub.__module__.startswith("gymtune.rewards."):
            yield sub
        yield from all_checkers(sub)


CHECKERS = sorted(set(all_checkers()), key=lambda c: c.__name__)


def test_there_are_checkers() -> None:
    assert {spec.partition(":")[2] for spec in NAMED.values()} <= {c.__name__ for c in CHECKERS}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_keeps_to_its_own_cases(checker: type[Checker]) -> None:
    assert len(checker.positives) >= 3
    assert len(checker.negatives) >= 5
    for answer, gt in checker.positives:
        assert check(checker(), answer, gt) == Verdict("right", 1.0, check(checker(), answer, gt).detail), (answer, gt)
    for answer, gt in checker.negatives:
        verdict = check(checker(), answer, gt)
        assert verdict.kind in ("wrong", "unparsed"), (answer, gt, verdict)
        assert verdict.score == 0.0


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_survives_every_attack(checker: type[Checker]) -> None:
    reports = try_checker(checker(), [gt for _, gt in checker.positives])
    assert sum(report.tried for report in reports.values()) >= 10
    assert {kind: report.accepted for kind, report in reports.items() if report.accepted} == {}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_gt_that_cannot_be_compared_with_is_broken_and_no_score(checker: type[Checker]) -> None:
    verdict = check(checker(), "5", object())
    assert (verdict.kind, verdict.score, verdict.success) == ("broken", None, None)
    assert re.search(r"Error: .*object", verdict.detail)


class Crashing(Checker):
    def verdict(self, answer: str, gt: Any) -> Verdict:
        raise KeyError(answer)


class NotANumber(Checker):
    def verdict(self, answer: str, gt: Any) -> Verdict:
        return Verdict("wrong", float("nan"))


@pytest.mark.parametrize("checker", [Crashing(), NotANumber()])
def test_a_crash_is_never_a_zero(checker: Checker) -> None:
    verdict = check(checker, "5", 5)
    assert (verdict.kind, verdict.score, verdict.success) == ("broken", None, None)


def test_check_lets_an_interrupt_through() -> None:
    class Interrupted(Checker):
        def verdict(self, answer: str, gt: Any) -> Verdict:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(Interrupted(), "5", 5)


def test_verdicts() -> None:
    assert (Verdict.of(True).score, Verdict.of(True).success) == (1.0, True)
    assert (Verdict.of(False).score, Verdict.of(False).success) == (0.0, False)
    assert (Verdict.unparsed("why").score, Verdict.unparsed("why").success) == (0.0, False)
    for kind, score in [("broken", 0.0), ("right", None), ("wrong", float("inf"))]:
        with pytest.raises(ValueError, match="cannot have the score"):
            Verdict(kind, score)  # type: ignore[arg-type]


class Substring(Checker):
    """MiniMind's rule as it is: what the attacks are for."""

    def verdict(self, answer: str, gt: Any) -> Verdict:
        return Verdict.of(str(gt) in answer)


def test_a_careless_checker_is_fooled_and_reported() -> None:
    reports = try_checker(Substring(), ["5", "Paris"])
    assert reports["number dump"].tried == 2
    assert [gt for _, gt in reports["number dump"].accepted] == ["5", "Paris"]
    assert len([kind for kind, report in reports.items() if report.accepted]) > 30
    assert reports["empty"].accepted == []


def test_a_checker_that_breaks_on_an_attack_is_reported() -> None:
    reports = try_checker(Crashing(), [5])
    assert all(len(report.accepted) == report.tried == 1 for report in reports.values())


@pytest.mark.parametrize("right", ["5", "-7", "3.5", "1,234", "B", "London", "New York", "晴"])
def test_attacks_hold_the_answer_or_nothing(right: str) -> None:
    assert right not in candidates(right)
    assert len(set(candidates(right))) >= 8
    texts = [text for _, text in text_attacks(right)]
    assert len(texts) == len({kind for kind, _ in text_attacks(right)}) >= 35
    assert all(right.lstrip("-") in text for text in texts if text.strip())


JUNK = ["1", "1,", "5 ", "28°C ", "answer: 5 ", "The answer is ", r"\boxed{", r"\boxed{5}", "<answer>", "####\n",
        "A:\n", "A: 5\n", "-$", " ", "\n", "{", "(", r"\frac", "^", "not ", "or,", "B) ", "5/", "sunny ", "5, or ",
        "1. ", "? ", "晴", "x^", "<answer>6</answer>"]  # fmt: skip


@pytest.mark.parametrize(
    ("checker", "gt"),
    [
        (NumericChecker(), 7),
        (ContainsGt(), ["7", "sunny"]),
        (ExactChecker(), "q"),
        (ChoiceChecker(), "C"),
        (ExpressionChecker(), 7),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Checker) else "",
)
def test_work_on_junk_grows_with_its_length_at_most(checker: Checker, gt: Any) -> None:
    """Calls made, counted: ten times the junk makes about ten times the calls, far from a hundred times."""

    def calls(text: str) -> int:
        count = 0

        def note(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            verdict = check(checker, text, gt)
        finally:
            sys.setprofile(before)
        assert verdict.success is False
        return count

    for piece in JUNK:
        small, large = (calls("The answer is " + piece * (size // len(piece))) for size in (2_000, 20_000))
        assert large <= 15 * small + 500, piece


@pytest.mark.parametrize("piece", JUNK)
def test_a_megabyte_of_junk_is_refused(piece: str) -> None:
    for checker, gt in ((NumericChecker(), 7), (ContainsGt(), ["7"]), (ExactChecker(), "q"), (ExpressionChecker(), 7)):
        for text in (piece * (1_000_000 // len(piece)), piece * (90_000 // len(piece)) + "x"):
            assert check(checker, text, gt).success is False
