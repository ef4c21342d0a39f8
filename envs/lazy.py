"""Lazy: a sequence whose items are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class Lazy(Sequence[T_co]):
    """Items made on demand by `item`; slices, negative indices and bounds are worked out here."""

    @abstractmethod
    def item(self, index: int) -> T_co:
        """Return the item at `index`, which is at least 0 and below the length."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        """Return an item, or a list of them for a slice. Raises IndexError."""
        if isinstance(index, slice):
            return [self.item(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        return self.item(index % len(self))

    def __iter__(self) -> Iterator[T_co]:
        return (self.item(index) for index in range(len(self)))
