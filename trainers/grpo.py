"""GRPO: group-relative advantages, PPO's clipped surrogate."""

from __future__ import annotations

from collections.abc import Sequence

from .advantages import group_advantages
from .algorithm import Algorithm, TokenBatch
from .config import TrainConfig
from .experience import Experience
from .losses import TokenLosses, grpo_token_loss


class GRPO(Algorithm):
    """DeepSeekMath, arXiv:2402.03300: no critic, a group's mean is the baseline of its samples.

    Assumes that the samples of a group differ in reward; a group of equals teaches nothing. Old log-probs are the
    sampler's own, so the first pass over a batch has ratio 1 up to the sampler's numerics.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high

    def credit(self, experiences: Sequence[Experience]) -> None:
        """(reward - mean of the group) / deviation of the group, the same for every token of an episode."""
        groups = [experience.trajectory.group_id for experience in experiences]
        rewards = [experience.reward for experience in experiences]
        advantages = group_advantages(rewards, groups, scale=self.config.scale_rewards)
        for experience, advantage in zip(experiences, advantages.tolist(), strict=True):
            experience.give(advantage)

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """-min(r A, clip(r) A)."""
        return grpo_token_loss(
            tokens.logprobs, tokens.old_logprobs, tokens.advantages, self.config.epsilon, self.epsilon_high
        )
