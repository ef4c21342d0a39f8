"""Attention of a packed micro-batch: a stream of tokens in which nothing is padded and no beginning stands twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens `start .. start + length` of the stream, and where in it those stand that come before them."""

    start: int
    length: int
    past: Sequence[int]


class PackedAttend:
    """Each piece attends to its past and causally to itself: an `Attend` for one stream (1, T).

    The gradient of a past that several pieces read is the sum of theirs, so that loss and gradients equal those of
    every row computed whole. It keeps nothing from layer to layer: recomputing a layer is safe.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        """Take the pieces of a stream; together they hold each of its tokens once."""
        self._calls = [_Call(alike, device) for alike in _alike(pieces)]
        slots = torch.cat([call.queries for call in self._calls])
        real = torch.cat([call.real for call in self._calls]).nonzero().squeeze(1)
        self._slots = real[slots[real].argsort()]
        """Where in the outputs of all calls each token of the stream stands."""

    @property
    def pairs(self) -> int:
        """Pairs of query and key that are computed, padding and what causality hides included: the work of a layer."""
        return sum(call.queries.numel() * call.keys.shape[1] for call in self._calls)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within the pieces; shapes as in `Attend` with B = 1."""
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        out = torch.cat([call(q, k, v) for call in self._calls])
        return out.index_select(0, self._slots).transpose(0, 1).unsqueeze(0)


class _Call:
    """One call of the kernel: R pieces with a past of one length, padded on the right to the longest of them.

    Causality alone hides the padding. Tokens are gathered by their places in the stream.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        past, longest = len(pieces[0].past), pieces[0].length
        steps = torch.arange(longest)
        lengths = torch.tensor([piece.length for piece in pieces]).unsqueeze(1)
        starts = torch.tensor([piece.start for piece in pieces]).unsqueeze(1)
        own = starts + torch.minimum(steps, lengths - 1)  # padding is the last token once more
        before = torch.tensor([piece.past for piece in pieces], dtype=torch.long).view(len(pieces), past)
        self.queries = own.flatten().to(device)
        self.keys = torch.cat((before, own), 1).to(device)
        self.real = (steps < lengths).flatten().to(device)
        self.mask: CausalBias | None = causal_lower_right(longest, past + longest) if longest > 1 else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q (T, H, D), k and v (T, KV, D) to outputs (R * longest, H, D)."""
        count = len(self.keys)
        queries, keys, values = (
            x.index_select(0, places.flatten()).view(count, -1, *x.shape[1:]).transpose(1, 2)
            for x, places in ((q, self.queries), (k, self.keys), (v, self.keys))
        )
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def _alike(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Group pieces for calls: their pasts equally long, none shorter than half of the longest, longest first."""
    by_past: defaultdict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_past[len(piece.past)].append(piece)
    groups: list[list[Piece]] = []
    for some in by_past.values():
        longest = 0
        for piece in sorted(some, key=lambda piece: piece.length, reverse=True):
            if 2 * piece.length < longest or not longest:
                groups.append([])
                longest = piece.length
            groups[-1].append(piece)
    return groups
