"""Every checker, by registry: its own cases, and the adversarial kinds made from each gt."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from gymtune.rewards import Checker, Verdict, check


def all_checkers(base: type[Checker] = Checker) -> Iterator[type[Checker]]:
    for sub in base.__subclasses__():
        if sub.__module__.startswith("gymtune."):
            yield sub
        yield from all_checkers(sub)


CHECKERS = sorted(set(all_checkers()), key=lambda c: c.__name__)


def adversarial(positive: str, gt: Any) -> Iterator[tuple[str, str]]:
    """Texts that hold the right answer and do not state it, by kind."""
    right = str(gt)
    longer = [f"{right}{d}" if "." not in right else f"{right}e{d}" for d in "123456789"]
    others = [*longer, *(f"{d}{right.lstrip('-')}" for d in "123456789")]
    yield "empty", ""
    yield "blank", " \n\t"
    yield "superstring, after", longer[6]
    yield "superstring, before", f"7{right}"
    yield "superstring, in a sentence", f"The answer is {longer[6]}."
    yield "every candidate", ", ".join([*others, right])
    yield "every candidate, marked", f"The answer is {', '.join([*others, right])}"
    yield "every candidate, each marked", " ".join(f"The answer is {x}." for x in [*others, right])
    yield "prefix", f"{right} {' '.join(others)}"
    yield "negation", f"The answer is not {right}."
    yield "negation of the statement", f"I do not think the answer is {right}"
    yield "negation of a positive", f"This is wrong: {positive} is not it"
    yield "negation, after", f"The answer is {right}, is what a fool would say."
    yield "hedge", f"{right} or {others[0]}"
    yield "hedge, marked", f"The answer is {right} or {others[0]}"
    yield "hedge in words", f"The answer is {right} or something else"
    yield "two answers", f"The answer is {others[0]}. The answer is {right}."
    yield "two answers, right one first", f"The answer is {right}. The answer is {others[0]}."
    yield "two boxes", rf"\boxed{{{right}}} \boxed{{{others[0]}}}"
    yield "number dump", " ".join(map(str, range(-20, 2000))) + f" {right}"
    yield "echo of the question", f"What gives {right}? Answer with the number."
    yield "echo of the question, then of a result", f"What is {right} + 0? {right}"
    yield "echo of a tool result and more", f"{right} calculator {others[0]}"
    yield "echo of a call", f'{{"name": "calculator", "arguments": {{"expression": "{right}"}}}}'


def test_there_are_checkers() -> None:
    assert "NumericChecker" in [c.__name__ for c in CHECKERS]


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
def test_a_checker_survives_the_adversarial_kinds(checker: type[Checker]) -> None:
    for positive, gt in checker.positives:
        for kind, text in adversarial(positive, gt):
            verdict = check(checker(), text, gt)
            assert verdict.success is False, f"{kind}: {text!r} was taken for {gt!r} ({verdict.detail})"


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
