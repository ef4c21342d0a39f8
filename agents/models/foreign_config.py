"""What a config of transformers says of a model that our contract cannot hold, and the shape of one that it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...tools.errors import ModelError

_REFUSED = (
    "is_encoder_decoder",
    "add_cross_attention",
    "quantization_config",
    "alibi",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class ForeignConfig:
    """Shape of a model of transformers; heads and their size as its attention really has them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    data: Mapping[str, Any]
    router_aux_loss_coef: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the Hugging Face config as transformers wrote it."""
        return dict(self.data)


def refuse_unsupported(config: Any, where: str) -> None:
    """Raise ModelError naming the first key of a `PreTrainedConfig` that asks for what an `Attend` cannot do."""
    text = config.get_text_config()
    for key in _REFUSED:
        value = getattr(text, key, None) or getattr(config, key, None)
        if value:
            raise ModelError(f"{where}: {key}={value!r} is not supported.")
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - _ATTENTION:
        raise ModelError(f"{where}: layer_types has {sorted(kinds - _ATTENTION)[0]!r}, wanted attention alone.")
    if kinds == {"full_attention"} or (not kinds and getattr(text, "use_sliding_window", True) is False):
        return
    length = longest(text, where)
    for key in ("sliding_window", "attention_chunk_size"):
        window = getattr(text, key, None)
        if isinstance(window, int) and window < length:
            raise ModelError(
                f"{where}: {key}={window} is not supported: layers see less than max_position_embeddings={length}. "
                f"A max_position_embeddings of {window} makes it a model that sees everything."
            )


def longest(text: Any, where: str) -> int:
    """Return the longest sequence of a text config, in tokens; for rope `longrope` only the original context.

    Beyond it the length of a pass changes the keys of all its tokens, and a cache would hold keys of both kinds.
    """
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelError(
            f"{where}: max_position_embeddings={limit!r}, wanted the longest sequence, a positive integer."
        )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for one in (rope, *rope.values()):  # some families have one for each kind of layer
        if isinstance(one, Mapping) and one.get("rope_type", one.get("type")) == "longrope":
            original = one.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit


def logit_scale(text: Any) -> float:
    """Return the constant by which a family multiplies its logits: Cohere's factor, Granite's divisor."""
    return float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)


def eos_ids(*configs: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of several configs (one may be None), each once."""
    found: list[int] = []
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))
