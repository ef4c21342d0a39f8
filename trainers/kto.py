"""KTO: single replies, each good or bad, from a reference point that is the policy's distance from its reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from ..agents.trajectory import Trajectory
from .algorithm import Lookups, TokenBatch, no_clipping
from .config import TrainConfig
from .experience import Experience
from .losses import TokenLosses
from .pairs import labelled
from .preference import PreferenceAlgorithm, kto_loss, numbered, replies_of


class KTO(PreferenceAlgorithm):
    """Kahneman-Tversky optimization, arXiv:2402.01306: needs labels, not pairs; label: `trajectory.success`.

    The reference point `kl` is estimated from the batch: each prompt with the reply of another, what the policy's
    log-ratio is there, on average, and at least 0; it has no gradient. Where good and bad replies are not equally many,
    the paper wants `desirable_weight` times the good ones at 1 to 4/3 of `undesirable_weight` times the bad ones.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.kl = 0.0  # of the experiences that were annotated last: their loss comes before others are

    def choose(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes that can be told good from bad."""
        return labelled(trajectories, self.config.label_threshold)

    def annotate(self, experiences: Sequence[Experience], lookups: Lookups) -> None:
        """Ask the reference for the log-probs of every reply, and both models for those of the mismatched ones."""
        super().annotate(experiences, lookups)
        self.kl = 0.0
        others = mismatched(experiences, lookups.longest) if self.asks_reference else []
        if others:
            pairs = zip(lookups.policy(others), lookups.reference(others), strict=True)
            self.kl = max(0.0, fmean(math.fsum(policy) - math.fsum(reference) for policy, reference in pairs))

    def credit(self, experiences: Sequence[Experience]) -> None:
        """Say which replies are good."""
        for index, experience in enumerate(experiences):
            experience.unit = index
            experience.give(1.0 if experience.trajectory.success else -1.0)

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """The loss of the reply that the token is of, by the weight of its label."""
        unit, count = numbered(tokens.unit)
        everything = torch.ones_like(unit, dtype=torch.bool)
        replies = replies_of(tokens, everything, unit, count, reference=self.asks_reference)
        good = everything.new_zeros(count).index_fill(0, unit[tokens.advantages > 0], True)
        config = self.config
        weights = torch.where(good, config.desirable_weight, config.undesirable_weight).to(replies.logprob.dtype)
        loss = weights * kto_loss(replies.ratio, good, self.kl, config.beta)
        rewards, logprobs = config.beta * replies.ratio.detach(), replies.logprob.detach()
        return replace(
            no_clipping(loss[unit]),
            measured={
                "kl": torch.full_like(rewards, self.kl),
                "rewards/chosen": rewards[good],
                "rewards/rejected": rewards[~good],
                "logps/chosen": logprobs[good],
                "logps/rejected": logprobs[~good],
            },
        )


def mismatched(experiences: Sequence[Experience], longest: int) -> list[Experience]:
    """Return the prompt of each experience with the reply of the one before it; the first gets that of the last one.

    A prompt is what stands before the first trainable token, a reply what follows in that segment; together they are
    cut to `longest` tokens. Empty where fewer than two have a reply.
    """
    said = [experience for experience in experiences if experience.places]
    if len(said) < 2:
        return []
    halves = [_halves(experience) for experience in said]
    found = []
    for experience, (prompt, _, _), (_, reply, trained) in zip(said, halves, halves[-1:] + halves[:-1], strict=True):
        places = [place for t in trained if (place := len(prompt) + t) < longest]
        zeros = [0.0] * len(places)
        tokens = {"tokens": (prompt + reply)[:longest], "segment_starts": [0]}
        found.append(
            replace(
                experience,
                trajectory=experience.trajectory.model_copy(update=tokens),
                places=places,
                old_logprobs=zeros,
                weights=zeros,
                advantages=zeros,
                ref_logprobs=[],
            )
        )
    return found


def _halves(experience: Experience) -> tuple[list[int], list[int], list[int]]:
    """Return prompt and reply of the segment that is trained first, and where in the reply its trainable tokens are."""
    trajectory, first = experience.trajectory, experience.places[0]
    start, end = next(span for span in trajectory.segments if span[0] <= first < span[1])
    trained = [place - first for place in experience.places if place < end]
    return trajectory.tokens[start:first], trajectory.tokens[first:end], trained
