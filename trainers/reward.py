"""Reward models: a head that gives a whole conversation one number, so that the better reply of a pair has the higher.

The score is read at the last real token of the conversation, whose ids come from `Renderer.conversation` here and in
`agents/reward_model.py`: what is trained is what will be asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..agents.renderer import Renderer
from ..agents.replay import whole_conversation
from ..agents.trajectory import Trajectory
from ..tools.errors import DataError
from .algorithm import Algorithm, TokenBatch, no_clipping
from .experience import Experience
from .losses import TokenLosses
from .pairs import PairDataset
from .preference import numbered
from .stored import listed


class ConversationPairs(PairDataset):
    """Pairs as a reward model reads them: each side the whole conversation, with one place to read its score from.

    Arguments and errors are those of `PairDataset`, but that lengths are those of conversations; with `drop_long` a
    pair is left out where one of its sides is too long.
    """

    def __init__(self, path: Any, renderer: Renderer, *, max_length: int, drop_long: bool = False, **more: Any) -> None:
        super().__init__(path, renderer, max_length=max_length, drop_long=drop_long, **more)
        whole = [[whole_conversation(side, renderer) for side in pair] for pair in self.examples]
        fits = [all(length_of(side) <= max_length for side in pair) for pair in whole]
        if not all(fits) and not drop_long:
            long = [side for pair in whole for side in pair if length_of(side) > max_length]
            told = listed([f"line {self.lines[side.trajectory_id]} has {length_of(side)}" for side in long])
            raise DataError(
                f"{self.path}: more tokens than the {max_length} that the model takes, of the whole conversation: "
                f"{told}. drop_long=true leaves them out"
            )
        self.examples = [pair for pair, fit in zip(whole, fits, strict=True) if fit]
        self.summary = f"{len(self.examples)} pairs of whole conversations"
        if dropped := len(whole) - len(self.examples):
            self.notes.append(f"{dropped} pairs are left out: a conversation is longer than the {max_length} tokens")
        if not self.examples:
            raise DataError(f"{self.path}: no pair to learn from. {'. '.join(self.notes)}")


def length_of(conversation: Trajectory) -> int:
    """Return the tokens that the model reads of what `whole_conversation` made."""
    return len(conversation.tokens) - 1


class Reward(Algorithm):
    """A reward model, from pairs: maximum likelihood of Bradley-Terry, arXiv:2203.02155 eq. 1 (arXiv:2307.09288 eq. 2).

    `-logsigmoid(s_chosen - s_rejected - margin)`, the mean over pairs. Assumes that a pair's labels depend on the
    difference of two scores alone; scores have no zero of their own, which `center_rewards_coefficient` gives them
    (arXiv:2312.09244: `c (s_chosen + s_rejected)^2`). `margin` says by how much a pair should differ. With `ties` half,
    a pair of equals is a pair won half the time by either side.

    The head begins at 0: no draw decides where the scores point, all are equal, and the loss is ln 2. In the first step
    the head alone learns; the layers follow, as soon as it points anywhere.
    """

    online = ratios = False
    critic = scores = True

    def credit(self, experiences: Sequence[Experience]) -> None:
        """Say which two are a pair, how sure it is that the first is the better, and by how much (its `returns`)."""
        for index, (chosen, rejected) in enumerate(zip(experiences[::2], experiences[1::2], strict=True)):
            tied = self.config.ties == "half" and chosen.reward == rejected.reward
            margin = 0.0 if tied else self._margin(chosen, rejected)
            for side, sign in ((chosen, 1.0), (rejected, -1.0)):
                if len(side.places) != 1:
                    raise DataError(
                        f"trajectory {side.trajectory.trajectory_id} has {len(side.places)} places to read a score "
                        "from, wanted one: a reward model learns from ConversationPairs, or what whole_conversation "
                        "makes"
                    )
                side.unit = index
                side.give(sign * (0.5 if tied else 1.0))
                side.returns = [margin]

    def _margin(self, chosen: Experience, rejected: Experience) -> float:
        """Return by how much the chosen one's score should be the higher."""
        if self.config.margin == "reward":
            return (chosen.reward or 0.0) - (rejected.reward or 0.0)
        if self.config.margin == "none":
            return 0.0
        margin = chosen.trajectory.metadata.get("margin")
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            name = chosen.trajectory.trajectory_id
            raise DataError(f"trajectory {name}: margin='column' wants a number in the column margin, came {margin!r}")
        return float(margin)

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """The loss of the pair that the conversation is of; scores are measured under TRL's names."""
        assert tokens.values is not None
        assert tokens.returns is not None
        pair, count = numbered(tokens.unit)
        first = tokens.advantages > 0

        def of(values: Tensor, which: Tensor) -> Tensor:
            """Return (P,): the number of each pair's chosen or rejected side."""
            return values.new_zeros(count).index_add(0, pair[which], values[which])

        chosen, rejected = of(tokens.values, first), of(tokens.values, ~first)
        sure, margin = of(tokens.advantages, first), of(tokens.returns, first)
        loss = pair_loss(chosen, rejected, margin, sure)
        if self.config.center_rewards_coefficient is not None:
            loss = loss + self.config.center_rewards_coefficient * (chosen + rejected).square()
        return replace(no_clipping(loss[pair]), measured=_measured(chosen.detach(), rejected.detach(), sure == 1))


def pair_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, sure: Tensor) -> Tensor:
    """Return `-p logsigmoid(d - m) - (1 - p) logsigmoid(-d - m)` (P,), d the difference of scores, m the margin.

    `sure` is p, how sure it is that the chosen one is the better: 1, or 0.5 of equals. All (P,), float32 or wider.
    """
    gap = chosen - rejected
    return -sure * logsigmoid(gap - margin) - (1 - sure) * logsigmoid(-gap - margin)


def _measured(chosen: Tensor, rejected: Tensor, told_apart: Tensor) -> dict[str, Tensor]:
    """Return what there is to measure of pairs; in a tie neither side is right."""
    return {
        "accuracy": (chosen > rejected)[told_apart].to(chosen.dtype),
        "margin": (chosen - rejected)[told_apart],
        "mean_reward": torch.cat((chosen, rejected)),
    }
