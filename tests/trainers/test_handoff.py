"""The hand-off record: what it says of the model is what the finished folder holds, and inference can go by it."""

import json
from pathlib import Path

import pytest

from gymtune.agents import ModelAgent, Renderer, Sampling, rollout
from gymtune.agents.models import load_model
from gymtune.agents.models.config import ModelConfig
from gymtune.agents.models.init import random_decoder
from gymtune.agents.torch_engine import TorchEngine
from gymtune.trainers import train
from gymtune.trainers.handoff import architecture, success


def record_of(run):
    return json.loads((Path(run) / "handoff.json").read_text())


def test_a_finished_run_says_what_inference_needs(settings):
    config = settings("grpo", max_steps=2, eval_steps=1, eval_tasks=8, temperature=0.9)
    final = train(config)
    record = record_of(config.output_dir)
    assert Path(config.output_dir) / record["folder"] == final
    shape = json.loads((final / "config.json").read_text())
    told = record["architecture"]
    assert (told["kind"], told["num_experts"], told["class"]) == ("dense", 0, shape["architectures"][0])
    for key in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim"):
        assert told[key] == shape[key]
    assert (record["dtype"], record["weights"], record["adapter"]) == (shape["dtype"], "full", None)
    renderer = Renderer.from_folder(final)
    assert record["chat"]["tokenizer"] == renderer.fingerprint
    assert record["chat"]["stop_ids"] == list(renderer.stop_ids)
    assert record["chat"]["format"] == renderer.chat_format.name
    assert record["env"] == "gymtune/Arithmetic-v0"
    assert (record["algo"], record["steps"], record["base_model"]) == ("grpo", 2, config.model)
    # by the record alone: sample as in training
    sampling = Sampling(**record["sampling"])
    assert sampling == Sampling(temperature=0.9, max_new_tokens=4)
    agent = ModelAgent(TorchEngine(load_model(final)), renderer, sampling)
    (episode,) = rollout(record["env"], agent, 1, env_args=record["env_args"])
    assert episode.tokenizer == record["chat"]["tokenizer"]


def test_success_is_the_last_and_the_best_one(settings):
    lines = [
        {"step": 0, "eval/success": 0.25},
        {"step": 1, "success": 0.5},
        {"step": 2, "success": 0.4, "eval/success": 0.75},
        {"step": 3, "success": 0.6},
        {"step": 4, "success": 0.1, "eval/success": 0.75},
    ]
    assert success(lines) == {
        "final": {"step": 4, "success": 0.75},
        "best": {"step": 2, "success": 0.75, "folder": "best"},
        "training": {"step": 4, "success": 0.1},
    }
    assert success([{"step": 1, "loss": 0.1}]) == {"final": None, "best": None, "training": None}


def test_the_best_of_the_record_is_the_folder_best(settings):
    config = settings("grpo", eval_steps=1, eval_tasks=16)
    train(config)
    best = json.loads((Path(config.output_dir) / "best" / "best.json").read_text())
    told = record_of(config.output_dir)["success"]["best"]
    assert (told["step"], told["success"]) == (best["step"], best["success"])


def test_a_run_on_a_file_names_the_file(settings, sums_file):
    config = settings("sft", max_steps=2)
    train(config)
    record = record_of(config.output_dir)
    assert (record["prefix"], record["data"], record["env"]) == ("full_sft", str(sums_file), None)
    assert record["success"] == {"final": None, "best": None, "training": None}


def test_an_adapter_is_merged_and_lies_beside(settings):
    pytest.importorskip("peft")
    config = settings("grpo", max_steps=2, lora_r=2)
    train(config)
    record = record_of(config.output_dir)
    assert (record["weights"], record["adapter"]) == ("merged", "grpo/adapter")
    assert (Path(config.output_dir) / record["adapter"] / "adapter_config.json").is_file()


def test_experts_are_counted():
    config = {
        "model_type": "qwen3_moe", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    }  # fmt: skip
    found = architecture(random_decoder(ModelConfig.from_dict(config)))
    assert (found["kind"], found["num_experts"], found["num_experts_per_tok"]) == ("moe", 4, 2)
