"""Evaluation on a file: the loss, and what the algorithm measures, of records that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from ..agents.trajectory import Trajectory
from ..tools.errors import RunError
from .experience import Experience


class Judge(Protocol):
    """What of an `Updater` is asked."""

    def evaluate(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Return loss and metrics of experiences that have their credit."""
        ...


class HeldOutFile:
    """The held-out records of a run.

    Args:
        trajectories: the replies, in the order in which credit takes them: of pairs, chosen and rejected in turn.
        credit: what the trainer makes of the episodes of a step.
        judge: the trainer's updater.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        credit: Callable[[Sequence[Trajectory]], list[Experience]],
        judge: Judge,
    ) -> None:
        self.trajectories, self.credit, self.judge = trajectories, credit, judge

    def evaluate(self, on_stall: Callable[[list[str]], None] = lambda _: None) -> dict[str, float]:
        """Return `eval/*` of all records as one batch, averaged as a batch of training is; nothing is changed.

        `on_stall` is never called: nothing is waited for. Raises RunError for a loss that is not finite.
        """
        began = perf_counter()
        found = self.judge.evaluate(self.credit(self.trajectories))
        if not math.isfinite(found["loss"]):
            raise RunError(f"evaluation: the loss on the held-out file is {found['loss']}; lower learning_rate")
        metrics = {f"eval/{name}": value for name, value in found.items() if name != "grad_norm"}
        return metrics | {"time/eval": perf_counter() - began}
