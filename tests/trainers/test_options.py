"""Every option that an algorithm reads changes something: two short runs for each, told apart by what they left."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch

from gymtune.agents import FunctionAgent, Renderer, TrajectoryWriter, rollout
from gymtune.agents import torch_engine as engine_module
from gymtune.agents.models import decoder as decoder_module
from gymtune.tools.errors import ConfigError
from gymtune.trainers import TrainConfig, resolve, train
from gymtune.trainers import update as update_module
from gymtune.trainers.presets import PRESETS

#: key -> (what must differ, how the second run differs, what both runs have besides)
CASES = {
    "seed": ("weights", 1, {}),
    "max_steps": ("metrics", 3, {}),
    "learning_rate": ("weights", 0.02, {}),
    "lr_scheduler_type": ("weights", "constant", {}),
    "warmup_steps": ("weights", 2, {}),
    "min_lr_ratio": ("weights", 0.9, {}),
    "weight_decay": ("weights", 0.5, {}),
    "adam_beta1": ("weights", 0.5, {}),
    "adam_beta2": ("weights", 0.5, {}),
    "adam_epsilon": ("weights", 0.1, {}),
    "max_grad_norm": ("weights", 1e-6, {}),
    "micro_batch_tokens": ("forwards", 1, {}),
    "gradient_checkpointing": ("layers", True, {}),
    "averaging": ("weights", "sequence_mean", {"averaging": "token_mean"}),
    "save_steps": ("files", 1, {"save_total_limit": None}),
    "save_total_limit": ("files", 1, {"save_steps": 1}),
    "logging_steps": ("metrics", 2, {}),
    "torch_threads": ("threads", 2, {"torch_threads": 1}),
    "dtype": ("weights", "bfloat16", {}),
    "device": ("error", "cuda", {}),
    "batch_size": ("metrics", 7, {}),
    "min_reward": ("weights", 0.5, {}),
    "env": ("metrics", "gymtune/Calculator-v0", {}),
    "env_args": ("weights", {"levels": [2]}, {}),
    "prompts_per_step": ("metrics", 6, {}),
    "num_generations": ("metrics", 3, {}),
    "mini_batches": ("weights", 2, {}),
    "num_iterations": ("weights", 2, {}),
    "temperature": ("weights", 0.5, {}),
    "max_completion_length": ("metrics", 2, {}),
    "max_model_length": ("metrics", 30, {}),
    "max_cache_tokens": ("metrics", 30, {}),
    "layers": ("passes", "deterministic", {}),
    "beta": ("weights", 0.5, {}),
    "epsilon": ("weights", 1e-4, {"num_iterations": 2, "learning_rate": 1e-3}),
    "epsilon_high": ("weights", 1e-4, {"num_iterations": 2, "learning_rate": 1e-3}),
    "scale_rewards": ("weights", "none", {}),
    "mask_truncated_completions": ("weights", True, {"max_completion_length": 2}),
    "reward_weights": ("weights", {"gt": 0.1, "unfinished": 1.0}, {"max_completion_length": 2}),
    "reward_model": ("metrics", "stub", {}),
    "lora_r": ("weights", 4, {}),
    "lora_alpha": ("weights", 64, {"lora_r": 2}),
    "lora_dropout": ("weights", 0.5, {"lora_r": 2}),
    "lora_target_modules": ("weights", ["q_proj", "mlp.down_proj"], {"lora_r": 2}),
    "control": ("weights", "shuffle_rewards", {}),
    "save_trajectories": ("files", False, {}),
}
CLOCK = {"step_time", "time/rollout"}
PAIRS = [(algo, key) for algo, preset in PRESETS.items() for key in sorted(preset.reads & CASES.keys())]


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory):
    """Episodes that answer 7 to "What is 3 + b?" and 12 to "What is 4 + b?": few are right, not all equally long."""
    path = tmp_path_factory.mktemp("mixed") / "guesses.jsonl"
    guess = FunctionAgent(lambda messages: "7" if int(messages[-1]["content"][len("What is ")]) % 2 else "12")
    with TrajectoryWriter(path) as writer:
        for trajectory in rollout("gymtune/Arithmetic-v0", guess, 60):
            writer.append(trajectory)
    return path


@pytest.fixture(scope="module")
def outcome(taught_model, tiny_renderer, mixed_file, tmp_path_factory):
    """Run a config of two steps and return what can be seen of it; the same config is run once."""
    forwards, threads, layers, passes, known = [], [], [], [], {}
    plain_passes = engine_module.ModelPasses

    def noted(model, cache, layers):
        passes.append(layers)
        return plain_passes(model, cache, layers)

    checkpointed = decoder_module.checkpoint
    plain = update_module.policy_logprobs

    def run(algo, **changes):
        source = {"data": str(mixed_file), "batch_size": 8}
        if algo != "sft":
            source = {"env": "gymtune/Arithmetic-v0", "prompts_per_step": 4, "num_generations": 4}
            source |= {"max_completion_length": 4}
        where = tmp_path_factory.mktemp("options") / "run"
        base = {"model": str(taught_model), "output_dir": str(where), "max_steps": 2, "learning_rate": 0.01}
        forwards.clear()
        layers.clear()
        passes.clear()
        threads.clear()
        try:
            folder = train(TrainConfig(algo=algo, **(base | source | changes)))
        except ConfigError as error:
            return {"error": str(error)}
        lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
        return {
            "error": None,
            "weights": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
            "metrics": [{k: v for k, v in line.items() if k not in CLOCK} for line in lines],
            "files": sorted(str(path.relative_to(where)) for path in where.rglob("*")),
            "forwards": len(forwards),
            "layers": len(layers),
            "passes": list(passes),
            "threads": list(threads),
        }

    def once(algo, **changes):
        key = json.dumps([algo, changes])
        if key not in known:
            known[key] = run(algo, **changes)
        return known[key]

    once.again = run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Renderer, "from_folder", lambda folder: tiny_renderer)  # as loaded, only sooner
        patch.setattr(torch, "set_num_threads", threads.append)
        patch.setattr(engine_module, "ModelPasses", noted)
        patch.setattr(decoder_module, "checkpoint", lambda *a, **k: layers.append(a) or checkpointed(*a, **k))
        patch.setattr(update_module, "policy_logprobs", lambda *args: forwards.append(args) or plain(*args))
        yield once


def test_the_table_is_complete():
    """These name what a run is; the tests below say what they change."""
    assert set().union(*(preset.reads for preset in PRESETS.values())) - CASES.keys() == {
        "algo",
        "model",
        "output_dir",
        "data",
    }


@pytest.mark.parametrize(("algo", "key"), PAIRS)
def test_an_option_changes_something(outcome, algo, key):
    seen, value, besides = CASES[key]
    if key in PRESETS[algo].pinned:
        assert "pins it to" in outcome_error(algo, {key: value})
        return
    if key == "device" and torch.cuda.is_available():
        seen = "weights"
    besides = {name: other for name, other in besides.items() if name in PRESETS[algo].reads}
    first, second = outcome(algo, **besides), outcome(algo, **(besides | {key: value}))
    assert first["error"] is None
    assert first[seen] != second.get(seen)
    if seen != "error":
        assert second["error"] is None


def outcome_error(algo, changes):
    source = {"data": "d"} if algo == "sft" else {"env": "E-v0"}
    with pytest.raises(ConfigError) as caught:
        TrainConfig(algo=algo, model="m", output_dir="o", **source, **changes)
    return str(caught.value)


@pytest.mark.parametrize("algo", PRESETS)
def test_no_option_changes_nothing(outcome, algo):
    """The tests above can fail: where nothing is changed, nothing differs, wherever it is written."""
    assert outcome(algo) == outcome.again(algo)


def test_algorithm_model_and_data_are_what_was_asked_for(outcome, tiny_model, sums_file):
    sft = outcome("sft")
    assert len({outcome(algo)["weights"] for algo in PRESETS}) == len(PRESETS)
    assert outcome("sft", model=str(tiny_model))["weights"] != sft["weights"]
    assert outcome("sft", data=str(sums_file))["weights"] != sft["weights"]


def test_the_commands_in_the_docs_are_accepted():
    page = Path(__file__).parents[2] / "docs" / "algorithms.md"
    commands = re.findall(r"`(?:gymtune train )?--algo (\w+)((?: --set [\w=.]+)*)`", page.read_text(encoding="utf-8"))
    assert len(commands) >= 4
    for algo, sets in commands:
        source = {"data": "d"} if algo == "sft" else {"env": "E-v0"}
        options = {"model": "m", "output_dir": "o"} | source
        if (algo, sets) == ("cispo", " --set averaging=constant"):  # the page says that it is refused
            with pytest.raises(ConfigError, match="pins it"):
                resolve(algo, sets=sets.split()[1::2], options=options)
        else:
            assert resolve(algo, sets=sets.split()[1::2], options=options).config.algo == algo
