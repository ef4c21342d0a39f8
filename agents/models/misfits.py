"""What keeps the tensors of a file from being those of a model, and taking them where nothing does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...tools.errors import ModelError

Shape = tuple[int, ...]


def misfits(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """Return a line for every tensor that is missing, unexpected or of another shape, in the order of names."""
    return [
        f"{name} wanted {wanted.get(name, 'nothing')} found {found.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]


@torch.no_grad()
def copy_weights(own: Mapping[str, Tensor], stored: Mapping[str, Tensor], where: Path) -> None:
    """Copy the tensors stored in `where` into those of a model, by name, all or none. Raises ModelError naming them."""
    shapes = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (own, stored))
    if faults := misfits(*shapes):
        raise ModelError(f"{where} holds weights of another model: {faults[0]} ({len(faults)} differ)")
    for name, tensor in own.items():
        tensor.copy_(stored[name])
