"""What sets the model families apart: one table, read by config, decoder and checkpoints in place of ifs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face's `config.json`."""

    architecture: str
    """The class of transformers that opens it."""
    defaults: Mapping[str, Any]
    """Every key the family reads, with the value that transformers takes when the key is missing."""
    qkv_bias: bool = False
    """Queries, keys and values have biases whatever the config says."""
    qk_norm: bool = False
    """RMS norm on each head's queries and keys."""


_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
_MISTRAL: dict[str, Any] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MOE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {**_LLAMA, "attention_bias": False, "mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", {**_LLAMA, **_MISTRAL}),
    "qwen2": Family("Qwen2ForCausalLM", {**_QWEN, "max_window_layers": 28}, qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_QWEN, "max_window_layers": 28, "head_dim": 128, "attention_bias": False},
        qk_norm=True,
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {**_QWEN, **_MOE}, qk_norm=True),
}
"""By `model_type`. SmolLM2 is a llama; MiniMind becomes a qwen3, or a qwen3_moe with its experts."""
