"""Checker: `answer, gt -> Verdict`. A checker that breaks says so; it is never a score of 0."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .attacks import text_attacks
from .episode import Episode

VerdictKind = Literal["right", "wrong", "unparsed", "broken"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a checker found. `score` is finite, and None exactly when the checker itself broke (else ValueError)."""

    kind: VerdictKind
    score: float | None
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.score is None) != (self.kind == "broken") or not math.isfinite(self.score or 0.0):
            raise ValueError(f"a verdict of kind {self.kind!r} cannot have the score {self.score!r}")

    @classmethod
    def of(cls, right: bool, detail: str = "") -> Verdict:
        """Return `right` with score 1 or `wrong` with score 0."""
        return cls("right", 1.0, detail) if right else cls("wrong", 0.0, detail)

    @classmethod
    def unparsed(cls, detail: str) -> Verdict:
        """Return the verdict of a text in which no answer was found: score 0."""
        return cls("unparsed", 0.0, detail)

    @property
    def success(self) -> bool | None:
        """True, False, or None when the checker broke."""
        return None if self.kind == "broken" else self.kind == "right"


class Checker(ABC):
    """Compares an answer with `gt`: a text, or what `judge` takes from the episode in its place.

    Every checker declares cases that any reader can judge: `positives` are right, `negatives` are not. The tests run
    them for every subclass, and the adversarial kinds beside them.
    """

    positives: ClassVar[Sequence[tuple[str, Any]]] = ()
    negatives: ClassVar[Sequence[tuple[str, Any]]] = ()
    #: What of an episode is judged: the last text, the calls, or the state of the tools' world.
    reads: ClassVar[Literal["answer", "calls", "state"]] = "answer"

    @abstractmethod
    def verdict(self, answer: Any, gt: Any) -> Verdict:
        """Judge `answer` against `gt`."""

    def judge(self, episode: Episode) -> Verdict:
        """Judge an episode: by the agent's last text, without thinking and calls; others override this."""
        return self.verdict(episode.answer, episode.gt)

    def wants_nothing(self, gt: Any) -> bool:
        """Tell whether doing nothing is right: no call where none was wanted."""
        return False

    def statement(self, gt: Any) -> str:
        """Return the shortest text that states `gt`; attacks are made of it."""
        return str(gt)

    def attacks(self, gt: Any) -> Iterator[tuple[str, Any]]:
        """Yield (kind, answer) for answers that hold what is right and do not state it; all must be refused."""
        yield from text_attacks(self.statement(gt))


def check(checker: Checker, answer: Any, gt: Any) -> Verdict:
    """Run a checker; a crash becomes the verdict `broken` with score None, so that nobody learns from it."""
    return _guarded(lambda: checker.verdict(answer, gt))


def check_episode(checker: Checker, episode: Episode) -> Verdict:
    """Run a checker on an episode; a crash becomes `broken`, as in `check`."""
    return _guarded(lambda: checker.judge(episode))


def _guarded(judge: Callable[[], Verdict]) -> Verdict:
    try:
        return judge()
    except Exception as error:  # noqa: BLE001 - a checker is user code run on hostile text: its crash is data
        return Verdict("broken", None, f"{type(error).__name__}: {error}")
