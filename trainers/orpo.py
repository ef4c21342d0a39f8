"""ORPO: learn to say the chosen reply, and on the way that its odds are better than those of the rejected one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import logsigmoid

from .preference import PairAlgorithm, Replies, log_odds


class ORPO(PairAlgorithm):
    """Odds ratio preference optimization, arXiv:2403.07691: SFT and preference in one stage, no reference.

    The first term is the negative log-likelihood of the chosen reply, a mean over its tokens.
    """

    with_reference = False

    def pair_loss(self, chosen: Replies, rejected: Replies) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`-mean logp_chosen - beta logsigmoid(log odds_chosen - log odds_rejected)`."""
        means = chosen.mean(chosen.logprob), rejected.mean(rejected.logprob)
        ratio = log_odds(means[0]) - log_odds(means[1])
        preference = logsigmoid(ratio)
        measured = self.measures(means, means) | {
            "nll_loss": -means[0].detach(),
            "log_odds_chosen": ratio.detach(),
            "log_odds_ratio": preference.detach(),
        }
        return -means[0] - self.config.beta * preference, measured
