"""Slots of keys and values. A slot belongs to a session from its first turn until it is released or evicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .models import ModelConfig

_GROW = 128  # tokens by which the cache's length grows at a time


class KVCache:
    """Keys and values of `slots` sequences, (slots, KV heads, length, head dim) by layer, grown as needed.

    `lengths[slot]` is the number of tokens whose keys and values stand in the slot; what lies beyond is garbage that
    is overwritten before it can be seen.
    """

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.lengths = [0] * slots
        self._shape = (config.num_key_value_heads, config.head_dim)
        self._dtype, self._device = dtype, device
        self.keys: list[Tensor] = [self._empty(0) for _ in range(config.num_hidden_layers)]
        self.values: list[Tensor] = [self._empty(0) for _ in range(config.num_hidden_layers)]
        self._slot_of: dict[str, int] = {}  # session -> slot, least recently used first
        self._tokens: dict[int, list[int]] = {}  # slot -> ids it was filled with
        self._free = list(range(slots))

    def acquire(self, session: str, prompt: Sequence[int], busy: set[int]) -> int | None:
        """Return the session's slot, or a new one; None while there is none. Keeps what the slot and `prompt` share.

        `busy` slots are being sampled: they are never evicted, and a session's next turn waits for its turn before.
        """
        slot = self._slot_of.get(session)
        if slot in busy:
            return None
        if slot is None:
            slot = self._take(busy)
            if slot is None:
                return None
            self.lengths[slot] = 0
        held = self._tokens.pop(slot, [])[: self.lengths[slot]]  # noted again when this turn is done, not if cancelled
        shared = next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), len(held))
        self.lengths[slot] = min(shared, len(prompt) - 1)  # at least one token must be computed
        self._slot_of.pop(session, None)  # the newest comes last
        self._slot_of[session] = slot
        return slot

    def _take(self, busy: set[int]) -> int | None:
        """Take the first free slot, or that of the idle session used longest ago."""
        if self._free:
            return self._free.pop(0)
        for session, slot in self._slot_of.items():
            if slot not in busy:
                del self._slot_of[session]
                return slot
        return None

    def keep(self, slot: int, tokens: list[int]) -> None:
        """Note the ids a slot holds (the last one sampled has no keys and values yet)."""
        self._tokens[slot] = tokens

    def release(self, session: str) -> None:
        """Give the session's slot back."""
        slot = self._slot_of.pop(session, None)
        if slot is not None:
            self._tokens.pop(slot, None)
            self._free.append(slot)
            self._free.sort()

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._slot_of.clear()
        self._tokens.clear()
        self._free = list(range(len(self.lengths)))

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Give `targets` the keys and values of `source`."""
        if not targets:
            return
        length = self.lengths[source]
        index = torch.tensor(targets, device=self._device)
        for store in (*self.keys, *self.values):
            store[index, :, :length] = store[source, :, :length].clone()  # torch refuses to read what it writes
        for slot in targets:
            self.lengths[slot] = length

    def move_down(self, session: str, slot: int) -> int:
        """Move a session to the lowest free slot, when that is lower than its own; return the slot it has now."""
        if not self._free or self._free[0] > slot:
            return slot
        target = self._free.pop(0)
        self.copy(slot, [target])
        self._slot_of[session] = target
        self._free.append(slot)
        self._free.sort()
        return target

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Return the rows to compute for `slots`: the range they span when that is dense (a view, no copy)."""
        span = max(slots) + 1
        return list(range(span)) if len(slots) * 2 >= span else list(slots)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens a slot."""
        if self.values[-1].shape[2] < length:  # the last one grown: a failure on the way there is made good
            grown = -(-length // _GROW) * _GROW
            for stores in (self.keys, self.values):
                for layer, old in enumerate(stores):
                    stores[layer] = self._empty(grown)
                    stores[layer][:, :, : old.shape[2]] = old

    def _empty(self, length: int) -> Tensor:
        heads, dim = self._shape
        return torch.zeros(len(self.lengths), heads, length, dim, dtype=self._dtype, device=self._device)


class CacheAttend:
    """Attention of new tokens to everything their slots hold: prefill and decoding alike.

    New tokens of row i stand at `positions[i]` (rows, T); each sees the keys at positions up to its own.
    """

    def __init__(self, cache: KVCache, slots: Sequence[int], positions: Tensor) -> None:
        end = int(positions.max()) + 1
        cache.reserve(end)
        self.cache, self.positions = cache, positions
        self.index = torch.tensor(slots, device=positions.device)[:, None]
        dense = list(slots) == list(range(len(slots)))
        self.rows = slice(0, len(slots)) if dense else self.index[:, 0]
        self.end = end
        seen = torch.arange(end, device=positions.device) <= positions[:, :, None]
        self.mask = seen[:, None]  # (rows, 1, T, end)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend; shapes as in `Attend`."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.index, :, self.positions] = k.transpose(1, 2)
        values[self.index, :, self.positions] = v.transpose(1, 2)
        k_all = keys[self.rows, :, : self.end]
        v_all = values[self.rows, :, : self.end]
        if q.shape[2] > 1:
            return F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=self.mask, enable_gqa=True)
        # One query a head: the query heads of a key head stand as its queries, so no key is read twice.
        rows, heads, _, dim = q.shape
        grouped = q.view(rows, k_all.shape[1], -1, dim)
        out = F.scaled_dot_product_attention(grouped, k_all, v_all, attn_mask=self.mask)
        return out.reshape(rows, heads, 1, dim)
