"""Attention of new tokens to what their slots hold: prefill and decoding in one pass, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_cache import KVCache, Slot

_WASTE = 1.5  # a decode step attends to at most so many times the positions its rows hold (rows of 21 tokens and more)
_EVEN = 8  # keys are read in multiples of this: what vector units like
_ALIGNED = 16  # queries, where bits matter: torch's scratch memory of each thread then begins at a multiple of 64 bytes


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """New tokens of one slot in a forward pass; `owner` is whatever the caller knows it by."""

    slot: Slot
    ids: list[int]
    owner: int

    @property
    def decodes(self) -> bool:
        """Whether this is one token on top of others: such pieces attend together."""
        return len(self.ids) == 1 and self.slot.length > 0


def arrange(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces in the order in which `CacheAttend` wants them: those that decode first, row by row.

    Rows that lie too far apart to be read as one block are brought together.
    """
    decoding = sorted((p for p in pieces if p.decodes), key=lambda p: p.slot.shelf.width)
    for _, group in groupby(decoding, key=lambda p: p.slot.shelf.width):
        slots = [p.slot for p in group]
        rows = [slot.row for slot in slots]
        span, longest = max(rows) + 1 - min(rows), max(slot.length for slot in slots) + 1
        if span > len(slots) and span * longest > _WASTE * sum(slot.length + 1 for slot in slots):
            slots[0].shelf.bring_together(slots)
    decoding.sort(key=lambda p: (p.slot.shelf.width, p.slot.row))
    return decoding + [p for p in pieces if not p.decodes]


class CacheAttend:
    """Stores the keys and values of packed new tokens (1, N) and lets each see its own sequence up to itself.

    Tokens beyond the pieces are padding: they see nothing. With `exact`, a token's numbers do not depend on the pass
    in which it is computed: it attends alone, over a width that its position decides.
    """

    def __init__(self, cache: KVCache, pieces: Sequence[Piece], exact: bool = False) -> None:
        """Take pieces in the order of `arrange`; their slots must have room."""

        def together(piece: Piece) -> int:
            fits = not exact or piece.slot.shelf.width == cache.width(piece.slot.length + 1)
            return piece.slot.shelf.width if piece.decodes and fits else -1 - piece.owner

        self.parts: list[tuple[int, int, _Part]] = []
        self._end = 0
        for key, group in groupby(pieces, key=together):
            found = list(group)
            if key >= 0:
                self._add(len(found), _Rows([p.slot for p in found], exact))
            elif exact:
                self._add_exact(cache, found[0])
            else:
                self._add(len(found[0].ids), _Run(found[0].slot, len(found[0].ids)))

    def _add(self, count: int, part: _Part) -> None:
        self.parts.append((self._end, self._end + count, part))
        self._end += count

    def _add_exact(self, cache: KVCache, piece: Piece) -> None:
        """Add a run of tokens, those of one width at a time."""
        start = piece.slot.length
        places = range(start + 1, start + len(piece.ids) + 1)
        for width, group in groupby(places, key=cache.width):
            count = len(list(group))
            self._add(count, _Singles(piece.slot, start, count, width))
            start += count

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend; shapes as in `Attend`, with B = 1."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, heads, D)
        outs = [part(layer, q[a:b], k[a:b], v[a:b]) for a, b, part in self.parts]
        if self._end < len(q):
            outs.append(torch.zeros_like(q[self._end :]))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.transpose(0, 1)[None]


