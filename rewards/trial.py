"""Trial of a checker: its attacks tried on it. `gymtune envs check` prints the table; the tests want it empty."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .checker import Checker, check


@dataclass(slots=True)
class AttackReport:
    """One kind of attack: how many were tried, and which (answer, gt) were taken, or broke the checker."""

    tried: int = 0
    accepted: list[tuple[Any, Any]] = field(default_factory=list)


def try_checker(checker: Checker, gts: Iterable[Any]) -> dict[str, AttackReport]:
    """Try every attack that the checker knows on every gt; return a report by kind.

    An attack is refused when the verdict is `wrong` or `unparsed`: a checker that breaks on one is fooled as well.
    """
    reports: dict[str, AttackReport] = {}
    for gt in gts:
        for kind, answer in checker.attacks(gt):
            report = reports.setdefault(kind, AttackReport())
            report.tried += 1
            if check(checker, answer, gt).success is not False:
                report.accepted.append((answer, gt))
    return reports
