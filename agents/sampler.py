"""Sampling: one token a row, by inverse transform of counter-based uniform numbers.

The uniform number of a token is a pure function of its sequence's seed and of its place in the turn, so a sequence's
randomness does not depend on what else is in the batch and needs no generator state to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .trajectory import Sampling

_UINT64 = 2**64 - 1


def uniforms(seeds: Sequence[int], places: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return numbers in [0, 1), one for each (seed, place): SplitMix64 (Steele et al., OOPSLA 2014), vectorised.

    Number `place` of SplitMix64's stream that `seed` (any int, modulo 2^64) begins: its top 53 bits.
    """
    steps = np.asarray(places, np.uint64) + np.uint64(1)
    z = np.asarray([seed & _UINT64 for seed in seeds], np.uint64)
    z = z + steps * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    numbers: np.ndarray[tuple[int], np.dtype[np.float64]] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def sample(
    logits: Tensor, sampling: Sequence[Sampling], seeds: Sequence[int], places: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Draw one token a row of `logits` (N, V) fp32; return ids and log-probs.

    Log-probs are those of `log_softmax(logits / temperature)` over the full vocabulary, whatever top-p and top-k
    cut away. Temperature 0 takes the largest logit (log-prob at temperature 1).
    """
    greedy = torch.tensor([s.temperature == 0 for s in sampling], device=logits.device)
    temperatures = torch.tensor([s.temperature or 1.0 for s in sampling], device=logits.device, dtype=logits.dtype)
    logprobs = (logits / temperatures[:, None]).log_softmax(-1)
    probs = _cut(logprobs.double().exp(), sampling)
    cumulative = probs.cumsum(-1)
    draws = torch.from_numpy(uniforms(seeds, places)).to(logits.device)[:, None] * cumulative[:, -1:]
    drawn = (cumulative <= draws).sum(-1).clamp(max=logits.shape[-1] - 1)
    ids = torch.where(greedy, logits.argmax(-1), drawn)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()


def _cut(probs: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Zero what top-k and top-p cut away, each judged on the full distribution.

    Top-p keeps the smallest set of the likeliest tokens whose probabilities reach p.
    """
    if all(s.top_p == 1 and s.top_k == 0 for s in sampling):
        return probs
    vocabulary = probs.shape[-1]
    top_k = torch.tensor([s.top_k or vocabulary for s in sampling], device=probs.device)[:, None]
    top_p = torch.tensor([s.top_p for s in sampling], device=probs.device, dtype=probs.dtype)[:, None]
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=probs.device)
    before = ordered.cumsum(-1) - ordered
    keep = (rank < top_k) & ((before < top_p) | (top_p == 1) | (rank == 0))
    return torch.zeros_like(probs).scatter_(-1, index, ordered * keep)
