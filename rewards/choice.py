"""The choice checker: one letter of a multiple choice, stated as the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from .checker import Checker, Verdict
from .stated import DOUBT, stated_answer

_GT = re.compile(r"\(?([A-J])\)?")
_LETTER = re.compile(r"\(?\s*(?:\\text\{\s*)?\(?([A-J])\)?\s*\}?\s*\)?[.:]?")
_WITH_TEXT = re.compile(r"(?:\(([A-J])\)[.:]?|([A-J])[).:])\s+(\S.{0,200})")  # "B) Paris"
#: Another option beside the first: "(C)", "C.", "and C", "/C", or a text that is letters only.
_ANOTHER = re.compile(r"(?<![A-Za-z])\(?[A-J][).:](?!\w)|(?:\band|&|,|/|;|和)\s*\(?[A-J]\b|^[\sA-J,;/&()]+$")
_BOTH = re.compile(r"\b(?:both|all|none|any|each|neither)\b", re.IGNORECASE)


class ChoiceChecker(Checker):
    """Right when the answer states exactly one letter from A to J and it is `gt`.

    The letter stands alone (then its case does not count), marked ("The answer is (B)."), or before its option's text
    ("B) Paris"). Several letters, "both" and doubts are `unparsed`.
    """

    positives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("B", "B"),
        ("b", "B"),
        ("(B)", "(B)"),
        ("B.", "B"),
        ("**B**", "B"),
        ("The answer is (B).", "B"),
        ("Paris is the capital, so the answer is B", "B"),
        (r"Hence \boxed{\text{B}}.", "B"),
        ("<answer>J</answer>", "J"),
        ("B) Paris", "B"),
        ("The answer is (C): A dog.", "C"),
        ("答案是B。", "B"),
    )
    negatives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("", "B"),
        ("A", "B"),
        ("A or B", "B"),
        ("A, B, C, D", "B"),
        ("not B", "B"),
        ("Both", "B"),
        ("because", "B"),
        ("A dog", "A"),
        ("I think so", "I"),
        ("The answer is not B.", "B"),
        ("The answer is B or C.", "B"),
        ("B) and C)", "B"),
        ("B) C) D)", "B"),
        ("B. Both of them", "B"),
        ("B) London; C) Paris", "B"),
        ("B) not this one", "B"),
        ("The answer is A. The answer is B.", "B"),
        ("BCD", "B"),
    )

    def verdict(self, answer: str, gt: Any) -> Verdict:
        """Judge `answer`; `gt` is a letter, "B" or "(B)". Raises ValueError for any other gt (-> `broken`)."""
        wanted = self.statement(gt)
        letter = _letter(answer)
        if letter is None:
            return Verdict.unparsed("no single letter is stated")
        return Verdict.of(letter == wanted, f"stated {letter}")

    def statement(self, gt: Any) -> str:
        """Return the letter. Raises ValueError for a gt that is none from A to J."""
        match = _GT.fullmatch(gt.strip()) if isinstance(gt, str) else None
        if match is None:
            raise ValueError(f"gt must be a letter from A to J, got {gt!r}")
        return match[1]


def _letter(answer: str) -> str | None:
    """Return the one letter that `answer` states, or None."""
    found = stated_answer(answer)
    if found is None:
        return None
    alone = found == answer.strip().rstrip(".")
    letter = _LETTER.fullmatch(found.upper() if alone and len(found) <= 3 else found)
    if letter:
        return letter[1]
    option = _WITH_TEXT.fullmatch(found)
    if option is None or any(pattern.search(option[3]) for pattern in (DOUBT, _ANOTHER, _BOTH)):
        return None
    return option[1] or option[2]
