"""SimPO: the mean log-prob of a reply is its reward, and the chosen one is to earn more by a margin."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .preference import PairAlgorithm, Replies, smoothed_logistic


class SimPO(PairAlgorithm):
    """Simple preference optimization, arXiv:2405.14734: what is compared is what sampling goes by; no reference.

    Assumes a model near where it should be (after SFT), for nothing holds it there but a small learning rate.
    """

    with_reference = False

    def pair_loss(self, chosen: Replies, rejected: Replies) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`-logsigmoid(beta (mean logp_chosen - mean logp_rejected) - simpo_gamma)`."""
        means = chosen.mean(chosen.logprob), rejected.mean(rejected.logprob)
        logits = self.config.beta * (means[0] - means[1]) - self.config.simpo_gamma
        return smoothed_logistic(logits, self.config.label_smoothing), self.measures(means, means)
