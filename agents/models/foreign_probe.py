"""A model of transformers is tried on a few tokens before it is trusted: what it attends with, and to what numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...tools.errors import ModelError
from .contract import LanguageModel
from .foreign_attention import NAME, run_body
from .foreign_config import ForeignConfig, eos_ids, longest

_LENGTH = 12
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Distance, relative to their size, at which two computations of the same numbers are no longer the same."""


class _Recorder:
    """Causal attention, by the plain formula, that keeps keys and values for the next pass, and notes every call."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.heads: set[tuple[int, int, int]] = set()  # of queries, of keys, size
        self.past: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to what was kept and to this pass; shapes as in `Attend`."""
        self.layers.append(layer)
        self.heads.add((q.shape[1], k.shape[1], k.shape[3]))
        if layer in self.past:
            k, v = torch.cat((self.past[layer][0], k), 2), torch.cat((self.past[layer][1], v), 2)
        self.past[layer] = (k, v)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def measure(opened: Any, path: Path) -> ForeignConfig:
    """Return the shape of a model, heads as one pass over one token shows them.

    Raises ModelError where a layer does not attend (a recurrent or hybrid model) or layers differ in their heads.
    """
    text, where = opened.config.get_text_config(), str(path / "config.json")
    if opened.get_output_embeddings() is None:
        raise ModelError(f"{where}: {text.model_type} has no layer that makes logits of hidden states.")
    recorder = _Recorder()
    token = torch.zeros(1, 1, dtype=torch.long, device=opened.device)
    run_body(opened, token, token, recorder)
    if recorder.layers != list(range(text.num_hidden_layers)):
        raise ModelError(
            f"{where}: {text.model_type} is not supported: its {text.num_hidden_layers} layers should attend once each "
            f"through transformers' interface, as no recurrent or hybrid model does; calls came from {recorder.layers}."
        )
    if len(recorder.heads) > 1:
        raise ModelError(f"{where}: layers differ in (heads, key/value heads, size): {sorted(recorder.heads)}.")
    ((heads, kv_heads, dim),) = recorder.heads
    return ForeignConfig(
        model_type=opened.config.model_type,
        vocab_size=opened.get_input_embeddings().num_embeddings,
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=longest(text, where),
        eos_token_ids=eos_ids(opened.config, getattr(opened, "generation_config", None)),
        data=opened.config.to_dict(),
    )


def prove(model: LanguageModel, opened: Any, path: Path) -> None:
    """Raise ModelError unless one pass, two passes and transformers' own forward give the same numbers."""
    length = min(_LENGTH, model.config.max_position_embeddings)
    device = opened.device
    ids = torch.linspace(0, model.config.vocab_size - 1, length, device=device).long()[None]
    positions, half = torch.arange(length, device=device)[None], length // 2
    whole, kept = model(ids, positions, _Recorder()), _Recorder()
    model(ids[:, :half], positions[:, :half], kept)
    rest = model(ids[:, half:], positions[:, half:], kept)
    opened.set_attn_implementation("eager")
    theirs = opened(input_ids=ids, use_cache=False).logits
    opened.set_attn_implementation(NAME)
    most = _TOLERANCE.get(whole.dtype, _TOLERANCE[torch.bfloat16])
    checks = {
        "tokens reach later ones by other ways than attention": _distance(rest, whole[:, half:]),
        "its logits are not those of transformers' own forward": _distance(model.logits(whole), theirs),
    }
    for what, apart in checks.items():
        if not apart <= most:  # NaN too
            raise ModelError(f"{path}: {model.config.model_type} is not supported: {what} (off by {apart:.1e}).")


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Return the median over tokens of |found - wanted| / |wanted|: one that goes to another expert does not count."""
    found, wanted = found.double(), wanted.double()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)).median())
