"""What keeps the tensors of a file from being those of a model."""

from __future__ import annotations

from collections.abc import Mapping

Shape = tuple[int, ...]


def misfits(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """Return a line for every tensor that is missing, unexpected or of another shape, in the order of names."""
    return [
        f"{name} wanted {wanted.get(name, 'nothing')} found {found.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
