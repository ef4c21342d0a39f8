"""Attention of a transformers model by our `Attend`: transformers lets a function be registered, and calls it."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .decoder import Attend

NAME = "gymtune"
"""Of our attention, in the registry of transformers."""

_EXTRAS = ("softcap", "s_aux", "position_bias")  # what some families ask of their attention, and ours does not do
_CURRENT: ContextVar[Attend | None] = ContextVar("attend", default=None)


def register() -> None:
    """Make our attention known to transformers. There is no mask function of its name, so no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def run_body(opened: Any, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Run embedding, layers and final norm of a model opened with our attention -> hidden states (B, T, E).

    `attend` goes along as an argument, which most families hand on to their attention (also when a layer is computed
    again in the backward pass); a few do not (StableLM, Nemotron), and theirs finds it in the context.
    """
    token = _CURRENT.set(attend)
    try:
        out = opened.base_model(input_ids=ids, position_ids=positions, use_cache=False, attend=attend)
    finally:
        _CURRENT.reset(token)
    hidden: Tensor = out.last_hidden_state
    return hidden


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as the current forward pass wants: what transformers calls in each layer.

    query (B, H, T, D), key (B, KV, T, D), value (B, KV, T, <= D) -> (B, T, H, D of value). Our attends score by
    1 / sqrt(D); another `scaling` goes into the query. Narrower values (latent attention) are padded with zeros.
    """
    attend = attend or _CURRENT.get()
    layer = getattr(module, "layer_idx", None)
    extras = [name for name in _EXTRAS if more.get(name) is not None]
    if attend is None or layer is None or extras:
        what = f"uses {extras[0]}" if extras else "has no layer_idx" if layer is None else "is not handed our attention"
        raise ValueError(f"{type(module).__name__} {what}, which is not supported")
    dim, width = query.shape[-1], value.shape[-1]
    if scaling is not None and not math.isclose(scaling, dim**-0.5):
        query = query * (scaling * dim**0.5)
    if width < dim:
        value = F.pad(value, (0, dim - width))
    out = attend(layer, query, key, value)[..., :width]
    return out.transpose(1, 2).contiguous(), None
