"""DPO: the log-ratio of policy and reference is a reward, and the chosen reply is to earn more than the rejected."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .preference import PairAlgorithm, Replies, smoothed_logistic


class DPO(PairAlgorithm):
    """Direct preference optimization, arXiv:2305.18290: maximum likelihood of the preferences, no reward model.

    Assumes that preferences follow Bradley-Terry. `label_smoothing` takes that share of them to be wrong (cDPO);
    `length_normalized` compares means over tokens, so that a long reply has no say by its length (arXiv:2411.15124);
    `reference_free` leaves the reference out.
    """

    def pair_loss(self, chosen: Replies, rejected: Replies) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`-logsigmoid(beta h)`, h the difference of the two log-ratios."""
        ratios = chosen.ratio, rejected.ratio
        better, worse = ratios
        if self.config.length_normalized:
            better, worse = chosen.mean(better), rejected.mean(worse)
        loss = smoothed_logistic(self.config.beta * (better - worse), self.config.label_smoothing)
        return loss, self.measures(ratios, (chosen.logprob, rejected.logprob))
