"""ModelConfig: what the decoder needs to know of a model, read from and written as Hugging Face's `config.json`.

A key that would change the numbers and that the decoder does not implement is refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from ...tools.errors import ModelError, closest

ModelType = Literal["llama", "qwen3"]

ARCHITECTURES: dict[str, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The class of transformers that opens each model type."""

MAKE_ONE = "`gymtune models init --out DIR` makes one."
"""The mend named by every error about a folder that is not a model."""

# What transformers takes when the key is missing.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "eos_token_id": None,
    },
}
_ROPE_THETA = 10_000.0
_SIZES = tuple(key for key in _DEFAULTS["llama"] if key != "eos_token_id")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Llama or Qwen3 decoder (Qwen3 = Llama with RMS norm on each head's q and k)."""

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = _ROPE_THETA
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json`, and the end-of-sequence ids of `generation_config.json` where there is one.

        Raises ModelError when the folder or file is missing, or as `from_dict` does.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such model folder. {MAKE_ONE}")
        file = folder / "config.json"
        if not file.is_file():
            raise ModelError(f"{folder}: not a model folder, it has no config.json. {MAKE_ONE}")
        config = cls.from_dict(read_json(file), where=str(file))
        generation = folder / "generation_config.json"
        if not generation.is_file():
            return config
        more = _eos_ids(read_json(generation).get("eos_token_id"), str(generation))
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config") -> ModelConfig:
        """Read a Hugging Face config; missing keys get transformers' defaults.

        Raises ModelError naming `where`, the key and its value, for what the decoder does not implement.
        """
        model_type = data.get("model_type")
        if model_type not in ARCHITECTURES:
            hint = closest(str(model_type), ARCHITECTURES)
            raise ModelError(f"{where}: model_type {model_type!r} is not supported.{hint}")
        defaults = _DEFAULTS[model_type]
        _refuse_unsupported(data, model_type, where)
        sizes = {key: data.get(key, defaults[key]) for key in _SIZES}
        if sizes["num_key_value_heads"] is None:
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        for key, value in sizes.items():
            if key != "head_dim" or value is not None:
                _require_positive_int(key, value, where)
        if sizes["head_dim"] is None:
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        config = cls(
            model_type=cast("ModelType", model_type),
            rms_norm_eps=_positive_float("rms_norm_eps", data.get("rms_norm_eps", 1e-6), where),
            rope_theta=_rope_theta(data, where),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_ids(data.get("eos_token_id", defaults["eos_token_id"]), where),
            **sizes,
        )
        _check_heads(config, where)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the Hugging Face config that transformers 4 and 5 open (rope in both of their spellings)."""
        data: dict[str, Any] = {"architectures": [ARCHITECTURES[self.model_type]], **asdict(self)}
        del data["eos_token_ids"]
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return data | {
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "bos_token_id": None,
            "eos_token_id": eos,
            "dtype": "float32",
            "use_cache": True,
        }


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raises ModelError with file and line when it is something else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file}: wanted a JSON object, found {type(data).__name__}.")
    return data


def _refuse_unsupported(data: Mapping[str, Any], model_type: str, where: str) -> None:
    """Raise ModelError for the first key whose value would change the numbers behind the decoder's back."""
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
    for key, accepted in wanted.items():
        value = data.get(key, accepted[0])
        if value not in accepted:
            raise ModelError(f"{where}: {key}={value!r} is not supported, wanted {accepted[0]!r}.")
    for key in ("rope_scaling", "rope_parameters"):
        rope = data.get(key) or {}
        if not isinstance(rope, Mapping) or not _plain_rope(rope):
            raise ModelError(f"{where}: {key}={rope!r} is not supported, wanted rope_type 'default' for all layers.")
    _refuse_sliding_window(data, model_type, where)


def _plain_rope(rope: Mapping[str, Any]) -> bool:
    """Tell whether rope parameters are the unscaled kind, on all channels and the same in all layers."""
    by_layer = any(isinstance(value, Mapping) for value in rope.values())
    kind = rope.get("rope_type", rope.get("type", "default"))
    return kind == "default" and not by_layer and rope.get("partial_rotary_factor", 1.0) == 1.0


def _refuse_sliding_window(data: Mapping[str, Any], model_type: str, where: str) -> None:
    """Raise ModelError when some layer would see a window only (a window that is switched off is no fault)."""
    types = data.get("layer_types")
    if types is not None and any(kind != "full_attention" for kind in types):
        raise ModelError(f"{where}: layer_types={types!r} is not supported, wanted 'full_attention' everywhere.")
    if model_type != "qwen3" or types is not None or not data.get("use_sliding_window", False):
        return
    layers = data.get("num_hidden_layers", _DEFAULTS["qwen3"]["num_hidden_layers"])
    window = data.get("sliding_window", 4096)
    if window is not None and data.get("max_window_layers", 28) < layers:
        raise ModelError(f"{where}: use_sliding_window=True, sliding_window={window!r} is not supported, wanted False.")


def _rope_theta(data: Mapping[str, Any], where: str) -> float:
    """Return the base of the rotary angles: in `rope_parameters` (transformers 5) or at the top (transformers 4)."""
    top = data.get("rope_theta", _ROPE_THETA)
    # transformers lets a non-empty rope_scaling take the place of rope_parameters
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    return _positive_float("rope_theta", rope.get("rope_theta", top), where)


def _eos_ids(value: Any, where: str) -> tuple[int, ...]:
    """Return the ids of an `eos_token_id`: None, an int or a list of ints."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{where}: eos_token_id={value!r}, wanted a token id or a list of token ids.")
    return tuple(ids)


def _require_positive_int(key: str, value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key}={value!r}, wanted a positive integer.")


def _positive_float(key: str, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{where}: {key}={value!r}, wanted a positive number.")
    return float(value)


def _check_heads(config: ModelConfig, where: str) -> None:
    """Raise ModelError when heads cannot be grouped over key/value heads or halved for rope."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}.")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim={config.head_dim} is odd, rotary embeddings need an even one.")
