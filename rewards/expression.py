"""The checker of mathematical answers, built in: exact, without a computer algebra system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

from .checker import Checker, Verdict
from .episode import Episode
from .latex import POINTS, finished, key, leaves, normalise, respell, split_name, value
from .stated import DOUBT, stated_answer
from .surds import NotExactError, Surd

_SHOWN = 40  # characters of an answer in a verdict's detail


class ExpressionChecker(Checker):
    """Right when the answer states exactly one expression and it equals `gt`: by value, or as normalised text.

    Read by value are numbers, fractions, roots, powers, polynomials, complex numbers, tuples, intervals and their
    unions, sets and lists (in any order), in LaTeX or plain; 50% is 1/2; units are dropped; "x =" may stand before.
    Equality is exact: 0.333 is not 1/3. A number must be worked out: 6/2, 2+3 and 2^10 are no answers, unless `gt`
    has that very text; so an answer that repeats a computation of the question earns nothing. What is not understood is
    compared as text.
    """

    positives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("5", 5),
        ("The answer is 0.5.", r"\frac{1}{2}"),
        (r"Hence $\boxed{\dfrac{1}{2}}$.", "1/2"),
        (r"\boxed{50\%}", "0.5"),
        ("<answer>1,234</answer>", "1234"),
        (r"\boxed{1\frac12}", "3/2"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}"),
        ("The answer is x^2 + 2x + 1", "(x+1)^2"),
        ("x = 3", 3),
        ("(1, 2)", r"\left(1,2\right)"),
        ("{2, 1}", r"\{1, 2\}"),
        ("The answer is -2, 1.", "1,-2"),
        (r"$(-\infty, 2) \cup (3, \infty)$", r"(3,\infty)\cup(-\infty,2)"),
        (r"\boxed{4\pi \text{ cm}^2}", r"4\pi"),
        (r"\boxed{30^\circ}", "30"),
        ("5 apples", 5),
        (r"\boxed{3+4i}", "4i + 3"),
        (r"\boxed{\text{Evelyn}}", "Evelyn"),
        ("So 3 + 4 = 7.\n#### 7", 7),
    )
    negatives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("", 5),
        ("15", 5),
        ("0.333", "1/3"),
        ("2 + 3", 5),
        ("10/2", 5),
        (r"2^{10}", 1024),
        (r"\frac{2}{4}", "1/2"),
        ("0 x", 0),
        ("5 or 6", 5),
        ("5 thousand", 5),
        (r"\boxed{5} or \boxed{6}", 5),
        (r"The answer is not \boxed{5}", 5),
        (r"\boxed{5\text{ is wrong}}", 5),
        ("x = 3", "y = 3"),
        ("5\n6", 5),
        ("(2, 1)", "(1, 2)"),
        ("[1, 2]", "(1, 2)"),
        ("{1, 2, 3}", r"\{1, 2\}"),
        ("x^2 + 2x", "(x+1)^2"),
        ("3.14", r"\pi"),
        ("act", "cat and dog"),
        ("9^9^9", 5),
        ("((((((((((((((((((((((((((5))))))))))))))))))))))))))", 6),
        ("1/0", 5),
    )

    def verdict(self, answer: str, gt: Any) -> Verdict:
        """Judge `answer`; `gt` is a number or text. Raises ValueError for any other gt (-> `broken`)."""
        wanted = self.statement(gt)
        found = stated_answer(answer)
        if found is None:
            return Verdict.unparsed("no single answer is stated")
        detail = f"stated {found:.{_SHOWN}}"
        if key(normalise(found)) == key(normalise(wanted)):
            return Verdict.of(True, detail)
        if "\n" in found or DOUBT.search(found):
            return Verdict.unparsed("more than one answer, or a doubtful one")
        if not _worked_out(found):
            return Verdict.unparsed(f"a number that is not worked out: {found:.{_SHOWN}}")
        return Verdict.of(self.same(found, wanted), detail)

    def same(self, found: str, wanted: str) -> bool:
        """Tell whether two stated answers, which differ as texts, have the same value."""
        return _equal(found, wanted)

    def judge(self, episode: Episode) -> Verdict:
        """Judge the agent's last text. An expression of the question is `unparsed`, unless it is `gt` itself."""
        found = normalise(stated_answer(episode.answer) or "")
        copied = not finished(found) and len(key(found)) > 1 and key(found) in key(respell(episode.question))
        if copied and key(found) != key(normalise(self.statement(episode.gt))):
            return Verdict.unparsed("the answer is a copy of what the question says")
        return self.verdict(episode.answer, episode.gt)

    def statement(self, gt: Any) -> str:
        """Return `gt` as text. Raises ValueError when it is no number or text, or empty."""
        if isinstance(gt, bool) or not isinstance(gt, str | int | float | Decimal | Fraction):
            raise ValueError(f"gt must be a number or a text, got {gt!r}")
        text = stated_answer(str(gt))
        if not text:
            raise ValueError(f"gt must state one answer, got {gt!r}")
        return text

    def attacks(self, gt: Any) -> Iterator[tuple[str, Any]]:
        """Yield the attacks on any text, and for a number computations that are not worked out."""
        yield from super().attacks(gt)
        right = self.statement(gt)
        if finished(normalise(right)):
            yield "a sum in place of the number", f"{right} + 0"
            yield "a product in place of the number", rf"\boxed{{1 \cdot {right}}}"
            yield "a power in place of the number", f"({right})^1"


def _worked_out(found: str) -> bool:
    """Tell whether every number in an answer is worked out; what is no number, or not understood, passes."""
    try:
        parts = leaves(split_name(normalise(found))[1])
        return all(finished(part) or not _is_number(part) for part in parts)
    except NotExactError:
        return True


def _is_number(part: str) -> bool:
    """Tell whether an expression is a rational number, the same one at every point."""
    values = {value(part, point) for point in range(POINTS)}
    only = values.pop()
    return not values and isinstance(only, Surd) and only.rational is not None


def _equal(found: str, wanted: str) -> bool:
    """Tell whether two answers name no different variables and are of equal value at every point."""
    (name, left), (wanted_name, right) = (split_name(normalise(text)) for text in (found, wanted))
    if name and wanted_name and name != wanted_name:
        return False
    try:
        return all(value(left, point) == value(right, point) for point in range(POINTS))
    except NotExactError:
        return False
