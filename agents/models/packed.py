"""A decoder's layers for sampling on a CPU: its matrices copied into the blocked layout of oneDNN's products.

At the few rows of decoding a product waits for its weights, and the plain layout is read badly: measured on two cores
with AVX512, 576 x 3072 at 32 rows runs at 102 GFLOP/s plain and at 175 packed, at 1 row at 5.7 and 11. The copies cost
the memory of the weights once more, and are made anew when the weights have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoder import Attend, Attention, Decoder, Layer
from .lora import merged_state
from .moe import MoE
from .rope import rotate

_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_REORDER: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_ROWS = 32  # the number of rows that oneDNN lays the weights out for
_FEW = 64  # up to so many rows a product is made for their very number; above, for the next multiple of this


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """x W^T + b, with what follows it done while the result is still in the cache."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedProduct:
        """Copy a matrix (out, in) into the blocked layout."""
        with torch.no_grad():
            return cls(_REORDER(weight.detach().contiguous(), _ROWS), bias)

    @staticmethod
    def available() -> bool:
        """Tell whether this torch has the operators: its own compiler makes use of them, where oneDNN is built in."""
        built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return bool(built) and None not in (_LINEAR, _REORDER)

    def __call__(self, x: Tensor) -> Tensor:
        """Map (N, in) to (N, out)."""
        return cast("Tensor", _LINEAR.default(x, self.weight, self.bias, "none", [], ""))

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(x W^T + b)."""
        return cast("Tensor", _LINEAR.default(x, self.weight, self.bias, "swish", [], ""))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Return (x W^T + b) * other."""
        return cast("Tensor", _LINEAR.binary(x, other, self.weight, self.bias, "mul"))

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return x W^T + b + other."""
        return cast("Tensor", _LINEAR.binary(x, other, self.weight, self.bias, "add"))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer: norms' weights are multiplied into the matrices that follow them, where these are packed."""

    qkv: PackedProduct
    head_norm: Tensor | None
    """(H + KV, D): weights of the norms of queries and keys."""
    out: PackedProduct
    mlp: tuple[PackedProduct, PackedProduct, PackedProduct] | None
    """gate, up, down; None where the layer is a mixture of experts, which runs as it is."""


class PackedDecoder:
    """What a `Decoder` computes, to rounding, for one row of packed tokens, without gradients.

    Adapters are merged into the copies. When weights have changed, make a new one.
    """

    def __init__(self, model: Decoder) -> None:
        self._model, self._config = model, model.config
        self._heads = model.config.num_attention_heads + model.config.num_key_value_heads
        state = merged_state(model)
        self._layers = [self._pack_layer(state, number) for number in range(model.config.num_hidden_layers)]
        self._embedding = state["model.embed_tokens.weight"]
        self._norm = state["model.norm.weight"]
        self._head = PackedProduct.of(self._embedding if model.lm_head is None else state["lm_head.weight"])
        self._eps = self._norm.new_tensor(model.config.rms_norm_eps)

    @staticmethod
    def suits(model: object) -> bool:
        """Tell whether this model can be packed: our own layers, in float32 on a CPU, with a torch that has oneDNN."""
        if not isinstance(model, Decoder) or not PackedProduct.available():
            return False
        return model.head_weight.dtype == torch.float32 and model.head_weight.device.type == "cpu"

    @staticmethod
    def rows(count: int) -> int:
        """Return how many rows to give a product of at least `count`: oneDNN makes (and keeps) code for each number."""
        return count if count <= _FEW else -(-count // _FEW) * _FEW

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states (1, T, E) after the final norm; ids and positions are (1, T) int64."""
        cos, sin = (table[0] for table in self._model.angles(positions, torch.float32))
        x = F.embedding(ids[0], self._embedding)
        for number, layer in enumerate(self._layers):
            x = self._attention(number, layer, x, cos, sin, attend)
            if layer.mlp is None:
                block = cast("Layer", self._model.model.layers[number])
                x = x + block.mlp(block.post_attention_layernorm(x)[None])[0][0]
            else:
                gate, up, down = layer.mlp
                normed = self._normalised(x)
                x = down.plus(up.times(normed, gate.silu(normed)), x)
        return (self._normalised(x) * self._norm)[None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (N, E) to logits (N, V)."""
        count = len(hidden)
        return self._head(F.pad(hidden, (0, 0, 0, self.rows(count) - count)))[:count]

    def _attention(self, number: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        config = self._config
        qkv = layer.qkv(self._normalised(x)).view(len(x), -1, config.head_dim)
        turned = qkv[:, : self._heads]
        if layer.head_norm is not None:
            turned = self._normalised(turned) * layer.head_norm
        turned = rotate(turned, cos, sin).transpose(0, 1)[None]
        q, k = turned[:, : config.num_attention_heads], turned[:, config.num_attention_heads :]
        out = attend(number, q, k, qkv[:, self._heads :].transpose(0, 1)[None])
        return layer.out.plus(out[0].transpose(0, 1).reshape(len(x), -1), x)

    def _normalised(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) over the last axis; in four kernels, where torch's own takes seven."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()

    def _pack_layer(self, state: dict[str, Tensor], number: int) -> _Layer:
        prefix = f"model.layers.{number}."
        block = cast("Layer", self._model.model.layers[number])
        before, after = (state[f"{prefix}{name}_layernorm.weight"] for name in ("input", "post_attention"))

        def joined(*names: str, scale: Tensor | None = None) -> PackedProduct:
            weights = torch.cat([state[f"{prefix}{name}.weight"] for name in names])
            biases = [state[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in state]
            return PackedProduct.of(
                weights if scale is None else weights * scale, torch.cat(biases) if biases else None
            )

        qkv = joined(*(f"self_attn.{name}_proj" for name in "qkv"), scale=before)
        mlp = None
        if not isinstance(block.mlp, MoE):
            gate, up = (joined(f"mlp.{name}_proj", scale=after) for name in ("gate", "up"))
            mlp = gate, up, joined("mlp.down_proj")
        return _Layer(qkv, _head_norm(block.self_attn), joined("self_attn.o_proj"), mlp)


def _head_norm(attention: Attention) -> Tensor | None:
    """Return the norms' weights of every query and key head, one under the other."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    q, k = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    dim = attention.dim
    heads, kv_heads = (linear.out_features // dim for linear in (attention.q_proj, attention.k_proj))
    return torch.cat((q.expand(heads, dim), k.expand(kv_heads, dim)))
