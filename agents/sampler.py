"""Sampling: one token a row, by inverse transform of counter-based uniform numbers.

The uniform number of a token is a pure function of its sequence's seed and of its place in the turn, so a sequence's
randomness does not depend on what else is in the batch and needs no generator state to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .trajectory import Sampling

_UINT64 = 2**64 - 1
_SHORT = 1024  # up to so many tokens, the number of kernels is what counts
_BLOCK = 128  # divides the vocabularies of most models


def uniforms(seeds: Sequence[int], places: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return numbers in [0, 1), one for each (seed, place): SplitMix64 (Steele et al., OOPSLA 2014), vectorised.

    Number `place` of SplitMix64's stream that `seed` (any int, modulo 2^64) begins: its top 53 bits.
    """
    steps = np.asarray(places, np.uint64) + np.uint64(1)
    z = np.asarray([seed & _UINT64 for seed in seeds], np.uint64)
    z += steps * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    numbers: np.ndarray[tuple[int], np.dtype[np.float64]] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def sample(
    logits: Tensor, sampling: Sequence[Sampling], seeds: Sequence[int], places: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Draw one token a row of `logits` (N, V) fp32; return ids and log-probs.

    Log-probs are those of `log_softmax(logits / temperature)` over the full vocabulary, whatever top-k, top-p and
    min-p cut away. Temperature 0 takes the largest logit, the first of equals (log-prob at temperature 1).
    """
    greedy = [s.temperature == 0 for s in sampling]
    temperatures = [s.temperature or 1.0 for s in sampling]
    if any(t != 1 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device, dtype=logits.dtype)[:, None]
    logprobs = logits.log_softmax(-1)
    if all(greedy):
        ids = logits.argmax(-1)
    else:
        numbers = torch.from_numpy(uniforms(seeds, places)).to(logits.device)
        ids = _draw(_cut(logprobs.exp(), sampling), numbers)
        if any(greedy):
            ids = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(-1), ids)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()


def _draw(probs: Tensor, numbers: Tensor) -> Tensor:
    """Return for each row the first index at which the running sum of `probs` passes `numbers` * the row's sum.

    Long rows in two steps, over the sums of blocks and then within one block: a running sum over whole rows in float64
    would cost more than all the rest of sampling.
    """
    rows, size = probs.shape
    if size <= _SHORT:
        ends = probs.double().cumsum(-1)
        return _first_past(ends, numbers[:, None] * ends[:, -1:])[:, 0]
    if size % _BLOCK:
        probs = F.pad(probs, (0, -size % _BLOCK))
    blocks = probs.view(rows, -1, _BLOCK)
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    wanted = numbers[:, None] * ends[:, -1:]
    block = _first_past(ends, wanted)
    rest = (wanted - (ends - sums).gather(-1, block)).clamp_(min=0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    return (block * _BLOCK + _first_past(inside, rest))[:, 0]


def _first_past(sums: Tensor, wanted: Tensor) -> Tensor:
    """Return (N, 1): the first index whose running sum is above `wanted`, at most the last that adds anything to it."""
    below = torch.nextafter(sums[:, -1:], sums.new_zeros(()))  # the largest number that some running sum is above
    return torch.searchsorted(sums, torch.minimum(wanted, below), right=True)


def _cut(probs: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Zero what top-k, top-p and min-p cut away, each judged on the full distribution, as SGLang does.

    Top-p keeps the smallest set of the likeliest tokens whose probabilities reach p; min-p what is at least so likely
    as a share of the likeliest. The likeliest token always stays.
    """
    if all(s.top_p == 1 and s.top_k == 0 and s.min_p == 0 for s in sampling):
        return probs
    vocabulary = probs.shape[-1]
    top_k = torch.tensor([s.top_k or vocabulary for s in sampling], device=probs.device)[:, None]
    top_p, min_p = (
        torch.tensor(values, device=probs.device, dtype=torch.float64)[:, None]
        for values in ([s.top_p for s in sampling], [s.min_p for s in sampling])
    )
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    exact = ordered.double()
    rank = torch.arange(vocabulary, device=probs.device)
    before = exact.cumsum(-1) - exact
    keep = (rank < top_k) & ((before < top_p) | (top_p == 1)) & (exact >= min_p * exact[:, :1])
    return torch.zeros_like(probs).scatter_(-1, index, ordered * keep)
