"""Generalized advantage estimation over the tokens that the agent said; what others wrote between them is no time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..tools.errors import EnvError
from .config import TrainConfig
from .experience import Experience
from .penalties import token_penalties, turn_penalties


def gae(
    rewards: Sequence[float], values: Sequence[float], value_after: float, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Return advantages and returns of the N trainable tokens of an episode (arXiv:1506.02438 eq. 11, 16).

    `d_t = r_t + gamma V_{t+1} - V_t`, `A_t = d_t + gamma lam A_{t+1}`, and the return, what the critic should have
    said, is `A_t + V_t`. `V_t` is the value of what stands before token t; `value_after`, of what stands after the last
    one: 0 where the episode ended by itself, the critic's where it was cut off. Computed in float64.
    """
    advantages = [0.0] * len(rewards)
    following, value = 0.0, value_after
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * value - values[t] + gamma * lam * following
        advantages[t], value = following, values[t]
    return advantages, [advantage + own for advantage, own in zip(advantages, values, strict=True)]


def token_rewards(experience: Experience, config: TrainConfig) -> list[float]:
    """Return what each of the N trainable tokens earned, less its penalties (see `penalties`); [] without a token.

    The reward of a turn sits on the last of its tokens; what no turn with tokens earned, on the last of the episode. In
    a control run rewards are dealt out by episodes, so that all of it sits there. The reward must be known.

    Raises `EnvError` for one that is not finite, `RunError` as `token_penalties` does.
    """
    rewards = [0.0] * len(experience.places)
    if not rewards:
        return rewards
    whole, trajectory = experience.reward, experience.trajectory
    if whole is None or not math.isfinite(whole):
        raise EnvError(
            f"trajectory {trajectory.trajectory_id} has the reward {whole}: wanted a finite number; mend the "
            "environment's reward"
        )
    by_turn = config.control == "none"
    earned = [turn.reward if by_turn else 0.0 for turn in trajectory.turns]
    last = {turn: index for index, turn in enumerate(experience.turns)}
    for number, (reward, taken) in enumerate(zip(earned, turn_penalties(trajectory, config), strict=True)):
        rewards[last.get(number, -1)] += reward - taken
    rewards[-1] += whole - sum(earned)
    penalties = token_penalties(experience, config)
    return [reward - taken for reward, taken in zip(rewards, penalties, strict=True)]
