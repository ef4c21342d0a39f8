"""Preference: log-probs of whole replies, the losses of pairs and of single ones, and what the algorithms share.

An algorithm here has one loss for each unit (see `Experience`): a pair, or a reply that is judged alone. Every token
carries the loss of its unit; averaged over the tokens of a trajectory, then over trajectories, that is the mean over
units. Chosen replies have advantage 1, rejected ones -1, which says which is which and weighs nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..agents.trajectory import Trajectory
from .algorithm import Algorithm, Lookups, TokenBatch, no_clipping
from .config import TrainConfig
from .experience import Experience
from .losses import TokenLosses
from .pairs import pairs_of

CERTAIN = 1e-6
"""ORPO takes the probability of a reply's tokens for at most exp(-CERTAIN): the odds of 1 have no end."""


@dataclass(frozen=True, slots=True)
class Replies:
    """One reply of each of U units: what was said in it, summed over its trainable tokens, all (U,).

    `logprob`: of the policy, with graph. `reference`: of the reference, 0 where none is asked. `tokens`: how many
    there are; a reply without any has log-prob 0.
    """

    logprob: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def ratio(self) -> Tensor:
        """Log-ratio of policy and reference."""
        return self.logprob - self.reference

    def mean(self, total: Tensor) -> Tensor:
        """Return a sum over the reply's tokens as their mean; 0 where there is none."""
        return total / self.tokens.clamp(min=1)


def numbered(unit: Tensor) -> tuple[Tensor, int]:
    """Return units (N,) numbered from 0, in order, and how many there are: a micro-batch has a few of the batch's."""
    units, number = torch.unique(unit, return_inverse=True)
    return number, len(units)


def replies_of(tokens: TokenBatch, which: Tensor, unit: Tensor, count: int, *, reference: bool) -> Replies:
    """Return the replies that the tokens of mask `which` (N,) make up; `unit` (N,) is below `count`.

    All turns and segments of a trajectory are one reply. In float32, or wider where the log-probs are.
    """
    dtype = torch.promote_types(tokens.logprobs.dtype, torch.float32)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(count, dtype=dtype).index_add(0, unit[which], values[which].to(dtype))

    none = torch.zeros(count, dtype=dtype, device=unit.device)
    said = total(torch.ones_like(tokens.logprobs.detach()))
    return Replies(total(tokens.logprobs), total(tokens.ref_logprobs.detach()) if reference else none, said)


def pair_logprobs(tokens: TokenBatch, *, reference: bool) -> tuple[Replies, Replies, Tensor]:
    """Return the chosen and the rejected replies of the P pairs at hand, and (N,) int64 which pair a token is of."""
    pair, count = numbered(tokens.unit)
    chosen = replies_of(tokens, tokens.advantages > 0, pair, count, reference=reference)
    return chosen, replies_of(tokens, tokens.advantages < 0, pair, count, reference=reference), pair


# -- losses, one a unit ------------------------------------------------------------------------------------------------


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """Return `-(1 - e) logsigmoid(x) - e logsigmoid(-x)` of logits (P,), `e` the share of labels taken to be wrong.

    Bradley-Terry (DPO, arXiv:2305.18290 eq. 7); with `e` above 0 it is conservative: the logits that it wants are
    finite, `log((1 - e) / e)` (https://ericmitchell.ai/cdpo.pdf).
    """
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """Return `(h - 1 / (2 beta))^2` of margins (P,): the margin is to be that large, not as large as can be.

    Identity preference optimization, arXiv:2310.12036 eq. 17, with `beta` its tau.
    """
    return (margin - 1 / (2 * beta)).square()


def log_odds(mean_logprob: Tensor) -> Tensor:
    """Return `log(p / (1 - p))` of the geometric mean `p = exp(mean_logprob)` (P,) of a reply's probabilities.

    ORPO, arXiv:2403.07691 eq. 4. As `-(u + log(1 - e^-u))` with `u = -log p`, which is exact for likely replies (u near
    0) and does not overflow for unlikely ones; u is held above `CERTAIN`, where the gradient ends.
    """
    unlikely = (-mean_logprob).clamp(min=CERTAIN)
    return -(unlikely + (-torch.expm1(-unlikely)).log())


def kto_loss(ratio: Tensor, desirable: Tensor, kl: float, beta: float) -> Tensor:
    """Return `1 - v` (U,): v is `sigmoid(beta (ratio - kl))` of good replies, `sigmoid(beta (kl - ratio))` of bad ones.

    Kahneman-Tversky optimization, arXiv:2402.01306: what is gained or lost counts from a reference point, the KL
    of the policy from its reference, and ever less the further from it. `desirable` (U,) bool.
    """
    away = beta * (ratio - kl)
    return torch.sigmoid(torch.where(desirable, -away, away))


# -- algorithms of pairs -----------------------------------------------------------------------------------------------


class PreferenceAlgorithm(Algorithm):
    """What DPO and its kin share: whole replies are judged, from a file or sampled, beside the model as it began."""

    ratios = False
    with_reference = True
    """Whether the loss reads the log-probs of the reference."""

    @classmethod
    def reference_model(cls, config: TrainConfig) -> str | None:
        """Return the model as it began, unless the loss has no reference or `reference_free` takes it for uniform."""
        return config.model if cls.with_reference and not config.reference_free else None

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.asks_reference = self.reference_model(config) is not None

    def annotate(self, experiences: Sequence[Experience], lookups: Lookups) -> None:
        """Ask the reference for the log-probs of every reply."""
        if self.asks_reference:
            for experience, logprobs in zip(experiences, lookups.reference(experiences), strict=True):
                experience.ref_logprobs = logprobs


class PairAlgorithm(PreferenceAlgorithm):
    """An algorithm of pairs: experiences come as chosen, rejected, chosen, rejected, ..."""

    def choose(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the pairs of the step's groups, the better one first; none of a group where all earned the same."""
        return pairs_of(trajectories, self.config.pairs)

    def credit(self, experiences: Sequence[Experience]) -> None:
        """Say which two are a pair, and which of them is the better one."""
        for index, experience in enumerate(experiences):
            experience.unit = index // 2
            experience.give(-1.0 if index % 2 else 1.0)

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """The loss of the pair that the token is of."""
        chosen, rejected, pair = pair_logprobs(tokens, reference=self.asks_reference)
        loss, measured = self.pair_loss(chosen, rejected)
        return replace(no_clipping(loss[pair]), measured=measured)

    @abstractmethod
    def pair_loss(self, chosen: Replies, rejected: Replies) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of each pair (P,), with graph, and what there is to measure of them, by name of metric."""

    def measures(self, rewards: tuple[Tensor, Tensor], logprobs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the metrics of pairs under TRL's names, of what chosen and rejected replies earn over `beta`, (P,)."""
        chosen, rejected = (self.config.beta * reward.detach() for reward in rewards)
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": logprobs[0].detach(),
            "logps/rejected": logprobs[1].detach(),
        }
