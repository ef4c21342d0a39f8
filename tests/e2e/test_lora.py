"""Training with LoRA: what it leaves, its reference, and a run cut in two that equals the whole one, bit for bit."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gymtune.agents import ModelAgent, Sampling, env_factory
from gymtune.agents.models import CausalAttend, load_adapter, load_model, merged_state
from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.errors import ConfigError
from gymtune.trainers import Listeners, Resolved, TrainConfig, Trainer, train
from gymtune.trainers import build as build_module
from gymtune.trainers import update as update_module
from gymtune.trainers.run_folder import RunFolder

# peft reads an attribute of transformers' models that transformers calls old
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LORA = {"lora_r": 4, "lora_alpha": 8, "max_steps": 3, "save_steps": 1, "learning_rate": 0.01}
ONLINE = {"env": "gymtune/Arithmetic-v0", "prompts_per_step": 4, "num_generations": 4, "max_completion_length": 4}
CLOCK = {"step_time", "time/rollout"}
IDS = torch.arange(20)[None] * 3
CLOSE = {"atol": 5e-5, "rtol": 1e-5}  # merged, the products round elsewhere


def config(algo, model, data, run, **changes):
    source = {"data": str(data), "batch_size": 16} if algo == "sft" else ONLINE
    return TrainConfig(algo=algo, model=str(model), output_dir=str(run), **(LORA | source | changes))


def whole_logits(model):
    with torch.no_grad():
        return model.logits(model(IDS, torch.arange(20)[None], CausalAttend()))


@pytest.mark.parametrize(("algo", "prefix"), [("sft", "full_sft"), ("grpo", "grpo")])
def test_the_finished_folder_is_the_merged_model_and_its_adapter(algo, prefix, taught_model, sums_file, tmp_path):
    final = train(config(algo, taught_model, sums_file, tmp_path / "run"))
    assert final == tmp_path / "run" / prefix
    base = AutoModelForCausalLM.from_pretrained(taught_model)
    with torch.no_grad():
        before = base(IDS).logits
        merged = AutoModelForCausalLM.from_pretrained(final)(IDS).logits
        opened = peft.PeftModel.from_pretrained(base, final / "adapter")
        adapted = opened(IDS).logits
    torch.testing.assert_close(adapted, merged, **CLOSE)
    torch.testing.assert_close(whole_logits(load_model(final)), merged, **CLOSE)
    assert (merged - before).abs().max() > 1e-3
    assert json.loads((final / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        taught_model
    )
    state = load_file(tmp_path / "run" / "checkpoints" / "step_000003" / "optimizer.safetensors")
    assert len(state) == 3 * 2 * 2 * 7  # step and two moments of A and B of seven matrices in two layers
    assert all(".lora_" in name for name in state)


@pytest.mark.parametrize("algo", ["sft", "grpo"])
def test_resumed_equals_uninterrupted_to_the_bit(algo, taught_model, sums_file, tmp_path):
    changes = {"lora_dropout": 0.2} if algo == "sft" else {"beta": 0.1}
    whole, cut = (config(algo, taught_model, sums_file, tmp_path / name, **changes) for name in ("whole", "cut"))
    train(whole)

    def stop(line):
        if line["step"] == 2:  # its checkpoint is not there yet
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(cut, listeners=Listeners(on_step=stop))
    train(cut, resume=True)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "optimizer.safetensors"):
        files = [Path(run.output_dir) / "checkpoints" / "step_000003" / name for run in (whole, cut)]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    lines = [(Path(run.output_dir) / "metrics.jsonl").read_text().splitlines() for run in (whole, cut)]
    left, right = ([{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in run] for run in lines)
    assert left == right


def test_the_base_is_its_own_reference_and_no_second_model_is_loaded(taught_model, tmp_path, monkeypatch):
    loaded, place = [], build_module.place_model
    monkeypatch.setattr(build_module, "place_model", lambda *args, **more: loaded.append(args) or place(*args, **more))
    train(config("grpo", taught_model, None, tmp_path / "run", beta=0.1, num_iterations=2))
    assert len(loaded) == 1
    kl = [json.loads(line)["kl"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert kl[0] >= 0
    assert kl[-1] > 1e-6  # the adapter has moved away from what it is compared with


def test_the_kl_to_the_base_equals_that_of_a_reference_model(taught_model, tmp_path, monkeypatch):
    """The same run with the base loaded a second time, as without LoRA."""
    train(config("grpo", taught_model, None, tmp_path / "off", beta=0.1))
    plain = load_model(taught_model).requires_grad_(False)

    def second(self, batch):
        with torch.no_grad():
            return update_module.policy_logprobs(plain, batch)[0]

    monkeypatch.setattr(update_module.Updater, "_reference_logprobs", second)
    train(config("grpo", taught_model, None, tmp_path / "second", beta=0.1))
    files = [tmp_path / run / "grpo" / "model.safetensors" for run in ("off", "second")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_backend_with_a_model_of_its_own_gets_merged_weights(taught_model, tiny_renderer, tmp_path):
    settings = config("grpo", taught_model, None, tmp_path / "run")
    model, own = build_module._policy(settings, None), load_model(taught_model)
    agent = ModelAgent(TorchEngine(own), tiny_renderer, Sampling(temperature=1.0, max_new_tokens=4))
    run = RunFolder.create(Resolved(settings, {}))
    trainer = Trainer(settings, model, agent, run, env=env_factory(settings.env, agent, settings.env_args))
    before = whole_logits(own)
    final = trainer.train(taught_model)
    assert not torch.equal(whole_logits(own), before)
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in merged_state(model).items())
    again = load_model(taught_model)
    load_adapter(again, final / "adapter")
    assert torch.equal(whole_logits(again), whole_logits(model))


def test_an_unknown_target_is_told_before_a_folder_is_made(taught_model, sums_file, tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'q_proj'"):
        train(config("sft", taught_model, sums_file, tmp_path / "run", lora_target_modules=["q_prj"]))
    assert not (tmp_path / "run").exists()
