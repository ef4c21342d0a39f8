"""Keys and values of many sequences, each on the shelf that its length calls for.

All rows of a shelf are equally wide, and the next shelf is a half or a third wider. So memory follows what the
sequences hold (not their number times the longest), and rows that attend together have like lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .models import LanguageConfig

_NARROWEST = 32
_WORTH = 64  # so many tokens, or half the prompt, are worth copying from another slot, and waiting a step for


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one session, from its first turn until it is released or evicted.

    `length` tokens have their keys and values in the row; what lies beyond is overwritten before it can be seen.
    `tokens` are the ids, while `busy` (being sampled) with those that are still to be computed.
    """

    session: str
    shelf: Shelf
    row: int = -1
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    busy: bool = False


class Shelf:
    """Rows of one width: (2, rows, KV heads, width, head dim) by layer, keys at 0, values at 1; and whose they are."""

    def __init__(self, width: int, config: LanguageConfig, like: Tensor) -> None:
        self.width = width
        self.slots: list[Slot | None] = []
        empty = like.new_zeros(2, 0, config.num_key_value_heads, width, config.head_dim)
        self.stores: list[Tensor] = [empty] * config.num_hidden_layers

    @property
    def used(self) -> list[Slot]:
        """Return the slots that have a row here, by row."""
        return [slot for slot in self.slots if slot is not None]

    def resize(self, rows: int) -> None:
        """Have so many rows, those in use first. Holds old and new of one layer at a time."""
        used = self.used
        index = torch.tensor([slot.row for slot in used], dtype=torch.long, device=self.stores[0].device)
        for layer, old in enumerate(self.stores):
            new = old.new_zeros(2, rows, *old.shape[2:])  # finite: a mask hides a number, but not a NaN
            new[:, : len(used)] = old if len(used) == len(self.slots) else old[:, index]
            self.stores[layer] = new
        self.slots = [*used, *([None] * (rows - len(used)))]
        for row, slot in enumerate(used):
            slot.row = row

    def bring_together(self, slots: Sequence[Slot]) -> None:
        """Exchange rows so that `slots` have the first ones."""
        chosen = set(slots)
        holes = [row for row in range(len(slots)) if self.slots[row] not in chosen]
        far = [slot.row for slot in slots if slot.row >= len(slots)]
        to, source = (torch.tensor(rows, device=self.stores[0].device).long() for rows in (holes + far, far + holes))
        for store in self.stores:
            store[:, to] = store[:, source]
        for a, b in zip(holes, far, strict=True):
            self.slots[a], self.slots[b] = self.slots[b], self.slots[a]
        for row, slot in enumerate(self.slots):
            if slot is not None:
                slot.row = row


