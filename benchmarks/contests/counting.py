"""FLOPs and bytes that a decode step and an update cannot do without, counted from the model's config.

Counted are the matrix products, attention, and the optimizer's reading and writing: what any implementation has to do
once. A multiplication with its addition is 2 FLOPs. Norms, rope, activations and the drawing of tokens count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gymtune.agents.models import ModelConfig

FP32 = 4
"""Bytes of a number."""

ADAMW_NUMBERS = 7
"""AdamW reads weight, gradient and both moments of a parameter, and writes weight and moments."""


@dataclass(frozen=True)
class Product:
    """`times` products of (rows, inner) with (inner, columns)."""

    rows: int
    inner: int
    columns: int
    times: int = 1

    @property
    def flops(self) -> int:
        """Of all of them."""
        return 2 * self.rows * self.inner * self.columns * self.times


def layer_products(config: ModelConfig, rows: int) -> list[Product]:
    """Return the products of all layers for `rows` tokens: q and o, k and v, gate and up, down."""
    width, layers = config.hidden_size, config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return [
        Product(rows, width, heads, layers),
        Product(rows, heads, width, layers),
        Product(rows, width, kv_heads, 2 * layers),
        Product(rows, width, config.intermediate_size, 2 * layers),
        Product(rows, config.intermediate_size, width, layers),
    ]


def forward_products(config: ModelConfig, tokens: int, predicted: int) -> list[Product]:
    """Return the products of a forward pass over `tokens`, with logits for `predicted` of them."""
    return [*layer_products(config, tokens), Product(predicted, config.hidden_size, config.vocab_size)]


def backward_products(config: ModelConfig, tokens: int, predicted: int) -> list[Product]:
    """Return the products of the backward pass: for each forward one the gradient of input and of weight."""
    found = []
    for product in forward_products(config, tokens, predicted):
        rows, inner, columns, times = product.rows, product.inner, product.columns, product.times
        found += [Product(rows, columns, inner, times), Product(columns, rows, inner, times)]
    return found


def attention_flops(config: ModelConfig, pairs: int) -> int:
    """Return the FLOPs of a forward pass in which `pairs` (query, key) pairs of tokens meet in every layer."""
    return 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers * pairs


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes of keys and values of `tokens` cached tokens, all layers."""
    return 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * FP32 * tokens


def causal_pairs(prefix: int, row: int) -> int:
    """Return the pairs of a row of `row` tokens that follow `prefix` tokens and attend to them and causally."""
    return row * prefix + row * (row + 1) // 2


@dataclass(frozen=True)
class UpdateCount:
    """What an update has to compute: tokens, those that predict one in the loss, and pairs that attend."""

    tokens: int
    predicted: int
    pairs: int

    @classmethod
    def of_groups(cls, prompts: Sequence[int], samples: int, new_tokens: int) -> UpdateCount:
        """Count groups of `samples` rows, each a prompt and `new_tokens`: a prompt once, a row's last token not at all.

        A row's first token is predicted by the prompt's last one, which belongs to the prompt's pass.
        """
        row = new_tokens - 1
        return cls(
            tokens=sum(prompts) + len(prompts) * samples * row,
            predicted=len(prompts) * samples * new_tokens,
            pairs=sum(causal_pairs(0, prompt) + samples * causal_pairs(prompt, row) for prompt in prompts),
        )
