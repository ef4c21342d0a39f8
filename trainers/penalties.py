"""What is taken off a reward before it is compared: for turns that nearly did not end, and for leaving the reference.

The trajectory keeps what it earned; these numbers exist in credit alone.
"""

from __future__ import annotations

import torch

from ..agents.trajectory import Trajectory
from ..tools.errors import RunError
from .config import TrainConfig
from .experience import Experience
from .losses import kl_estimate


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's soft punishment (arXiv:2503.14476 eq. 13), turned positive: 0 to 1 for a turn of `length` tokens.

    It is 0 up to `longest - buffer` tokens, grows linearly over the `buffer` tokens behind them, and is 1 at `longest`.
    """
    return min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


def turn_penalties(trajectory: Trajectory, config: TrainConfig) -> list[float]:
    """Return what each turn loses for its length: `max_completion_length` bounds a turn, so each is judged alone.

    An episode loses the sum over its turns, as it earns the sum of their rewards. All 0 without `overlong_buffer`.
    """
    longest, buffer = config.max_completion_length, config.overlong_buffer
    if buffer is None:
        return [0.0] * len(trajectory.turns)
    return [overlong_penalty(turn.end - turn.start, longest, buffer) for turn in trajectory.turns]


def token_penalties(experience: Experience, config: TrainConfig) -> list[float]:
    """Return what each of the N trainable tokens loses: `beta` times its KL, where the KL counts in the reward.

    The KL is estimated (`kl_estimator`) at the policy that sampled, from `old_logprobs` and `ref_logprobs`; all 0 where
    it counts in the loss or not at all. Raises `RunError` when the reference's log-probs were not computed.
    """
    if config.beta == 0 or config.kl_in == "loss":
        return [0.0] * len(experience.places)
    return [config.beta * kl for kl in token_kl(experience, config)]


def token_kl(experience: Experience, config: TrainConfig) -> list[float]:
    """Return the estimated KL (old policy || reference) of each trainable token. Raises as `token_penalties` does."""
    old, reference = experience.old_logprobs, experience.ref_logprobs
    if len(old) != len(reference):
        raise RunError(
            f"trajectory {experience.trajectory.trajectory_id}: the KL needs the reference's log-probs of its "
            f"{len(old)} tokens, came {len(reference)}; call Updater.annotate before credit"
        )
    pair = torch.tensor([old, reference], dtype=torch.float64)
    estimates: list[float] = kl_estimate(pair[0], pair[1], config.kl_estimator).tolist()
    return estimates
