"""PPO: a critic beside the policy, advantages of single tokens, both losses clipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .advantages import whiten
from .algorithm import Algorithm, TokenBatch
from .config import TrainConfig
from .experience import Experience
from .gae import gae, token_rewards
from .losses import TokenLosses, grpo_token_loss


class PPO(Algorithm):
    """Proximal policy optimization, arXiv:1707.06347, on the tokens of an agent.

    A token is an action, what stands before it the state. The reward of a turn comes with its last token; a critic
    learns what is still to come, so a group is not needed, and turns of one episode are told apart. Episodes that were
    cut off go on at the critic's value of where they stood.
    """

    critic = True

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high

    def credit(self, experiences: Sequence[Experience]) -> None:
        """GAE over the trainable tokens, whitened over those of all episodes that are in the loss."""
        config = self.config
        for experience in experiences:
            if experience.reward is None:
                experience.give(0.0)
                experience.returns = list(experience.values)
                continue
            rewards, after = token_rewards(experience, config), experience.value_after
            experience.advantages, experience.returns = gae(rewards, experience.values, after, config.gamma, config.lam)
        if config.whiten_advantages:
            trained = [experience for experience in experiences if self.trains(experience)]
            advantages = whiten([experience.advantages for experience in trained])
            for experience, values in zip(trained, advantages, strict=True):
                experience.advantages = values

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """-min(r A, clip(r) A), and the squared error of the value, which is clipped too."""
        assert tokens.values is not None
        assert tokens.old_values is not None
        assert tokens.returns is not None
        policy = grpo_token_loss(
            tokens.logprobs, tokens.old_logprobs, tokens.advantages, self.config.epsilon, self.epsilon_high
        )
        loss, clipped = value_token_loss(tokens.values, tokens.old_values, tokens.returns, self.config.cliprange_value)
        return replace(policy, value_loss=loss, value_clipped=clipped)


def value_token_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """Return `max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2`, and where the clipped one was the greater.

    All (N,), in float32 or wider; `cliprange` None clips nothing. A value that has moved further than `c` since the
    step began, towards its return, gets no gradient.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, old_values, returns = values.to(dtype), old_values.detach().to(dtype), returns.detach().to(dtype)
    plain = (values - returns).square()
    if cliprange is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (old_values + (values - old_values).clamp(-cliprange, cliprange) - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped.detach() > plain.detach()
