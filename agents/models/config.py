"""ModelConfig: what the decoder needs to know of a model, read from and written as Hugging Face's `config.json`.

A key that would change the numbers and that the decoder does not implement is refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...tools.errors import ModelError, closest
from .config_values import experts, flag, int_tuple, number, refuse_unsupported, sizes
from .families import FAMILIES, Family
from .rope import RopeScaling, read_rope

ARCHITECTURES: dict[str, str] = {name: family.architecture for name, family in FAMILIES.items()}
"""The class of transformers that opens each model type."""

MAKE_ONE = "`gymtune models init --out DIR` makes one."
"""The mend named by every error about a folder that is not a model."""

_NO_WINDOW = {"sliding_window": None, "use_sliding_window": False}
_EVERY_FAMILY = ("model_type", "rms_norm_eps", "rope_theta", "tie_word_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder, under Hugging Face's names; `family` says what its model type adds."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    """Biases on q, k, v and o (those of a family that always has some apart)."""
    mlp_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    """The weights of a token's experts are scaled to sum to 1."""
    router_aux_loss_coef: float = 0.0
    """What multiplies `Decoder.router_loss()` in training."""
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def family(self) -> Family:
        """What the model type has that others have not."""
        return FAMILIES[self.model_type]

    def is_sparse(self, layer: int) -> bool:
        """Tell whether a layer's MLP is a mixture of experts."""
        every = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and every and layer not in self.mlp_only_layers

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
        more = int_tuple("eos_token_id", read_json(generation).get("eos_token_id"), str(generation))
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config") -> ModelConfig:
        """Read a Hugging Face config; missing keys get transformers' defaults.

        Raises ModelError naming `where`, the key and its value, for what the decoder does not implement.
        """
        model_type = str(data.get("model_type"))
        if model_type not in FAMILIES:
            raise ModelError(f"{where}: model_type {model_type!r} is not supported.{closest(model_type, FAMILIES)}")
        defaults = FAMILIES[model_type].defaults
        values = {**defaults, **{key: data[key] for key in defaults if key in data}}
        shape: dict[str, Any] = {**sizes(values, where), **experts(data, values, where)}
        refuse_unsupported(data, values, where)
        theta, scaling = read_rope(data, shape["max_position_embeddings"], where)
        if shape["head_dim"] == 2 and scaling is not None and scaling.rope_type == "dynamic":
            raise ModelError(f"{where}: head_dim=2, wanted 4 or more with rope of kind 'dynamic'.")
        return cls(
            model_type=model_type,
            rms_norm_eps=number("rms_norm_eps", data.get("rms_norm_eps", 1e-6), where),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=flag("tie_word_embeddings", data.get("tie_word_embeddings"), where),
            eos_token_ids=int_tuple("eos_token_id", values["eos_token_id"], where),
            attention_bias=flag("attention_bias", values.get("attention_bias"), where),
            mlp_bias=flag("mlp_bias", values.get("mlp_bias"), where),
            **shape,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the Hugging Face config that transformers 4 and 5 open (rope in both of their spellings)."""
        own = asdict(self) | {"mlp_only_layers": list(self.mlp_only_layers)}
        kept = {key: value for key, value in own.items() if key in self.family.defaults or key in _EVERY_FAMILY}
        windows = {key: value for key, value in _NO_WINDOW.items() if key in self.family.defaults}
        scaling = self.rope_scaling.to_dict() if self.rope_scaling else None
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return {
            "architectures": [self.family.architecture],
            **kept,
            **windows,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_scaling": scaling,
            "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": self.rope_theta},
            "bos_token_id": None,
            "eos_token_id": eos,
            "dtype": "float32",
            "use_cache": True,
        }


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raises ModelError with file and line when it is something else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file}: wanted a JSON object, found {type(data).__name__}.")
    return data
