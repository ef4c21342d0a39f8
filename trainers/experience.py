"""Experience: a trajectory on its way to the loss, with what is known of each of its trainable tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..agents.trajectory import Trajectory
from ..tools.errors import DataError

_UNKNOWN = math.nan


@dataclass(slots=True)
class Experience:
    """One trajectory and, for its N trainable tokens in order, lists of N numbers.

    `places`: where each token stands in `trajectory.tokens`. `turns`: the turn that it was said in.
    `sampler_logprobs`: of the policy that sampled it, NaN where nobody did. `old_logprobs`: of the policy at the start
    of the step; the sampler's, unless they were computed anew. `weights`: what its loss is multiplied by, 1 unless the
    gap between the two is corrected. `ref_logprobs`, `values`: of the reference and of the critic; empty without.
    `value_after`: of the critic, after the last token of an episode that was cut off; 0 where it ended by itself.
    `unit`: the experiences of one number go through the model together, for a loss compares them: the two of a pair,
    or all segments of one; None where tokens are judged one by one.
    Credit gives the rest: `advantages`, and for a critic `returns`.
    """

    trajectory: Trajectory
    reward: float | None
    temperature: float
    places: list[int]
    turns: list[int]
    sampler_logprobs: list[float]
    old_logprobs: list[float]
    weights: list[float]
    advantages: list[float]
    ref_logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    value_after: float = 0.0
    returns: list[float] = field(default_factory=list)
    unit: int | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, *, need_logprobs: bool) -> Experience:
        """Look at a trajectory, its advantages 0.

        With `need_logprobs` its tokens count at the temperature they were sampled at, for a ratio must compare like
        with like; without, log-probs are the model's own (temperature 1), whoever wrote the tokens.

        An episode that failed may have none. Raises DataError for a segment that begins with mask 1 (nothing predicts
        its first token), and, when `need_logprobs`, for agent tokens that were not sampled or were sampled greedily.
        """
        sampling = trajectory.sampling if need_logprobs else None
        temperature = 1.0 if sampling is None else sampling.temperature
        if temperature == 0:
            raise DataError(
                f"trajectory {trajectory.trajectory_id} was sampled greedily; RL needs a temperature above 0"
            )
        places = [t for t, trained in enumerate(trajectory.response_mask) if trained]
        if any(start < end and trajectory.response_mask[start] for start, end in trajectory.segments):
            raise DataError(
                f"trajectory {trajectory.trajectory_id}: a segment begins with mask 1, so nothing predicts its "
                "first token; a prompt must come before"
            )
        said = [trajectory.logprobs[t] for t in places]
        if need_logprobs and None in said:
            raise DataError(
                f"trajectory {trajectory.trajectory_id} (agent {trajectory.agent!r}): token "
                f"{places[said.index(None)]} has no log-prob, so no policy sampled it; RL needs sampled "
                "trajectories, SFT takes these"
            )
        sampler = [_UNKNOWN if value is None else value for value in said]
        count = len(places)
        return cls(
            trajectory, trajectory.reward, temperature, places, _turns_of(trajectory, places), sampler, list(sampler),
            [1.0] * count, [0.0] * count,
        )  # fmt: skip

    def give(self, advantage: float) -> None:
        """Give every token the same advantage."""
        self.advantages = [float(advantage)] * len(self.places)


def experiences_of(
    trajectories: Sequence[Trajectory], advantages: Sequence[float] | None = None, *, need_logprobs: bool
) -> list[Experience]:
    """Look at several trajectories, each with one advantage for all its tokens (default 0). See `Experience.of`."""
    found = [Experience.of(trajectory, need_logprobs=need_logprobs) for trajectory in trajectories]
    for experience, advantage in zip(found, advantages or [0.0] * len(found), strict=True):
        experience.give(advantage)
    return found


def _turns_of(trajectory: Trajectory, places: Sequence[int]) -> list[int]:
    """Return the index of the turn that each place lies in; -1 where none does (a hand-made trajectory)."""
    turns, found, turn = trajectory.turns, [], 0
    for place in places:
        while turn < len(turns) and turns[turn].end <= place:
            turn += 1
        inside = turn < len(turns) and turns[turn].start <= place
        found.append(turn if inside else -1)
    return found
