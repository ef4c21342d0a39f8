"""Values of a `config.json`, each checked.

What is wrong, and what the decoder does not implement, raises ModelError naming file, key, value and what was wanted.
`values` below are those of the keys that a family reads, its defaults filled in; `data` is the whole file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...tools.errors import ModelError

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def positive_int(key: str, value: Any, where: str) -> int:
    """Return `value` if it is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key}={value!r}, wanted a positive integer.")
    return value


def number(key: str, value: Any, where: str, *, above: float = 0.0) -> float:
    """Return `value` as a float if it is a finite number above `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > above):
        raise ModelError(f"{where}: {key}={value!r}, wanted a number above {above:g}.")
    return float(value)


def flag(key: str, value: Any, where: str) -> bool:
    """Return a true or false; null counts as false."""
    if not isinstance(value, bool | None):
        raise ModelError(f"{where}: {key}={value!r}, wanted true or false.")
    return bool(value)


def int_tuple(key: str, value: Any, where: str) -> tuple[int, ...]:
    """Return the ids of null, one integer or a list of integers, none below 0."""
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{where}: {key}={value!r}, wanted an integer of 0 or more, or a list of such.")
    return tuple(ids)


def sizes(values: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the sizes that every family has; two of them follow from others where the config leaves them out."""
    given = {key: positive_int(key, values[key], where) for key in _SIZES if values[key] is not None}
    missing = [key for key in _SIZES if key not in given and key not in ("head_dim", "num_key_value_heads")]
    if missing:
        raise ModelError(f"{where}: {missing[0]}=None, wanted a positive integer.")
    heads = given["num_attention_heads"]
    whole = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads} | given
    if heads % whole["num_key_value_heads"]:
        kv_heads = whole["num_key_value_heads"]
        raise ModelError(f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}.")
    if whole["head_dim"] < 1 or whole["head_dim"] % 2:
        raise ModelError(f"{where}: head_dim={whole['head_dim']}, rotary embeddings need an even one.")
    return whole


def experts(data: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a mixture of experts; none for a dense family."""
    if "num_experts" not in values:
        return {}
    # transformers 5 writes the number under another name
    given = {**values, "num_experts": data.get("num_local_experts", values["num_experts"])}
    whole = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
    fields: dict[str, Any] = {key: positive_int(key, given[key], where) for key in whole}
    if fields["num_experts_per_tok"] > fields["num_experts"]:
        chosen, there = fields["num_experts_per_tok"], fields["num_experts"]
        raise ModelError(f"{where}: num_experts_per_tok={chosen} is more than num_experts={there}.")
    coefficient = given["router_aux_loss_coef"]
    return fields | {
        "norm_topk_prob": flag("norm_topk_prob", given["norm_topk_prob"], where),
        "mlp_only_layers": int_tuple("mlp_only_layers", given["mlp_only_layers"], where),
        "router_aux_loss_coef": 0.0 if coefficient == 0 else number("router_aux_loss_coef", coefficient, where),
    }


def refuse_unsupported(data: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for the first key whose value would change the numbers behind the decoder's back."""
    for key, wanted in (("hidden_act", "silu"), ("quantization_config", None)):
        value = data.get(key, wanted)
        if value != wanted:
            raise ModelError(f"{where}: {key}={value!r} is not supported, wanted {wanted!r}.")
    types = data.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(kind == "full_attention" for kind in types)):
        raise ModelError(f"{where}: layer_types={types!r} is not supported, wanted 'full_attention' everywhere.")
    _refuse_window(data, values, where)


def _refuse_window(data: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    """Raise ModelError when some layer would see less than the context (a window that is switched off is no fault)."""
    window = values.get("sliding_window")
    if window is None or not values.get("use_sliding_window", True):
        return
    context, layers = values["max_position_embeddings"], values["num_hidden_layers"]
    if positive_int("sliding_window", window, where) >= context:
        return
    if "max_window_layers" in values:  # the first layer with a window; layer_types, where given, go before it
        first = values["max_window_layers"]
        if data.get("layer_types") or (first != 0 and positive_int("max_window_layers", first, where) >= layers):
            return
    raise ModelError(
        f"{where}: sliding_window={window} is not supported: layers see less than max_position_embeddings={context}. "
        f"Within {window} tokens nothing is lost: set max_position_embeddings to {window}."
    )