class KVCache:
    """The slots of sessions: at most `slots` of them, and at most `max_tokens` places in all rows together.

    A session that is idle may be evicted to make room (least recently used first); it is computed again when it comes
    back. `longest` is the widest a row gets; dtype and device are those of `like`.
    """

    def __init__(
        self,
        config: LanguageConfig,
        slots: int,
        like: Tensor,
        *,
        longest: int,
        max_tokens: int | None = None,
    ) -> None:
        self._config, self._like = config, like
        self.slots, self._longest = slots, longest
        self.max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._nowhere = self._new_shelf(0)
        self._shelves: dict[int, Shelf] = {}
        self._slots: dict[str, Slot] = {}  # by session, least recently used first

    @property
    def allocated(self) -> int:
        """Places for tokens in all rows, used or not."""
        return sum(len(shelf.slots) * width for width, shelf in self._shelves.items())

    @property
    def bytes_per_token(self) -> int:
        """Size of one place: keys and values of all layers."""
        config = self._config
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * self._like.dtype.itemsize

    def width(self, length: int) -> int:
        """Return the narrowest width for `length` tokens: 32, 48, 64, 96, 128, 192, ..., at most `longest`."""
        width = _NARROWEST
        while width < length:
            width = width * 4 // 3 if width % 3 == 0 else width * 3 // 2
        return min(width, self._longest)

    def acquire(self, session: str, tokens: list[int]) -> Slot | None:
        """Return the session's slot, with a row for `tokens` and one more; None while there is no room.

        It keeps what it holds of `tokens`, or copies that from another slot which holds more; at least one token is
        left to compute. A session's next turn waits for its turn before.
        """
        slot = self._slots.get(session)
        if slot is None and len(self._slots) >= self.slots and not self._evict():
            return None
        slot = slot or Slot(session, self._nowhere)
        if slot.busy:
            return None
        slot.length = _shared(slot.tokens[: slot.length], tokens)
        slot.busy = True  # not to be evicted while it looks for room
        if not self._place(slot, len(tokens) + 1) and not self._place_anew(slot, len(tokens) + 1):
            slot.busy = False
            return None
        self._copy_best(slot, tokens)
        slot.tokens = tokens
        self._slots.pop(session, None)  # the newest comes last
        self._slots[session] = slot
        return slot

    def extend(self, slot: Slot) -> bool:
        """Make room for one more token; False when there is none."""
        return self._place(slot, slot.length + 1)

    def keep(self, slot: Slot) -> None:
        """Let a slot be idle: its turn is over, or was cut."""
        slot.busy = False

    def release(self, session: str) -> None:
        """Give the session's row back."""
        slot = self._slots.pop(session, None)
        if slot is not None:
            self._vacate(slot)

    def pays_to_wait(self, tokens: Sequence[int]) -> bool:
        """Tell whether much of `tokens` will be there to copy once what is being computed now is done."""
        coming = (slot for slot in self._slots.values() if slot.busy and len(slot.tokens) > slot.length + 1)
        soon = max((_shared(slot.tokens, tokens) for slot in coming), default=0)
        if soon == 0:
            return False
        now = max(_shared(slot.tokens[: slot.length], tokens) for slot in self._slots.values())
        return soon - now > min(_WORTH, len(tokens) // 2)

    def _copy_best(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Copy from the slot that holds most of `tokens`, when that is much more than `slot` holds."""
        others = [other for other in self._slots.values() if other is not slot]
        if slot.length * 2 >= len(tokens) or not others:
            return
        held, best = max(((_shared(o.tokens[: o.length], tokens), o) for o in others), key=lambda pair: pair[0])
        if held - slot.length > min(_WORTH, len(tokens) // 2):
            self._copy(best, slot, held)

    def _copy(self, source: Slot, target: Slot, length: int) -> None:
        for new, old in zip(target.shelf.stores, source.shelf.stores, strict=True):
            new[:, target.row, :, :length] = old[:, source.row, :, :length]
        target.length = length

    def _place(self, slot: Slot, length: int) -> bool:
        """Have the slot's row on the shelf for `length` tokens; False, and nothing changed, when there is no room."""
        width = self.width(length)
        if slot.shelf.width == width:
            return True
        row = self._take(width)
        if row is None:
            return False
        new = Slot(slot.session, self._shelves[width], row)
        if slot.length:
            self._copy(slot, new, slot.length)
        self._vacate(slot)
        slot.shelf, slot.row = new.shelf, new.row
        new.shelf.slots[new.row] = slot
        return True

    def _place_anew(self, slot: Slot, length: int) -> bool:
        """Place a slot whose own row is all that is in the way: what it held is computed again."""
        if any(other.busy for other in self._slots.values() if other is not slot):
            return False
        self._vacate(slot)
        slot.length = 0
        return self._place(slot, length)

    def _take(self, width: int) -> int | None:
        """Return a free row of that width; None, and nobody evicted, where those that are busy leave no room for it."""
        if width + sum(slot.shelf.width for slot in self._slots.values() if slot.busy) > self.max_tokens:
            return None
        shelf = self._shelves.setdefault(width, self._new_shelf(width))
        while None not in shelf.slots:
            rows, room = len(shelf.slots), (self.max_tokens - self.allocated) // width
            if room > 0:
                shelf.resize(rows + min(max(1, rows // 2), room))
            elif not self._trim():
                self._evict()
        return shelf.slots.index(None)

    def _vacate(self, slot: Slot) -> None:
        """Give up the slot's row; a shelf that is half empty shrinks."""
        shelf = slot.shelf
        if slot.row >= 0:
            shelf.slots[slot.row] = None
            if len(shelf.used) * 2 <= len(shelf.slots):
                shelf.resize(len(shelf.used))
        slot.shelf, slot.row = self._nowhere, -1

    def _trim(self) -> bool:
        """Give back every row that nobody has; tell whether there was any."""
        loose = [shelf for shelf in self._shelves.values() if None in shelf.slots]
        for shelf in loose:
            shelf.resize(len(shelf.used))
        return bool(loose)

    def _evict(self) -> bool:
        """Forget the idle session used longest ago; tell whether there was one."""
        idle = next((slot for slot in self._slots.values() if not slot.busy), None)
        if idle is not None:
            self.release(idle.session)
        return idle is not None

    def _new_shelf(self, width: int) -> Shelf:
        return Shelf(width, self._config, self._like)


def _shared(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many ids two sequences have in common at their beginning, at most all but the last of `tokens`."""
    low, high = 0, min(len(held), len(tokens) - 1)
    while low < high:  # halving: equal slices are compared at the speed of C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held[low:middle] == tokens[low:middle] else (low, middle - 1)
    return low
