"""What a folder's config and headers tell, against the model that is loaded from it."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from gymtune.agents.models import load_model
from gymtune.agents.models.checkpoint import save_model
from gymtune.agents.models.config import ModelConfig
from gymtune.agents.models.init import random_decoder
from gymtune.agents.models.inspection import inspect_model
from gymtune.tools.errors import ModelError

MOE = {
    "model_type": "qwen3_moe", "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "tie_word_embeddings": True, "eos_token_id": 0,
}  # fmt: skip


def test_a_model_of_our_own(tiny_model):
    facts, model = inspect_model(tiny_model), load_model(tiny_model)
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())
    assert (facts.family, facts.hidden_size, facts.layers, facts.heads, facts.kv_heads) == ("qwen3", 32, 2, 4, 2)
    assert (facts.vocab_size, facts.context) == (model.config.vocab_size, 512)
    assert facts.native
    assert "qwen3, dense, width 32, 2 layers" in str(facts)
    names = {name: weight.shape for name, weight in model.named_parameters()}
    assert {name: weight.shape for name, weight in facts.outline.named_parameters()} == names
    assert all(weight.is_meta for weight in facts.outline.parameters())


def test_a_mixture_of_experts(tmp_path):
    model = random_decoder(ModelConfig.from_dict(MOE))
    save_model(model, tmp_path)
    facts = inspect_model(tmp_path)
    assert facts.experts == 4
    assert "mixture of 4 experts" in str(facts)
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.fixture
def foreign(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = GPTNeoXConfig(vocab_size=61, max_position_embeddings=64, **shape)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    return tmp_path / "neox"


def test_a_model_of_transformers(foreign):
    facts = inspect_model(foreign)
    opened = AutoModelForCausalLM.from_pretrained(foreign)
    assert not facts.native
    assert facts.outline is None
    assert (facts.family, facts.hidden_size, facts.layers, facts.heads, facts.kv_heads) == ("gpt_neox", 32, 2, 4, 4)
    assert (facts.vocab_size, facts.context, facts.experts) == (61, 64, 0)
    assert facts.parameters == sum(weight.numel() for weight in opened.parameters())
    assert str(facts).endswith("layers of transformers")


def test_a_foreign_file_that_is_torn(foreign):
    file = foreign / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        inspect_model(foreign)


def test_a_family_that_nobody_runs(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen33"}))
    with pytest.raises(ModelError, match=r"'qwen33' is unknown to transformers.*Our own decoder: .*Did you mean"):
        inspect_model(folder)
    assert AutoConfig.from_pretrained(tiny_model).model_type == "qwen3"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model(tiny_model, tmp_path, missing):
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match="models init"):
        inspect_model(folder)


def test_a_weight_of_another_shape(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:5].clone()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight wanted \(32,\) found \(5,\)"):
        inspect_model(folder)
