"""What every contest shares: settings, contenders that alternate, medians, ratios, the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

Contender = Callable[[], float]
"""Does its work once and returns its rate, in units a second."""


@dataclass(frozen=True)
class Settings:
    """How to run: measured `rounds` after one to warm up; `quick` takes toy sizes, to see that everything runs.

    `scratch` holds the models of the run; `peer_python` is an interpreter that has TRL (None: that contest is left
    out). `threads` is what both sides compute with.
    """

    scratch: Path
    rounds: int = 5
    quick: bool = False
    threads: int = 1
    peer_python: str | None = None

    def pick(self, full: int, quick: int) -> int:
        """Return a size: the real one, or that of a quick look."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Result:
    """One line of the table. Figures are medians over the rounds, `ratios` those of each round (ours to the peer's)."""

    contest: str
    peer: str
    unit: str
    ours: float | None = None
    theirs: float | None = None
    ratio: float | None = None
    wanted: float | None = None
    ratios: list[float] = field(default_factory=list)
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        return asdict(self)


def rate(work: Callable[[], float]) -> Contender:
    """Return a contender that times `work`, which returns how many units it did."""

    def timed() -> float:
        began = perf_counter()
        done = work()
        return done / (perf_counter() - began)

    return timed


def compete(
    contest: str,
    unit: str,
    contenders: Mapping[str, Contender],
    settings: Settings,
    *,
    wanted: Mapping[str, float] | None = None,
    detail: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Let the contenders alternate and return a result for each peer; ours is the first contender.

    A round in which the machine was slower slows both sides, so ratios are taken round by round. Every other round
    runs in reverse order, so that nobody always comes second. Alone, ours gives a line without a ratio.
    """
    order = list(contenders)
    rates: dict[str, list[float]] = {who: [] for who in order}
    for who in order:
        contenders[who]()  # warm-up: allocator, caches, lazy imports
    for _ in range(settings.rounds):
        for who in order:
            rates[who].append(contenders[who]())
        order.reverse()
    return results(contest, unit, {who: rates[who] for who in contenders}, wanted=wanted, detail=detail)


def results(
    contest: str,
    unit: str,
    rates: Mapping[str, list[float]],
    *,
    wanted: Mapping[str, float] | None = None,
    detail: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Return a line for each peer from the rates of each round; the first name is ours."""
    (_, ours), *peers = rates.items()
    more = dict(detail or {})
    if not peers:
        return [Result(contest, "-", unit, ours=median(ours), detail=more)]
    lines = []
    for peer, theirs in peers:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        lines.append(
            Result(
                contest, peer, unit, median(ours), median(theirs), median(ratios), (wanted or {}).get(peer), ratios,
                detail=more,
            )
        )  # fmt: skip
    return lines


_COLUMNS = f"{'ours':>10} {'theirs':>10} {'unit':<10} {'ratio (lowest..highest)':<24} wanted"
HEADER = f"{'contest':<34} {'against':<34} {_COLUMNS}"


def line(result: Result) -> str:
    """Return a result as a line of the table."""
    name = f"{result.contest:<34} {result.peer:<34}"
    if result.ours is None:
        return f"{name} left out: {result.note}"
    ours = f"{_short(result.ours):>10} {_short(result.theirs):>10} {result.unit:<10}"
    if result.ratio is None:
        return f"{name} {ours} {result.note}".rstrip()
    spread = f"({min(result.ratios):.2f}..{max(result.ratios):.2f})" if result.ratios else ""
    verdict = ""
    if result.wanted is not None:
        verdict = f"{result.wanted:g}{'' if result.ratio >= result.wanted else '  MISSED'}"
    note = f"\n    {result.note}" if result.note else ""
    return f"{name} {ours} {result.ratio:>6.2f} {spread:<17} {verdict}".rstrip() + note


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
