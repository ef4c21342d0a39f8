"""The decoder of the Llama family, with parameters named as in Hugging Face files.

The forward pass is one; how queries meet keys and values is handed in as an `Attend`, so that training,
prefill, decoding with a cache and a prompt shared by a group run through the same layers and the same numbers.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig
from .moe import MLP, MoE, balance_loss
from .rope import rope_table, rotate


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
    """Projections, norms of queries and keys where the family has them, and rope around an `Attend`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.layer, self.dim = layer, dim
        family, bias = config.family, config.attention_bias
        self.q_proj = nn.Linear(hidden, heads * dim, bias=bias or family.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=bias or family.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=bias or family.qkv_bias)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if family.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if family.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map (B, T, E) to (B, T, E); cos and sin are (B or 1, T, 1, D) from `Decoder`."""
        split = (*x.shape[:2], -1, self.dim)
        q, k, v = self.q_proj(x).view(split), self.k_proj(x).view(split), self.v_proj(x).view(split)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = attend(self.layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return cast("Tensor", self.o_proj(out.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    """One pre-norm block: attention, then MLP or experts, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        dense = not config.is_sparse(layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias) if dense else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, T, E) to (B, T, E), and give the tally of a router in training (see `moe.tally`).

        The tally is returned, not kept here, so that a layer may be computed a second time in the backward pass.
        """
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE):
            out, routed = self.mlp(normed, real)
            return x + out, routed
        return x + self.mlp(normed), None


class Body(nn.Module):
    """Embedding, layers and final norm: what Hugging Face names `model.*`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A model of any family in `families`: ids in, hidden states out, logits apart (only where they are wanted)."""

    native: bool = True
    """Its layers are our own, not those of transformers."""

    def __init__(self, config: ModelConfig) -> None:
        """Build with torch's default weights; `load_model` and `init_model` give meaningful ones."""
        super().__init__()
        self.config = config
        self.model = Body(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._checkpointed = False
        self._rope: Tensor | None = None
        self._routed: Tensor | None = None

    @property
    def head_weight(self) -> Tensor:
        """The (V, E) matrix that makes logits of hidden states: the head's, or the embedding's when tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, real: Tensor | None = None) -> Tensor:
        """Return hidden states (B, T, E) after the final norm.

        `ids` is (B, T) int64; `positions` is (B, T) or (1, T) int64, each token's place in its own sequence.
        `real`, (B, T) bool, names the tokens that count in `router_loss`, where some are padding; it changes nothing
        else.
        """
        x = self.model.embed_tokens(ids)
        cos, sin = self.angles(positions, x.dtype)
        for layer in self.model.layers:
            if self._checkpointed and torch.is_grad_enabled():
                x, routed = checkpoint(layer, x, cos, sin, attend, real, use_reentrant=False)
            else:
                x, routed = layer(x, cos, sin, attend, real)
            if routed is not None:
                self._routed = routed if self._routed is None else self._routed + routed
        return cast("Tensor", self.model.norm(x))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin (B, T, 1, D) for rope at `positions` (B, T)."""
        cos, sin = F.embedding(positions, self._rope_table(positions)).to(dtype).unsqueeze(2).chunk(2, -1)
        return cos, sin

    def checkpoint_layers(self) -> None:
        """Compute the layers again in the backward pass from now on, instead of keeping what they computed."""
        self._checkpointed = True

    def router_loss(self) -> Tensor | None:
        """Return the load-balancing loss of all forward passes since the last call, and start anew.

        Passes count in training mode (`model.train()`) with gradients on. None when there was none, or no router.
        Unscaled: the caller multiplies by `config.router_aux_loss_coef`. See `moe.balance_loss`.
        """
        routed, self._routed = self._routed, None
        return None if routed is None else balance_loss(routed, self.config.num_experts_per_tok)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., E) to logits (..., V): float32, or float64 for a float64 model."""
        logits = F.linear(hidden, self.head_weight)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _rope_table(self, positions: Tensor) -> Tensor:
        """Return the fp32 table (P, 2D) of cos and signed sin, P past every position; kept, and grown when needed.

        Not a buffer, which `model.to(dtype)` would round. Rope of kind "dynamic" has other angles for every length
        past the context, so that its table is made for the longest sequence of this very pass.
        """
        table, config = self._rope, self.config
        if table is not None and torch.compiler.is_compiling():
            return table  # a compiled pass keeps within the context: to look at the positions would break its graph
        length = max(config.max_position_embeddings, int(positions.max()) + 1)
        dynamic = config.rope_scaling is not None and config.rope_scaling.rope_type == "dynamic"
        rows = 0 if table is None else table.shape[0]
        if table is None or table.device != positions.device or rows < length or (dynamic and rows > length):
            table = rope_table(
                length,
                config.head_dim,
                config.rope_theta,
                config.rope_scaling,
                context=config.max_position_embeddings,
            ).to(positions.device)
            self._rope = table
        return table
