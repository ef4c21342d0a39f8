"""GRPO: group-relative advantages, PPO's clipped surrogate."""

from __future__ import annotations

from collections.abc import Sequence

from ..agents.trajectory import Trajectory
from .advantages import group_advantages
from .algorithm import Algorithm, TokenBatch
from .config import TrainConfig
from .losses import TokenLosses, grpo_token_loss


class GRPO(Algorithm):
    """DeepSeekMath, arXiv:2402.03300: no critic, a group's mean is the baseline of its samples.

    Assumes that the samples of a group differ in reward; a group of equals teaches nothing. Old log-probs are the
    sampler's own, so the first pass over a batch has ratio 1 up to the sampler's numerics.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high

    def credit(self, trajectories: Sequence[Trajectory], rewards: Sequence[float | None]) -> list[float]:
        """(reward - mean of the group) / deviation of the group."""
        groups = [trajectory.group_id for trajectory in trajectories]
        return group_advantages(rewards, groups, scale=self.config.scale_rewards).tolist()

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """-min(r A, clip(r) A)."""
        return grpo_token_loss(
            tokens.logprobs, tokens.old_logprobs, tokens.advantages, self.config.epsilon, self.epsilon_high
        )
