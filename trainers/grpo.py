"""GRPO: group-relative advantages, PPO's clipped surrogate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .advantages import group_advantages
from .algorithm import Algorithm, TokenBatch
from .config import TrainConfig
from .experience import Experience
from .losses import TokenLosses, clipped_surrogate, importance_ratio
from .returns import episode_return, turn_returns


class GRPO(Algorithm):
    """DeepSeekMath, arXiv:2402.03300: no critic, a group's mean is the baseline of its samples.

    Assumes that the samples of a group differ in reward; a group of equals teaches nothing. Old log-probs are the
    sampler's own, so the first pass over a batch has ratio 1 up to the sampler's numerics. With other values of its
    keys it is Dr. GRPO (arXiv:2503.20783: nothing is divided by), DAPO (arXiv:2503.14476: a higher upper bound, groups
    of equals sampled anew) and GSPO (arXiv:2507.18071: the ratio is the sequence's); see `presets`.
    """

    leave_one_out: ClassVar[bool] = False
    """Whether an episode's own reward is left out of its baseline."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high

    def credit(self, experiences: Sequence[Experience]) -> None:
        """(return - baseline of the group) / deviation: one advantage an episode, or one a turn (`credit`).

        A turn's return is compared with those of the same turn in the group's other samples, as far as they have one.
        """
        if self.config.credit == "episode":
            returns = [episode_return(experience, self.config) for experience in experiences]
            for experience, advantage in zip(experiences, self._compare(experiences, returns), strict=True):
                experience.give(advantage)
            return
        by_turn = [turn_returns(experience, self.config) for experience in experiences]
        advantages = []  # by turn, then by episode
        for turn in range(max(map(len, by_turn), default=0)):
            returns = [values[turn] if turn < len(values) else None for values in by_turn]
            advantages.append(self._compare(experiences, returns))
        for index, (experience, known) in enumerate(zip(experiences, by_turn, strict=True)):
            turns = experience.turns if known else []
            experience.advantages = [advantages[turn][index] for turn in turns] or [0.0] * len(experience.places)

    def _compare(self, experiences: Sequence[Experience], returns: Sequence[float | None]) -> list[float]:
        """Return the advantage of each return within its group; 0 for None."""
        advantages: list[float] = group_advantages(
            returns,
            [experience.trajectory.group_id for experience in experiences],
            scale=self.config.scale_rewards,
            leave_one_out=self.leave_one_out,
            min_size=self.config.min_group_size,
        ).tolist()
        return advantages

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """-min(r A, clip(r) A)."""
        ratio = importance_ratio(
            tokens.logprobs, tokens.old_logprobs, tokens.row, self.config.importance_sampling_level
        )
        return clipped_surrogate(ratio, tokens.advantages, self.config.epsilon, self.epsilon_high)
