"""Credit of group methods: how much better an episode did than the other samples of its task."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tools.errors import EnvError
from .config_keys import ScaleRewards

STD_EPSILON = 1e-4
"""Added to a group's deviation before dividing, as in TRL."""


@dataclass(frozen=True)
class GroupStats:
    """What TRL logs of a batch of rewards. None where no known reward (or no pair of them) stands behind a number.

    `reward`: mean of the known rewards. `reward_std`: mean of the groups' unbiased deviations.
    `frac_reward_zero_std`: share of groups that teach nothing (known rewards all equal, or fewer than two).
    """

    reward: float | None
    reward_std: float | None
    frac_reward_zero_std: float | None


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    scale: ScaleRewards = "group",
    leave_one_out: bool = False,
    min_size: int = 2,
    eps: float = STD_EPSILON,
) -> Tensor:
    """Return `(N,)` float32 advantages of N episodes; `groups` says which episodes are samples of one task.

    "none": `r - mean` of the group (Dr. GRPO, arXiv:2503.20783), or with `leave_one_out` `r -` mean of the others
    (RLOO, arXiv:2402.14740). "group": that over `std + eps`, with the unbiased deviation of the group (GRPO,
    arXiv:2402.03300, 4.1.2). "batch": over the deviation of all known rewards (arXiv:2508.08221), or, with
    `leave_one_out`, of all advantages; both as in TRL.

    A reward of None (broken checker, failed episode) is no reward: it enters neither mean nor deviation and its
    advantage is 0. A group with equal rewards, or with fewer than `min_size` known ones (or two), gets exactly 0.
    Computed in float64 with exact sums, so the order of episodes changes no bit.

    Raises `EnvError` for a reward that is not finite.
    """
    by_group = list(_known_by_group(rewards, groups).values())
    least = max(min_size, 2)
    centred = [0.0] * len(rewards)
    divisors = [1.0] * len(rewards)
    for members in by_group:
        values = list(members.values())
        if len(values) < least or not _differ(values):
            continue
        mean, std = _moments(values)
        stretch = len(values) / (len(values) - 1) if leave_one_out else 1.0
        for index, value in members.items():
            centred[index] = (value - mean) * stretch
            divisors[index] = std * stretch + eps if scale == "group" else 1.0
    if scale == "batch":
        known = [value for members in by_group for value in members.values()]
        if leave_one_out:
            known = [centred[index] for members in by_group if len(members) >= least for index in members]
        divisors = [_moments(known)[1] + eps if _differ(known) else 1.0] * len(rewards)
    advantages = [value / divisor for value, divisor in zip(centred, divisors, strict=True)]
    return torch.tensor(advantages, dtype=torch.float64).float()


def whiten(sequences: Sequence[Sequence[float]], eps: float = STD_EPSILON) -> list[list[float]]:
    """Return the values of several sequences with mean 0 and deviation 1, over all of them together.

    `(value - mean) / (std + eps)` with the unbiased deviation; equal values, or a lone one, give exactly 0.
    """
    values = [value for sequence in sequences for value in sequence]
    if not _differ(values):
        return [[0.0] * len(sequence) for sequence in sequences]
    mean, std = _moments(values)
    return [[(value - mean) / (std + eps) for value in sequence] for sequence in sequences]


def group_stats(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> GroupStats:
    """Return the statistics of a batch of rewards, with None and `groups` as in `group_advantages`."""
    by_group = [list(members.values()) for members in _known_by_group(rewards, groups).values()]
    known = [value for values in by_group for value in values]
    stds = [_moments(values)[1] if _differ(values) else 0.0 for values in by_group if len(values) > 1]
    flat = sum(not _differ(values) for values in by_group)
    return GroupStats(
        reward=_mean(known),
        reward_std=_mean(stds),
        frac_reward_zero_std=flat / len(by_group) if by_group else None,
    )


def _known_by_group(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> dict[Hashable, dict[int, float]]:
    """Return, for every group, its known rewards by index (none for a group without any)."""
    known: dict[Hashable, dict[int, float]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = known.setdefault(group, {})
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise EnvError(
                f"episode {index} of group {group!r} has the reward {reward}: wanted a finite number, or None where "
                "the checker broke; mend the environment's reward"
            )
        members[index] = float(reward)
    return known


def _differ(values: Sequence[float]) -> bool:
    """Compare the floats as given: the deviation of equal ones is often not 0 but a residue."""
    return len(values) > 1 and min(values) != max(values)


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and unbiased standard deviation of at least two values."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
