"""What is computed of a step's experiences before credit: log-probs of the policy and of the reference, values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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


def correct_gap(experience: Experience, how: Correction, cap: float) -> None:
    """Set `weights` to the importance weights of policy over sampler, truncated or masked at `cap`.

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl): `min(w, cap)`, with `w = exp(old -
    sampler)` of each token, or of the whole sequence (the product over its tokens) for all of them. Masked: 0 where
    `w > cap`.
    """
    pairs = zip(experience.old_logprobs, experience.sampler_logprobs, strict=True)
    gaps = [old - sampler for old, sampler in pairs]
    if how.startswith("sequence"):
        gaps = [math.fsum(gaps)] * len(gaps)
    ratios = [math.exp(min(gap, MAX_LOG_RATIO)) for gap in gaps]
    beyond = cap if how.endswith("truncate") else 0.0
    experience.weights = [ratio if ratio <= cap else beyond for ratio in ratios]
