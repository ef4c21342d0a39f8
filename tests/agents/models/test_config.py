from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from gymtune.agents.models import ModelConfig, check_vocabulary
from gymtune.agents.models.config import ARCHITECTURES
from gymtune.tools.errors import ModelError

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


EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "decoder_sparse_step",
)
NO_WINDOW = {"sliding_window": None}


def theirs_of(data: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**data)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("given", [{}, {"num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": 4}])
def test_missing_keys_get_the_defaults_of_transformers(model_type: str, given: dict[str, Any]) -> None:
    ours = ModelConfig.from_dict({"model_type": model_type} | given | NO_WINDOW)
    theirs = theirs_of({"model_type": model_type} | given)
    names = SAME_NAMES + (EXPERTS if "moe" in model_type else ())
    if not hasattr(theirs, "head_dim"):
        theirs.head_dim = theirs.hidden_size // theirs.num_attention_heads  # as their attention does
    assert {k: getattr(ours, k) for k in names} == {k: getattr(theirs, k) for k in names}
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert (
        type(AutoModelForCausalLM.from_config(theirs_of(TINY | ours_of(model_type)))).__name__
        == (ARCHITECTURES[model_type])
    )


TINY = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def ours_of(model_type: str) -> dict[str, Any]:
    given = TINY | NO_WINDOW | {"model_type": model_type, "num_key_value_heads": 1, "num_experts": 8}
    return ModelConfig.from_dict(given).to_dict()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("eos", [(), (7,), (7, 9)])
def test_round_trip_through_our_dict_and_through_transformers(model_type: str, eos: tuple[int, ...]) -> None:
    data = {"model_type": model_type, "head_dim": 16, "rope_theta": 5e5, "tie_word_embeddings": True}
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_experts": 12, "mlp_only_layers": [1], "norm_topk_prob": True, "router_aux_loss_coef": 0.5}
    biases = {"attention_bias": True, "mlp_bias": True}
    ours = ModelConfig.from_dict(data | sizes | more | biases | NO_WINDOW | {"eos_token_id": list(eos)})
    assert ours.eos_token_ids == eos
    assert ModelConfig.from_dict(ours.to_dict()) == ours
    theirs = theirs_of(ours.to_dict())
    assert theirs.rope_parameters["rope_theta"] == 5e5
    assert getattr(theirs, "sliding_window", None) is None
    assert ModelConfig.from_dict(theirs.to_dict()) == ours
    if model_type == "qwen3_moe":
        assert (ours.num_experts, ours.mlp_only_layers, ours.router_aux_loss_coef) == (12, (1,), 0.5)
        assert [ours.is_sparse(i) for i in range(3)] == [True, False, True]
        assert "num_experts" not in theirs.to_dict()  # it has another name there, and is read all the same
    else:
        assert ours.num_experts == 0
        assert not ours.is_sparse(0)


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
        ("rope_scaling", {"rope_type": "longrope", "factor": 8.0}),
        ("rope_scaling", "yarn"),
        ("rope_parameters", ["linear", 2]),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", 0.5),
        ("attention_bias", "yes"),
        ("mlp_bias", 1),
        ("tie_word_embeddings", "true"),
        ("model_type", ["llama"]),
        ("layer_types", "full_attention"),
        ("hidden_act", "gelu"),
        ("quantization_config", {"bits": 4}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("hidden_size", "big"),
        ("hidden_size", True),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", None),
        ("num_attention_heads", "8"),
        ("num_key_value_heads", 5),
        ("head_dim", 7),
        ("rms_norm_eps", -1.0),
        ("rope_theta", float("nan")),
        ("rope_theta", 1.0),
        ("rms_norm_eps", float("inf")),
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


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("num_experts", 0, "num_experts=0"),
        ("num_local_experts", "8", "num_experts='8'"),
        ("num_experts_per_tok", 9, "num_experts_per_tok=9 is more than num_experts=8"),
        ("norm_topk_prob", 1, "norm_topk_prob=1"),
        ("router_aux_loss_coef", -0.1, "router_aux_loss_coef=-0.1"),
        ("mlp_only_layers", [-1], r"mlp_only_layers=\[-1\]"),
        ("decoder_sparse_step", 0, "decoder_sparse_step=0"),
    ],
)
def test_experts_that_make_no_sense_are_refused(key: str, value: object, complaint: str) -> None:
    base: dict[str, object] = {"model_type": "qwen3_moe", "num_experts": 8}
    assert ModelConfig.from_dict(base | {"router_aux_loss_coef": 0}).router_aux_loss_coef == 0
    with pytest.raises(ModelError, match=complaint):
        ModelConfig.from_dict(base | {key: value})


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_sliding_window_is_refused_only_where_a_layer_uses_it(model_type: str) -> None:
    base = {"model_type": model_type, "num_hidden_layers": 4, "sliding_window": 128}
    on = base | {"use_sliding_window": True}
    ModelConfig.from_dict(base)
    ModelConfig.from_dict(base | {"use_sliding_window": False})
    ModelConfig.from_dict(on | {"max_window_layers": 4})
    ModelConfig.from_dict(on | {"max_window_layers": 0, "layer_types": ["full_attention"] * 4})
    ModelConfig.from_dict(on | {"max_window_layers": 0, "sliding_window": None})
    ModelConfig.from_dict(on | {"max_window_layers": 0, "max_position_embeddings": 128})
    for first in (0, 3):
        with pytest.raises(ModelError, match=r"sliding_window=128 .*set max_position_embeddings to 128"):
            ModelConfig.from_dict(on | {"max_window_layers": first})


def test_mistral_has_a_window_unless_it_says_null_and_qwen3_moe_one_for_all_layers() -> None:
    with pytest.raises(ModelError, match="sliding_window=4096"):
        ModelConfig.from_dict({"model_type": "mistral"})
    with pytest.raises(ModelError, match="sliding_window=4096"):
        ModelConfig.from_dict({"model_type": "mistral", "layer_types": ["full_attention"] * 32})
    ModelConfig.from_dict({"model_type": "mistral", "sliding_window": None})
    narrow = ModelConfig.from_dict({"model_type": "mistral", "max_position_embeddings": 4096})
    assert narrow.to_dict()["sliding_window"] is None
    with pytest.raises(ModelError, match="sliding_window=99"):
        ModelConfig.from_dict({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 99})
    ModelConfig.from_dict({"model_type": "llama", "sliding_window": 99})  # no key of that family


def test_an_unknown_family_is_named_with_the_closest() -> None:
    with pytest.raises(ModelError, match=r"model_type 'qwen3moe' is not supported\. Did you mean 'qwen3_moe'"):
        ModelConfig.from_dict({"model_type": "qwen3moe"})


def test_a_tokenizer_bigger_than_the_embedding_is_refused() -> None:
    config = ModelConfig.from_dict({"model_type": "llama", "vocab_size": 100})
    check_vocabulary(100, config, "there")
    with pytest.raises(ModelError, match="there: the tokenizer has 101 tokens, the model's embedding 100"):
        check_vocabulary(101, config, "there")


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


@pytest.mark.parametrize("text", ["{", json.dumps([1]), "\udcff", "[" * 100_000], ids=["cut", "list", "bytes", "deep"])
def test_a_broken_config_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json: (not JSON|wanted a JSON object)"):
        ModelConfig.from_folder(tmp_path)
