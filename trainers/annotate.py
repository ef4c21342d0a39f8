"""What is computed of a step's experiences before credit: log-probs of the policy and of the reference, values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .batch import MicroBatch, make_rows, micro_batches
from .config_keys import Correction
from .experience import Experience
from .losses import MAX_LOG_RATIO

Compute = Callable[[MicroBatch], Tensor]


@torch.no_grad()
def token_numbers(
    experiences: Sequence[Experience], compute: Compute, max_tokens: int, device: torch.device
) -> list[list[float]]:
    """Return `compute` (a micro-batch -> (N,), one number a trainable token) for the tokens of each experience."""
    found = [[math.nan] * len(experience.places) for experience in experiences]
    for batch in micro_batches(make_rows(experiences), max_tokens, device):
        values = compute(batch).tolist()
        start = 0
        for row in batch.rows:
            end = start + len(row.places)
            found[row.trajectory][row.first : row.first + len(row.places)] = values[start:end]
            start = end
    return found


def with_end(experience: Experience) -> Experience:
    """Return an experience with one trainable token more, at the end of its episode: where nothing was said any more.

    What predicts that token is the hidden state after the last one, from which the value of a cut-off episode is read.
    """
    trajectory = experience.trajectory
    longer = trajectory.model_copy(update={"tokens": [*trajectory.tokens, 0]})
    places, zeros = [*experience.places, len(trajectory.tokens)], [0.0] * (len(experience.places) + 1)
    return replace(
        experience,
        trajectory=longer,
        places=places,
        old_logprobs=zeros,
        weights=zeros,
        advantages=zeros,
        values=[],
        returns=[],
    )


def correct_gap(experience: Experience, how: Correction, cap: float) -> None:
    """Set `weights` to the importance weights of policy over sampler, truncated or masked at `cap`.

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl): `min(w, cap)`, with `w = exp(old -
    sampler)` of each token, or of the whole sequence (the product over its tokens) for all of them. Masked: 0 where
    `w > cap`.
    """
    gaps = _gaps(experience)
    if how.startswith("sequence"):
        gaps = [math.fsum(gaps)] * len(gaps)
    ratios = [math.exp(min(gap, MAX_LOG_RATIO)) for gap in gaps]
    beyond = cap if how.endswith("truncate") else 0.0
    experience.weights = [ratio if ratio <= cap else beyond for ratio in ratios]


def gap_metrics(experiences: Sequence[Experience], how: Correction) -> dict[str, float]:
    """Return, under TRL's names, how far policy and sampler are apart, and the weights that correct it.

    The difference is that of the log-probs of tokens, without sign; the weights are counted as they are used, one a
    token or one a sequence. Empty when there is no token.
    """
    differences = [abs(gap) for experience in experiences for gap in _gaps(experience)]
    most = 1 if how.startswith("sequence") else None
    weights = [weight for experience in experiences for weight in experience.weights[:most]]
    if not differences:
        return {}
    return {
        "sampling/sampling_logp_difference/mean": math.fsum(differences) / len(differences),
        "sampling/sampling_logp_difference/max": max(differences),
        "sampling/importance_sampling_ratio/min": min(weights),
        "sampling/importance_sampling_ratio/mean": math.fsum(weights) / len(weights),
        "sampling/importance_sampling_ratio/max": max(weights),
    }


def _gaps(experience: Experience) -> list[float]:
    """Return how much likelier the policy at the start of the step finds each token than its sampler did."""
    pairs = zip(experience.old_logprobs, experience.sampler_logprobs, strict=True)
    return [old - sampler for old, sampler in pairs]
