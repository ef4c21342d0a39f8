"""The checker `math_verify`: answers compared by the library of that name (extra `math`), in a killable process.

The library uses `signal.alarm` and computes towers of powers: in our own process it could hang or clear an alarm of the
user's. It also guesses the answer of a text; here it is given the one answer that the text states.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from ..tools.errors import ConfigError
from ..tools.processes import default_pool
from .expression import ExpressionChecker
from .latex import MAX_CHARS, normalise

_PROSE = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{4,}")  # words are no formula; as texts they were compared before


class MathVerifyChecker(ExpressionChecker):
    """As `ExpressionChecker`, with math-verify's notion of equality: it knows functions, matrices and rounding.

    Args:
        timeout: Seconds for one comparison. One that takes longer, or kills its process, makes the verdict `broken`.

    Raises:
        ConfigError: math-verify is not installed, or the timeout is not above 0.
    """

    positives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("5", 5),
        ("<answer>10</answer>", "10"),
        (r"Hence $\boxed{\dfrac{1}{2}}$.", "1/2"),
        ("The answer is 0.333333333.", r"\frac{1}{3}"),
        (r"\boxed{\sin(x)^2 + \cos(x)^2}", r"\cos^2(x) + \sin^2(x)"),
        ("(1, 2)", r"$(1,2)$"),
        ("x = 3", 3),
        ("\u22125", -5),
    )
    negatives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("", 5),
        ("the 2nd answer is x", 2),
        ("12 apples and 3 pears", 3),
        ("5 or 6", 5),
        (r"\boxed{8} \boxed{7}", 7),
        ("0.333", r"\frac{1}{3}"),
        ("2 + 3", 5),
        (r"The answer is not \boxed{5}", 5),
    )

    def __init__(self, timeout: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the checker math_verify needs math-verify: pip install 'gymtune[math]'")
        if not timeout > 0:
            raise ConfigError(f"math_verify: timeout must be a number of seconds above 0, got {timeout!r}")
        self.timeout = timeout

    def same(self, found: str, wanted: str) -> bool:
        """Ask math-verify. Raises TimeoutError or WorkerDied (-> `broken`)."""
        formula = normalise(found)
        if len(formula) > MAX_CHARS or _PROSE.search(formula):
            return False
        return bool(default_pool().call(_verify, found, wanted, timeout=self.timeout))


def _verify(answer: str, gt: str) -> bool:
    """Compare two answers by math-verify; runs in the main thread of a worker, whose own clock ends it."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that the clock is ours
    formulas = ("$" + text.replace("\u2212", "-").replace("$", "") + "$" for text in (gt, answer))
    wanted, found = (parse(formula, [LatexExtractionConfig()], parsing_timeout=None) for formula in formulas)
    return bool(wanted and found) and bool(verify(wanted, found, timeout_seconds=None))