class _Part(Protocol):
    """Some of the packed tokens: q (n, H, D), k and v (n, KV, D) -> (n, H, D)."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class _Rows:
    """One new token in each of some rows of a shelf, read as one block: no keys are copied."""

    def __init__(self, slots: Sequence[Slot], exact: bool) -> None:
        self.shelf, first = slots[0].shelf, slots[0].row
        like = self.shelf.stores[0]
        _, _, kv_heads, width, _ = like.shape
        self.block, self.exact = slice(first, slots[-1].row + 1), exact
        span, longest = self.block.stop - first, max(slot.length for slot in slots) + 1
        self.end = width if exact else min(-(-longest // _EVEN) * _EVEN, width)
        last = [self.end] * span  # a row that is not asked for sees what is there: nobody reads what comes of it
        for slot in slots:
            last[slot.row - first] = slot.length
        self.mask = _hide(torch.tensor(last, device=like.device)[:, None], self.end, like)[:, None]
        # Where the new keys go, in a store seen as (rows * KV heads * width, D).
        at = [(slot.row * kv_heads + head) * width + slot.length for slot in slots for head in range(kv_heads)]
        self.at = torch.tensor(at, device=like.device)
        holes = span > len(slots)
        self.rows = torch.tensor([slot.row - first for slot in slots], device=like.device) if holes else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store = self.shelf.stores[layer]
        dim = store.shape[-1]
        for held, new in zip(store, (k, v), strict=True):
            held.view(-1, dim).index_copy_(0, self.at, new.reshape(-1, dim))
        keys, values = store[:, self.block, :, : self.end]
        if self.rows is None:
            return _attend_once(q, keys, values, self.mask, self.exact)
        spread = q.new_zeros(len(keys), *q.shape[1:]).index_copy_(0, self.rows, q)
        return _attend_once(spread, keys, values, self.mask, self.exact)[self.rows]


class _Run:
    """Tokens of one slot that follow each other: causal among themselves, after what the slot holds."""

    def __init__(self, slot: Slot, count: int) -> None:
        self.slot, self.start, self.end = slot, slot.length, slot.length + count
        like = slot.shelf.stores[0]
        places = torch.arange(self.start, self.end, device=like.device)
        self.mask = _hide(places, self.end, like) if self.start else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.slot.shelf.stores[layer][:, self.slot.row, :, : self.end]
        keys[:, self.start :] = k.transpose(0, 1)
        values[:, self.start :] = v.transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


class _Singles:
    """Tokens of one slot, each of which attends alone, in the very shape in which it would decode."""

    def __init__(self, slot: Slot, start: int, count: int, width: int) -> None:
        self.slot, self.start, self.count, self.width = slot, start, count, width
        like = slot.shelf.stores[0]
        places = torch.arange(start, start + count, device=like.device)
        self.mask = _hide(places[:, None], width, like)[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.slot.shelf.stores[layer][:, self.slot.row]
        keys[:, self.start : self.start + self.count] = k.transpose(0, 1)
        values[:, self.start : self.start + self.count] = v.transpose(0, 1)
        keys, values = (x[:, : self.width].expand(self.count, -1, -1, -1) for x in (keys, values))
        return _attend_once(q, keys, values, self.mask, exact=True)


def _hide(places: Tensor, end: int, like: Tensor) -> Tensor:
    """Return what to add to the scores of queries at `places` (...) over keys 0 to end - 1: (..., end), 0 or -inf."""
    later = torch.arange(end, device=like.device) > places[..., None]
    return torch.zeros(later.shape, dtype=like.dtype, device=like.device).masked_fill_(later, float("-inf"))


def _attend_once(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, exact: bool) -> Tensor:
    """Attend with one query a head: q (n, H, D), keys and values (n, KV, end, D) -> (n, H, D).

    The query heads of a key head stand as its queries, so that no key is read twice. With `exact` they are padded: the
    bits of a product can depend on where its operands begin in memory, so on the thread that computes it.
    """
    count, _, dim = q.shape
    grouped = q.reshape(count, keys.shape[1], -1, dim)
    heads = grouped.shape[2]
    if exact:
        grouped = F.pad(grouped, (0, 0, 0, -heads % _ALIGNED))
    elif q.dtype == torch.float32 and q.device.type == "cpu":
        # Two batched products: torch's own kernel deals out single heads, and takes twice as long for short rows.
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        shifts = mask.expand(count, len(keys) // count, 1, -1).flatten(0, 1)
        scores = torch.baddbmm(shifts, grouped.flatten(0, 1), keys.transpose(1, 2), alpha=dim**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(count, -1, dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out[:, :, :heads].reshape(count, -1, dim)
