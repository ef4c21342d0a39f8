"""The decoder of the Llama family, with parameters named as in Hugging Face files.

The forward pass is one; how queries meet keys and values is handed in as an `Attend`, so that training,
prefill, decoding with a cache and a prompt shared by a group run through the same layers and the same numbers.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig


class Attend(Protocol):
    """How queries meet keys and values; training, prefill and decoding differ in nothing else."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in layer `layer`: q (B, H, T, D), k and v (B, KV, T, D), rope applied -> (B, H, T, D)."""
        ...


class CausalAttend:
    """Each row attends to itself alone, causally.

    Rows are padded on the right: no token comes before padding it could see, so no mask is needed.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention within each row; shapes as in `Attend`."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class RecordAttend(CausalAttend):
    """Causal attention that keeps every layer's keys and values, with their gradient, for `PrefixAttend`."""

    def __init__(self) -> None:
        self.keys_values: list[tuple[Tensor, Tensor]] = []
        """By layer: k and v, each (B, KV, T, D), of the latest forward pass."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record k and v, then attend causally; shapes as in `Attend`."""
        if layer == 0:
            self.keys_values = []
        self.keys_values.append((k, v))
        return super().__call__(layer, q, k, v)


class PrefixAttend:
    """Rows attend to a prefix they share, computed once, and causally to themselves.

    The gradient flows through the recorded keys and values, summed over the rows: loss and gradients equal those
    of every row computed whole. Positions of the rows start at the prefix's length.
    """

    def __init__(self, recorded: RecordAttend) -> None:
        """Take what `RecordAttend` kept of a forward pass with one row (1, P)."""
        self.keys_values = recorded.keys_values
        self._mask: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to prefix and row; shapes as in `Attend`."""
        prefix_k, prefix_v = self.keys_values[layer]
        rows, past, new = q.shape[0], prefix_k.shape[2], q.shape[2]
        if self._mask is None or self._mask.shape != (new, past + new):
            self._mask = torch.ones(new, past + new, dtype=torch.bool, device=q.device).tril_(past)
        k = torch.cat((prefix_k.expand(rows, -1, -1, -1), k), 2)
        v = torch.cat((prefix_v.expand(rows, -1, -1, -1), v), 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=True)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; torch computes it in fp32 for bf16 and fp16 too."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.shape, self.eps = (size,), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., size), same shape and dtype out."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections, the norms of Qwen3 and rope around an `Attend`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.layer, self.dim = layer, dim
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        norm = config.model_type == "qwen3"
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map (B, T, E) to (B, T, E); cos and sin are (B or 1, T, 1, D) from `Decoder`."""
        split = (*x.shape[:2], -1, self.dim)
        q, k, v = self.q_proj(x).view(split), self.k_proj(x).view(split), self.v_proj(x).view(split)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = attend(self.layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return cast("Tensor", self.o_proj(out.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, E) to (B, T, E)."""
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One pre-norm block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map (B, T, E) to (B, T, E)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Body(nn.Module):
    """Embedding, layers and final norm: what Hugging Face names `model.*`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A Llama or Qwen3 model: ids in, hidden states out, logits apart (only where they are wanted)."""

    def __init__(self, config: ModelConfig) -> None:
        """Build with torch's default weights; `load_model` and `init_model` give meaningful ones."""
        super().__init__()
        self.config = config
        self.model = Body(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope: Tensor | None = None

    @property
    def head_weight(self) -> Tensor:
        """The (V, E) matrix that makes logits of hidden states: the head's, or the embedding's when tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states (B, T, E) after the final norm.

        `ids` is (B, T) int64; `positions` is (B, T) or (1, T) int64, each token's place in its own sequence.
        """
        x = self.model.embed_tokens(ids)
        table = F.embedding(positions, self._rope_table(positions)).to(x.dtype).unsqueeze(2)
        cos, sin = table.chunk(2, -1)
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return cast("Tensor", self.model.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., E) to logits (..., V): float32, or float64 for a float64 model."""
        logits = F.linear(hidden, self.head_weight)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _rope_table(self, positions: Tensor) -> Tensor:
        """Return the fp32 table (P, 2D) of cos and signed sin, P past every position; kept, and grown when needed.

        Not a buffer, which `model.to(dtype)` would round.
        """
        length = max(self.config.max_position_embeddings, int(positions.max()) + 1)
        table = self._rope
        if table is None or table.shape[0] < length or table.device != positions.device:
            table = rope_table(length, self.config.head_dim, self.config.rope_theta).to(positions.device)
            self._rope = table
        return table


def rope_table(length: int, dim: int, theta: float) -> Tensor:
    """Return (length, 2 * dim) fp32: cos, then sin with the sign of the rotation, of each position's angles.

    Angle i of position p is p * theta^(-2i / dim) (RoFormer, arXiv:2104.09864); channel i turns with channel
    i + dim/2, as in Hugging Face files.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (B, T, H, D) by its positions: (a, b) -> (a cos - b sin, b cos + a sin), in three kernels."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
