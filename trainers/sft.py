"""SFT: maximum likelihood of the agent's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from .algorithm import Algorithm, TokenBatch, no_clipping
from .experience import Experience
from .losses import TokenLosses, sft_token_loss


class SFT(Algorithm):
    """Masked cross-entropy on trajectories of a file: every token with mask 1 counts, stop tokens included.

    Assumes that the episodes are worth imitating; `min_reward` leaves out those that are not.
    """

    online = ratios = False

    def credit(self, experiences: Sequence[Experience]) -> None:
        """Every token counts the same."""
        for experience in experiences:
            experience.give(1.0)

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """-log p of each token."""
        return no_clipping(sft_token_loss(tokens.logprobs))
