"""Algorithm: what tells one trainer from another. Credit says what an episode is worth, loss what a token costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..agents.trajectory import Trajectory
from .config import TrainConfig
from .losses import TokenLosses


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trainable tokens a loss reads, flat (N,): current, old (sampler's) log-probs and advantages."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor


class Algorithm(ABC):
    """Credit and loss of one algorithm. `online`: episodes are sampled anew at every step."""

    online: ClassVar[bool] = True

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @abstractmethod
    def credit(self, trajectories: Sequence[Trajectory], rewards: Sequence[float | None]) -> list[float]:
        """Return the advantage of each trajectory; 0 where it teaches nothing."""

    @abstractmethod
    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """Return the loss of each token."""


def no_clipping(loss: Tensor) -> TokenLosses:
    """Return `loss` (N,) as the losses of an algorithm that clips nothing: ratio 1, no flags."""
    none = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLosses(loss, none, none, torch.ones_like(loss).detach())
