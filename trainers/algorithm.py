"""Algorithm: what tells one trainer from another. Credit says what an episode is worth, loss what a token costs."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..agents.models.contract import LanguageModel
from ..agents.trajectory import Trajectory
from .batch import MicroBatch
from .config import TrainConfig
from .experience import Experience
from .losses import TokenLosses


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trainable tokens of a micro-batch, flat (N,); what has a gradient is named.

    `logprobs` (with gradient): of the policy now. `old_logprobs`: at the start of the step. `advantages`: from credit.
    `row`: (N,) int64, which segment a token belongs to; the tokens of a segment stand together, in order.
    `trajectory`, `unit`: (N,) int64, which trajectory and which unit (see `Experience`) it is of; all of a unit are
    here. `ref_logprobs`: of the reference, NaN where nobody asked it. `values` (with gradient), `old_values`,
    `returns`: of a critic, now, at the start of the step, and what it should say; None without one. `divergence` (with
    gradient): what `Algorithm.compare` returned.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    row: Tensor
    trajectory: Tensor
    unit: Tensor
    ref_logprobs: Tensor
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    divergence: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lookups:
    """What may be asked of the models before the first update: log-probs of the tokens of experiences.

    `reference` answers with the policy as it began where the algorithm has no other; it must not be asked without.
    `longest`: most tokens of a row that they take.
    """

    policy: Callable[[Sequence[Experience]], list[list[float]]]
    reference: Callable[[Sequence[Experience]], list[list[float]]]
    longest: int = sys.maxsize


class Algorithm(ABC):
    """Credit and loss of one algorithm."""

    online: ClassVar[bool] = True
    """Whether it may sample its episodes in an env."""
    ratios: ClassVar[bool] = True
    """Whether policy and sampler are compared: then every token needs the log-prob it was sampled with."""
    critic: ClassVar[bool] = False
    """Whether a value model stands beside the policy: then experiences have `values`, and credit gives `returns`."""
    scores: ClassVar[bool] = False
    """Whether that is a head on the policy which scores whole conversations: nothing is said then, no log-prob is read,
    and the finished model is a sequence classifier."""
    everything_teaches: bool = False
    """Whether a token has a gradient although its advantage is 0."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @classmethod
    def reference_model(cls, config: TrainConfig) -> str | None:
        """Return the folder of the frozen model that it looks at beside the policy; None where there is none."""
        return config.model if config.beta > 0 else None

    def choose(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return what is learnt of the episodes of a step, in order; of a file, the dataset has chosen already."""
        return list(trajectories)

    def annotate(self, experiences: Sequence[Experience], lookups: Lookups) -> None:  # noqa: B027 - most need nothing
        """Write into the experiences of a step, before credit, what credit and loss need to know of the models."""

    def compare(
        self, policy: LanguageModel, hidden: Tensor, batch: MicroBatch, reference: LanguageModel | None
    ) -> Tensor | None:
        """Return how far the policy is from another model at each of the N tokens, with gradient; None if not asked.

        `hidden` (N, E): the policy's states that predict the tokens.
        """
        return None

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
