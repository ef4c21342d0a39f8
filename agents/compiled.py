"""A decoder behind `torch.compile`: one graph for all layers, with attention as an operator that is not looked into."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import count
from shutil import which
from typing import cast

import torch
from torch import Tensor

from ..tools.errors import ConfigError
from .models import Attend, CausalAttend, LanguageModel

_now: dict[int, Attend] = {}  # by compiled model: what the pass that runs attends with
_numbers = count()


def compile_model(model: LanguageModel) -> Callable[[Tensor, Tensor, Attend], Tensor]:
    """Return the model's forward pass, compiled when it is first called (for one token, and for more).

    Raises ConfigError where what compiles is missing.
    """
    weight = next(model.parameters())
    if weight.is_cuda:
        found, wanted = find_spec("triton") is not None, "the package triton"
    else:
        found, wanted = any(map(which, (os.environ.get("CXX", "g++"), "clang++"))), "a C++ compiler (g++ or clang++)"
    if not found:
        raise ConfigError(f"layers=compiled needs {wanted}, which is not there: install it, or leave layers at packed")
    with torch.no_grad():  # whatever a model makes at its first pass (tables) is there before it is traced
        first = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        model(first, first, CausalAttend())
    number, operator = next(_numbers), _attend_operator()
    compiled = torch.compile(model, dynamic=True)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return operator(number, layer, q, k, v)

    def forward(ids: Tensor, places: Tensor, now: Attend) -> Tensor:
        _now[number] = now
        try:
            found: Tensor = compiled(ids, places, attend)
            return found
        finally:
            del _now[number]

    return forward


@cache
def _attend_operator() -> Callable[[int, int, Tensor, Tensor, Tensor], Tensor]:
    """Return the operator; to trace an `Attend` would make a graph of its own for every layer and batch."""

    @torch.library.custom_op("gymtune::attend", mutates_args=())
    def operator(number: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _now[number](layer, q, k, v)

    @operator.register_fake
    def _(number: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.transpose(1, 2).new_empty(q.transpose(1, 2).shape).transpose(1, 2)

    return cast("Callable[[int, int, Tensor, Tensor, Tensor], Tensor]", operator)
