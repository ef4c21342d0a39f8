"""Sampling ahead: while a step trains, a thread samples the episodes of those to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..agents.trajectory import Trajectory

Sampled = tuple[list[Trajectory], dict[str, float]]
"""The episodes of a step, and what there is to say of their sampling."""


class RunAhead:
    """Hands out the episodes of steps in order; those of the next `ahead` steps are sampled meanwhile.

    Args:
        sample: samples the episodes of a step (0-based).
        ahead: how many steps sampling may be before training; with 0 it is called in the caller's thread, in turn.
        steps: of the run: nothing is sampled beyond.

    One thread samples one step after the other, each with the weights that the backend has then: episodes that train
    step n + `ahead` began no earlier than step n, so they are at most `ahead` versions old.
    """

    def __init__(self, sample: Callable[[int], Sampled], ahead: int, steps: int) -> None:
        self.sample, self.ahead, self.steps = sample, ahead, steps
        self._begun: dict[int, Future[Sampled]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def take(self, step: int) -> Sampled:
        """Return what was sampled for a step, and let the next ones begin. Raises what sampling it raised."""
        if self.ahead == 0:
            return self.sample(step)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="gymtune-sampling")
        for wanted in range(step, min(step + self.ahead + 1, self.steps)):
            if wanted not in self._begun:
                self._begun[wanted] = self._thread.submit(self.sample, wanted)
        return self._begun.pop(step).result()

    def close(self) -> None:
        """Forget what is sampled ahead; a step that is being sampled now is waited for: close the backend before."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
            self._begun.clear()


def ages(trajectory: Trajectory, version: int) -> list[tuple[int, int]]:
    """Return (how many versions old, number of tokens) of all that weights of known versions sampled."""
    found = []
    for turn in trajectory.turns:
        if turn.policy_version is None:
            continue
        spans = turn.policy_spans or [(turn.policy_version, turn.start, turn.end)]
        found += [(version - sampled_by, end - start) for sampled_by, start, end in spans if end > start]
    return found


def drop_stale(
    trajectories: Sequence[Trajectory], version: int, most: int | None
) -> tuple[list[Trajectory], dict[str, float]]:
    """Return the episodes with those failed that hold a token more than `most` versions old, and `staleness/*`.

    A failed episode is in neither loss nor baseline. Staleness is counted in versions of the weights, behind `version`:
    its mean over the sampled tokens, its greatest value, and how many episodes were dropped for it.
    """
    kept, dropped, everything = [], 0, []
    for trajectory in trajectories:
        found = ages(trajectory, version)
        everything += found
        oldest = max((age for age, _ in found), default=0)
        if most is not None and oldest > most:
            dropped += 1
            told = f"dropped: sampled by weights {oldest} versions old, drop_staleness is {most}"
            trajectory = trajectory.model_copy(update={"error": told})  # noqa: PLW2901 - the file has it as it was
        kept.append(trajectory)
    tokens = sum(count for _, count in everything)
    return kept, {
        "staleness/mean": sum(age * count for age, count in everything) / max(tokens, 1),
        "staleness/max": float(max((age for age, _ in everything), default=0)),
        "staleness/dropped": float(dropped),
    }
