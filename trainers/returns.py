"""Returns: what an episode, a turn or a token is worth before it is compared with others.

All start from the rewards of the turns, less their penalties (see `penalties`). An experience without a reward (failed
episode, broken checker) has no return. A control run deals out the rewards of episodes, which turns do not see, so
config refuses it with `credit="turn"`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from ..tools.errors import DataError, EnvError
from .config import TrainConfig
from .experience import Experience
from .penalties import token_penalties, turn_penalties


def episode_return(experience: Experience, config: TrainConfig) -> float | None:
    """Return the episode's reward less all its penalties; None without a reward.

    Raises `EnvError` for a reward that is not finite.
    """
    if experience.reward is None:
        return None
    taken = [*turn_penalties(experience.trajectory, config), *token_penalties(experience, config)]
    return _finite(experience, experience.reward) - math.fsum(taken)


def turn_returns(experience: Experience, config: TrainConfig) -> list[float]:
    """Return, for each turn, what it and the turns after it earned, less their penalties; [] without a reward.

    Raises `EnvError` as `episode_return` does, and `DataError` for a trainable token that lies in no turn.
    """
    if experience.reward is None:
        return []
    earned = _earned(experience, config)
    for turn, taken in zip(_turns(experience), token_penalties(experience, config), strict=True):
        earned[turn] -= taken
    return _to_come(earned)


def token_returns(experience: Experience, config: TrainConfig) -> list[float]:
    """Return, for each trainable token, its reward less the KL of the tokens from it on (arXiv:2501.03262).

    The reward is the episode's, or with `credit="turn"` that of its turn and those after it; each less what turns lost
    for their length. [] without a reward. Raises as `turn_returns` does.
    """
    if experience.reward is None:
        return []
    if config.credit == "turn":
        by_turn = _to_come(_earned(experience, config))
        earned = [by_turn[turn] for turn in _turns(experience)]
    else:
        taken = math.fsum(turn_penalties(experience.trajectory, config))
        earned = [_finite(experience, experience.reward) - taken] * len(experience.places)
    kl_to_come = _to_come(token_penalties(experience, config))
    return [value - kl for value, kl in zip(earned, kl_to_come, strict=True)]


def _earned(experience: Experience, config: TrainConfig) -> list[float]:
    """Return what each turn earned, less what it lost for its length."""
    taken = turn_penalties(experience.trajectory, config)
    turns = experience.trajectory.turns
    return [_finite(experience, turn.reward) - loss for turn, loss in zip(turns, taken, strict=True)]


def _turns(experience: Experience) -> list[int]:
    if -1 in experience.turns:
        raise DataError(
            f"trajectory {experience.trajectory.trajectory_id}: token {experience.places[experience.turns.index(-1)]} "
            "has mask 1 and lies in no turn; credit='turn' wants the spans of the turns, credit='episode' does not"
        )
    return experience.turns


def _finite(experience: Experience, reward: float) -> float:
    if not math.isfinite(reward):
        raise EnvError(
            f"trajectory {experience.trajectory.trajectory_id} has the reward {reward}: wanted a finite number, or "
            "None where the checker broke; mend the environment's reward"
        )
    return reward


def _to_come(values: Sequence[float]) -> list[float]:
    """Return the sums of each value and those after it."""
    return list(accumulate(reversed(values)))[::-1]
