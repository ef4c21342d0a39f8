"""Algorithm: what tells one trainer from another. Credit says what an episode is worth, loss what a token costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .config import TrainConfig
from .experience import Experience
from .losses import TokenLosses


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trainable tokens of a micro-batch, flat (N,); what has a gradient is named.

    `logprobs` (with gradient): of the policy now. `old_logprobs`: at the start of the step. `advantages`: from credit.
    `row`: (N,) int64, which segment a token belongs to; the tokens of a segment stand together, in order.
    `values` (with gradient), `old_values`, `returns`: of a critic, now, at the start of the step, and what it should
    say; None without one.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    row: Tensor
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None


class Algorithm(ABC):
    """Credit and loss of one algorithm. `online`: it learns from episodes that a policy sampled."""

    online: ClassVar[bool] = True
    critic: ClassVar[bool] = False
    """Whether a value model stands beside the policy: then experiences have `values`, and credit gives `returns`."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @abstractmethod
    def credit(self, experiences: Sequence[Experience]) -> None:
        """Give each experience its advantages: 0 where it teaches nothing, as where its reward is None."""

    def trains(self, experience: Experience) -> bool:
        """Whether an episode is in the loss: not when it failed or broke, nor cut off where such are left out."""
        cut = self.config.mask_truncated_completions and experience.trajectory.truncated
        return experience.reward is not None and not cut

    @abstractmethod
    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """Return the loss of each token."""


def no_clipping(loss: Tensor) -> TokenLosses:
    """Return `loss` (N,) as the losses of an algorithm that clips nothing: ratio 1, no flags."""
    none = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLosses(loss, none, none, torch.ones_like(loss).detach())
