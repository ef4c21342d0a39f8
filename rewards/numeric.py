"""The numeric checker: one number, stated as the answer, equal to `gt` as a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, ClassVar

from .checker import Checker, Verdict
from .stated import MARK, MAX_STATEMENTS, doubted, is_unit

# Possessive quantifiers (`++`, `?+`) never give back what they took: hostile text costs linear time.
_NUMBER = r"[-+\u2212]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]{1,3})?+"
_ALONE = re.compile(rf"\$?({_NUMBER})\.?")
_MARK = rf"{MARK}|\\boxed\{{|<answer>|^A:"
_MARKED = re.compile(rf"(?:{_MARK})[\s*$]*+({_NUMBER}(?:[.,]?[\w%/^])*+)", re.IGNORECASE | re.MULTILINE)
_UNIT = re.compile(r"[ ]++(?:(?:per|an?)[ ]([A-Za-z]++)|([A-Za-z]++)(?:[ ](?:per|of|an?)[ ]([A-Za-z]++))?+)")
_CLOSING = re.compile(r"(?:[\s.。*$})\]\\]|</answer>)*+")  # full stop, end of bold, box or formula
_SHOWN = 40  # characters of a number in a verdict's detail
_RELATIVE_TOLERANCE = Decimal("1e-6")  # for a gt that is no whole number


def parse_number(text: str) -> Decimal | None:
    """Return the number that `text` spells as a whole ("1,234.5", "$3", "-7", "2e3"), or None. Linear time."""
    match = _ALONE.fullmatch(text.strip())
    if match is None:
        return None
    return Decimal(match[1].replace(",", "").replace("$", "").replace("\u2212", "-"))


class NumericChecker(Checker):
    """Right when the answer states exactly one number as its answer and that number equals `gt`.

    Accepted are a text that is nothing but a number, or one that ends with a marked number ("The answer is 7.",
    "#### 7", "\\boxed{7}", "<answer>7</answer>", "A: 7" on a line), a unit such as "apples" after it allowed;
    whatever reasoning stands before, its marked numbers must agree. Whole numbers are compared exactly, others within
    1e-6 relative. Hedges, lists, negations and dumps are `unparsed`, not guessed at.
    """

    positives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("42", 42),
        (" 42.\n", "42"),
        ("-7", -7),
        ("The answer is 1,234.", 1234),
        ("Answer: 7", 7),
        ("No, the answer is **7**.", 7),
        ("5 apples and 2 pears.\n#### 7", 7),
        (r"So \boxed{-3}", -3),
        (r"The final answer is $\boxed{42}$.", 42),
        ("The answer is 0.3333333", "0.333333333333"),
        ("The answer is $12.50.", "12.5"),
        ("The answer is 5, I think. I checked it: the answer is 5.", 5),
        ("3 + 4 is 7. <answer>7</answer>", 7),
        ("The answer is 7 apples.", 7),
        ("Answer: $12 per day", 12),
        ("She has 9 * 2 = $<<9*2=18>>18 left\nA: 18", 18),
        ("答案是28。", 28),
    )
    negatives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("", 5),
        ("15", 5),
        ("The answer is 51", 5),
        ("The answer is 5.1", 5),
        ("The answer is not 5", 5),
        ("I do not think that the answer is 5.", 5),
        ("The wrong answer is 5", 5),
        (r"It isn't \boxed{5}", 5),
        ("The answer is 5, or not.", 5),
        ("The answer is 5? No.", 5),
        ("The answer is 5 or 6", 5),
        ("The answer is 5 or six", 5),
        ("The answer is 4. The answer is 5.", 5),
        ("The answer is 5/2. The answer is 5.", 5),
        ("The answer is 5%, so the answer is 5", 5),
        ("1 2 3 4 5 6 7", 5),
        ("-5", 5),
        ("5%", 5),
        ("5!", 5),
        ("The answer is 5/2", 5),
        ("The answer is 5e3", 5),
        ("The answer is 5,000", 5),
        ("3 + 5 = 8\nnot #### 5", 5),
        ("five", 5),
        ("The answer is 5 thousand.", 5),
        ("The answer is 5 percent", 5),
        ("The answer is 5 squared", 5),
        ("The answer is 5 apples and 3 pears.", 5),
        ("The answer is 5 apples. The answer is 6 pears.", 5),
        ("The answer is 5 hundred. The answer is 5.", 5),
        ("<answer>5</answer> <answer>6</answer>", 5),
        ("<answer>5 or 6</answer>", 5),
        ("A: 5\nB: 6", 5),
        ("A: 6\nA: 5 6", 5),
        ("答案不是5", 5),
    )

    def verdict(self, answer: str, gt: Any) -> Verdict:
        """Judge `answer`; `gt` is a number or its text. Raises ValueError when `gt` is no number (-> `broken`)."""
        wanted = parse_number(str(gt))
        if wanted is None:
            raise ValueError(f"gt must be a number, got {gt!r}")
        found = _stated(answer)
        if found is None:
            return Verdict.unparsed("no single number is stated as the answer")
        return Verdict.of(equal(found, wanted), f"stated {found!s:.{_SHOWN}}")


def _stated(answer: str) -> Decimal | None:
    """Return the one number that `answer` states, or None when there is none, more than one, or any doubt."""
    alone = parse_number(answer)
    if alone is not None:
        return alone
    numbers: set[Decimal | None] = set()  # None for a mark that goes on as something else, such as 5/2
    end = 0
    for count, mark in enumerate(_MARKED.finditer(answer), 1):
        end = mark.end()
        unit = _UNIT.match(answer, end)
        if unit and not all(is_unit(word) for word in unit.groups() if word):
            numbers.add(None)  # "5 thousand", "5 or"
        else:
            numbers.add(parse_number(mark[1]))
            end = unit.end() if unit and _CLOSING.fullmatch(answer, unit.end()) else end
        if len(numbers) > 1 or count > MAX_STATEMENTS or doubted(answer, mark.start()):
            return None
    return numbers.pop() if numbers and _CLOSING.fullmatch(answer, end) else None


def equal(found: Decimal, wanted: Decimal) -> bool:
    """Tell whether two numbers are equal: exactly when `wanted` is whole, else within 1e-6 relative."""
    if wanted == wanted.to_integral_value():
        return found == wanted
    return abs(found - wanted) <= _RELATIVE_TOLERANCE * abs(wanted)
