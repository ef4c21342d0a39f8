"""IPO: as DPO, but the margin has a goal, so that preferences which are all one way do not drive it on for ever."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .preference import PairAlgorithm, Replies, ipo_loss


class IPO(PairAlgorithm):
    """Identity preference optimization, arXiv:2310.12036.

    Does not assume Bradley-Terry. The log-ratios are means over tokens, which the formula of the paper does not show
    and its authors mean, as TRL found out and does: the goal `1 / (2 beta)` knows no length.
    """

    def pair_loss(self, chosen: Replies, rejected: Replies) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`(h - 1 / (2 beta))^2`, h the difference of the two mean log-ratios."""
        margin = chosen.mean(chosen.ratio) - rejected.mean(rejected.ratio)
        measured = self.measures((chosen.ratio, rejected.ratio), (chosen.logprob, rejected.logprob))
        return ipo_loss(margin, self.config.beta), measured
