from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from gymtune.agents.models import ModelConfig
from gymtune.tools.errors import ModelError

TYPES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("given", [{}, {"num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": 4}])
def test_missing_keys_get_the_defaults_of_transformers(model_type: str, given: dict[str, Any]) -> None:
    ours = ModelConfig.from_dict({"model_type": model_type} | given)
    theirs = TYPES[model_type](**given)
    assert {k: getattr(ours, k) for k in SAME_NAMES} == {k: getattr(theirs, k) for k in SAME_NAMES}
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("eos", [(), (7,), (7, 9)])
def test_round_trip_through_our_dict_and_through_transformers(model_type: str, eos: tuple[int, ...]) -> None:
    ours = ModelConfig(model_type, 61, 32, 48, 2, 4, 2, 16, 64, 1e-5, 5e5, True, eos)  # type: ignore[arg-type]
    assert ModelConfig.from_dict(ours.to_dict()) == ours
    theirs = TYPES[model_type](**ours.to_dict())
    assert theirs.rope_parameters["rope_theta"] == 5e5
    assert ModelConfig.from_dict(theirs.to_dict()) == ours


def test_rope_theta_at_the_top_and_in_rope_parameters() -> None:
    base = {"model_type": "llama"}
    assert ModelConfig.from_dict(base | {"rope_theta": 5000}).rope_theta == 5000.0
    rope = {"rope_type": "default", "rope_theta": 7000.0}
    assert ModelConfig.from_dict(base | {"rope_theta": 5000, "rope_parameters": rope}).rope_theta == 7000.0
    assert ModelConfig.from_dict(base | {"rope_theta": 5000, "rope_scaling": {"type": "default"}}).rope_theta == 5000.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen4"),
        ("model_type", None),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", "yarn"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", 0.5),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("quantization_config", {"bits": 4}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("hidden_size", "big"),
        ("hidden_size", True),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 5),
        ("head_dim", 7),
        ("rms_norm_eps", -1.0),
        ("rope_theta", float("nan")),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
    ],
)
def test_what_the_decoder_does_not_implement_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict({"model_type": "llama", key: value}, where="there/config.json")
    assert str(caught.value).startswith("there/config.json: ")
    assert key in str(caught.value)
    assert str(value) in str(caught.value)


def test_a_sliding_window_is_refused_only_where_a_layer_uses_it() -> None:
    base = {"model_type": "qwen3", "num_hidden_layers": 4, "sliding_window": 128}
    ModelConfig.from_dict(base | {"use_sliding_window": False})
    ModelConfig.from_dict(base | {"use_sliding_window": True, "max_window_layers": 4})
    ModelConfig.from_dict(base | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None})
    with pytest.raises(ModelError, match="sliding_window=128"):
        ModelConfig.from_dict(base | {"use_sliding_window": True, "max_window_layers": 3})


def test_eos_ids_are_joined_from_both_files_without_repeats(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": [5, 6]}')
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 5]}')
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 6, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 6)


def test_a_folder_that_is_no_model_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such model folder.*gymtune models init --out DIR"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json.*gymtune models init --out DIR"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", json.dumps([1]), "\udcff"])
def test_a_broken_config_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json: (not JSON|wanted a JSON object)"):
        ModelConfig.from_folder(tmp_path)
