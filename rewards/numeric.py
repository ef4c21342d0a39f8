"""The numeric checker: one number, stated as the answer, equal to `gt` as a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

from .checker import Checker, Verdict

_NUMBER = r"[-+\u2212]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
_ALONE = re.compile(rf"\$?({_NUMBER})\.?")
#: Ways of saying "this is the answer" that the seeds' data and most models use.
_MARKED = re.compile(
    rf"(?:\banswer(?:\s+is|:|\s*=)\s*|####\s*|\\boxed\{{\s*)\$?({_NUMBER})(?![\d.,]*\d)(?!\w|%|/|\s*[*^])", re.IGNORECASE
)
_ANY_NUMBER = re.compile(r"\d")
_LONGEST_ANSWER = 4000  # characters; a longer one is a dump, not an answer
_RELATIVE_TOLERANCE = Decimal("1e-6")  # for a gt that is no whole number


def parse_number(text: str) -> Decimal | None:
    """Return the number that `text` spells as a whole ("1,234.5", "$3", "-7"), or None."""
    match = _ALONE.fullmatch(text.strip())
    if match is None:
        return None
    try:
        number = Decimal(match[1].replace(",", "").replace("$", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


class NumericChecker(Checker):
    """Right when the answer states exactly one number as its answer and that number equals `gt`.

    Accepted are a text that is nothing but a number, or one marked place ("The answer is 7", "#### 7",
    "\\boxed{7}") after which no other number follows. Several marked places must agree. Whole numbers are compared
    exactly, others within 1e-6 relative. Hedges, lists, negations and dumps are `unparsed`, not guessed at.
    """

    positives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("42", 42),
        (" 42.\n", "42"),
        ("The answer is 1,234.", 1234),
        ("5 apples and 2 pears.\n#### 7", 7),
        (r"So \boxed{-3}", -3),
        ("The answer is 0.3333333", "0.333333333333"),
        ("The answer is $12.50.", "12.5"),
    )
    negatives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("", 5),
        ("15", 5),
        ("The answer is 51", 5),
        ("The answer is 5.1", 5),
        ("The answer is not 5", 5),
        ("The answer is 5 or 6", 5),
        ("The answer is 4. The answer is 5.", 5),
        ("1 2 3 4 5 6 7", 5),
        ("-5", 5),
        ("5%", 5),
        ("The answer is 5/2", 5),
        ("The answer is 5e3", 5),
        ("five", 5),
    )

    def verdict(self, answer: str, gt: Any) -> Verdict:
        """Judge `answer`; `gt` is a number or its text. Raises ValueError when `gt` is no number (-> `broken`)."""
        wanted = parse_number(str(gt))
        if wanted is None:
            raise ValueError(f"gt must be a number, got {gt!r}")
        if len(answer) > _LONGEST_ANSWER:
            return Verdict.unparsed(f"answer of {len(answer)} characters")
        found = _stated(answer)
        if found is None:
            return Verdict.unparsed("no single number is stated as the answer")
        return Verdict.of(_equal(found, wanted), f"stated {found}")


def _stated(answer: str) -> Decimal | None:
    """Return the one number that `answer` states, or None when there is none or more than one."""
    alone = parse_number(answer)
    if alone is not None:
        return alone
    marked = list(_MARKED.finditer(answer))
    if not marked or _ANY_NUMBER.search(answer, marked[-1].end()):
        return None
    numbers = {parse_number(match[1]) for match in marked}
    return numbers.pop() if len(numbers) == 1 else None


def _equal(found: Decimal, wanted: Decimal) -> bool:
    if wanted == wanted.to_integral_value():
        return found == wanted
    return abs(found - wanted) <= _RELATIVE_TOLERANCE * abs(wanted)
