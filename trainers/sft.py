"""SFT: maximum likelihood of the agent's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..agents.trajectory import Trajectory
from .algorithm import Algorithm, TokenBatch, no_clipping
from .losses import TokenLosses, sft_token_loss


class SFT(Algorithm):
    """Masked cross-entropy on trajectories of a file: every token with mask 1 counts, stop tokens included.

    Assumes that the episodes are worth imitating; `min_reward` leaves out those that are not.
    """

    online = False

    def credit(self, trajectories: Sequence[Trajectory], rewards: Sequence[float | None]) -> list[float]:
        """Every trajectory counts the same."""
        return [1.0] * len(trajectories)

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """-log p of each token."""
        return no_clipping(sft_token_loss(tokens.logprobs))
