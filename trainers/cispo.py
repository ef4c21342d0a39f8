"""CISPO: clip the weight, not the update."""

from __future__ import annotations

from .algorithm import TokenBatch
from .grpo import GRPO
from .losses import TokenLosses, cispo_token_loss


class CISPO(GRPO):
    """MiniMax-M1, arXiv:2506.13585: REINFORCE on every token, weighted by a capped importance ratio.

    GRPO's credit; unlike GRPO, a token whose ratio left the trust region still has a gradient.
    """

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """-stopgrad(min(r, epsilon_high)) A log p."""
        return cispo_token_loss(tokens.logprobs, tokens.old_logprobs, tokens.advantages, self.epsilon_high)
