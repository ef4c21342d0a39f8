"""Every option that an algorithm reads changes something: two short runs for each, told apart by what they left."""

import hashlib
import json
import re
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import gymnasium
import pytest
import torch

from gymtune.agents import FunctionAgent, Renderer, Sampling, TrajectoryWriter, read_trajectories, rollout
from gymtune.agents import torch_engine as engine_module
from gymtune.agents.loading import load_agent
from gymtune.agents.models import decoder as decoder_module
from gymtune.envs import ChatEnv, Task
from gymtune.rewards.components import Component
from gymtune.tools.errors import ConfigError, DataError
from gymtune.tools.messages import user
from gymtune.trainers import TrainConfig, resolve, train
from gymtune.trainers import update as update_module
from gymtune.trainers.presets import PRESETS, SERVERS

TURNS = "gymtune-test/Turns-v0"
#: Several passes at a high rate: ratios leave 1.
FAR = {"num_iterations": 2, "learning_rate": 1e-3}
#: The reference moves, and what it moves by counts.
FOLLOWING = {"beta": 0.5, "sync_ref_model": True}
#: What is earned counts beside a teacher.
PAID = {"reward_coef": 1.0}
#: Stands for the folder of the tiny model, which is known to the tests alone.
TINY = "the tiny model"
#: Stand for the file of the tests, the same with an episode that is too long, and one of other held-out episodes.
MIXED, LONG, HELD = "the mixed file", "the file with a long one", "the other held-out file"
#: Stand for the folder of the model that is trained, and for one in that of the run.
TAUGHT, CACHE = "the taught model", "a cache"


class TurnsEnv(ChatEnv):
    """Two sums, each answer paid by how it looks; a first answer that begins with 1 breaks the checker."""

    pays_without_success = True

    def __init__(self, **options):
        tasks = [Task(f"turns/{a}", (user(f"What is {a} + 4?"),), str(a + 4)) for a in range(10)]
        super().__init__(tasks, [Component("looks", "turn", self.looks)], max_turns=2, **options)

    def looks(self, episode):
        broken = episode.turn == 1 and episode.answer.startswith("1")
        return None if broken else float(sum(map(ord, episode.answer)) % 5)

    def user_reply(self, episode):
        return "What is 2 + 5?" if episode.turn == 1 else None


if TURNS not in gymnasium.registry:
    gymnasium.register(TURNS, entry_point=TurnsEnv)

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
    "batch_size": ("metrics", 7, {"data": MIXED}),
    "min_reward": ("weights", 0.5, {}),
    "best_of": ("weights", 1, {}),
    "drop_long": ("error", False, {"data": LONG, "drop_long": True}),
    "eval_data": ("metrics", HELD, {"data": MIXED, "eval_steps": 1}),
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
    "kl_estimator": ("weights", "k2", {"beta": 0.5}),
    "kl_in": ("weights", "reward", {"beta": 0.5, "kl_in": "loss"}),
    "entropy_coef": ("weights", 0.1, {}),
    "credit": ("weights", "turn", {"env": TURNS, "importance_sampling_level": "token"}),
    "min_group_size": ("weights", 4, {"env": TURNS} | PAID),
    "overlong_buffer": ("weights", 3, PAID),
    "importance_sampling_level": ("weights", "sequence", FAR | {"importance_sampling_level": "token"}),
    "importance_sampling_correction": ("metrics", "token_truncate", {}),
    "importance_sampling_cap": ("weights", 0.5, {"importance_sampling_correction": "token_truncate"}),
    "epsilon": ("weights", 1e-4, FAR | {"epsilon": 0.2}),
    "epsilon_high": ("weights", 1e-4, FAR | {"epsilon_high": 0.2}),
    "scale_rewards": ("weights", "batch", {"scale_rewards": "group"} | PAID),
    "mask_truncated_completions": ("weights", True, {"max_completion_length": 2}),
    "reward_weights": (
        "weights",
        {"gt": 0.1, "unfinished": 1.0},
        {"max_completion_length": 2, "label_threshold": 0.5} | PAID,
    ),
    "reward_model": ("metrics", "stub", {}),
    "normalize_scores": ("metrics", True, {"reward_model": "stub"}),
    "score_clip": ("metrics", 0.5, {"reward_model": "stub"}),
    "dynamic_sampling": ("metrics", True, {"dynamic_sampling": False}),
    "max_resampling": ("metrics", 1, {"dynamic_sampling": True}),
    "thinking_ratio": ("metrics", 0.5, {}),
    "chat_template_kwargs": ("metrics", {"enable_thinking": False}, {}),
    "gamma": ("weights", 0.5, {}),
    "lam": ("weights", 0.0, {}),
    "critic_model": ("weights", TINY, {}),
    "critic_backbone": ("weights", "shared", {}),
    "critic_learning_rate": ("weights", 1e-4, {}),
    "critic_warmup_steps": ("weights", 1, {}),
    "vf_coef": ("metrics", 2.0, {}),
    "cliprange_value": ("weights", 1e-3, {}),
    "whiten_advantages": ("weights", False, {}),
    "num_ppo_epochs": ("weights", 3, {}),
    "early_stop_kl": ("metrics", 1e-9, {}),
    "debug_log_ratio": ("metrics", True, {}),
    "lora_r": ("weights", 4, {}),
    "lora_alpha": ("weights", 64, {"lora_r": 2}),
    "lora_dropout": ("weights", 0.5, {"lora_r": 2}),
    "lora_target_modules": ("weights", ["q_proj", "mlp.down_proj"], {"lora_r": 2}),
    "pairs": ("weights", "all", {}),
    "margin": ("weights", "reward", {}),
    "ties": ("weights", "half", {}),
    "center_rewards_coefficient": ("weights", 0.5, {}),
    "label_smoothing": ("weights", 0.2, {}),
    "reference_free": ("weights", True, {}),
    "length_normalized": ("weights", True, {}),
    "simpo_gamma": ("weights", 1.5, {}),
    "desirable_weight": ("weights", 2.0, {}),
    "undesirable_weight": ("weights", 2.0, {}),
    "label_threshold": ("weights", -1.0, {}),
    "teacher_model": ("weights", TAUGHT, {}),
    "distill_alpha": ("weights", 0.9, {}),
    "distill_temperature": ("weights", 2.0, {"opd_loss": "full"}),
    "divergence": ("weights", "jsd", {"opd_loss": "full"}),
    "jsd_beta": ("weights", 0.1, {"divergence": "jsd", "opd_loss": "full"}),
    "distill_top_k": ("weights", 2, {"opd_loss": "full"}),
    "teacher_cache": ("files", CACHE, {"distill_top_k": 2}),
    "opd_loss": ("weights", "full", {}),
    "reward_coef": ("weights", 5.0, {}),
    "control": ("weights", "shuffle_rewards", {}),
    "save_trajectories": ("files", False, {}),
    "report_to": ("mirrored", ["tensorboard"], {}),
    "eval_steps": ("metrics", 1, {}),
    "eval_tasks": ("metrics", 8, {"eval_steps": 1, "eval_tasks": 16}),
    "eval_env_args": ("metrics", {"levels": [2]}, {"eval_steps": 1, "eval_tasks": 16}),
    "debug_mode": ("files", True, {}),
    "debug_interval": ("debug", 1, {"debug_mode": True, "learning_rate": 1e-5}),
    "sync_ref_model": ("files", True, {"beta": 0.5}),
    "ref_model_sync_steps": ("weights", 1, FOLLOWING | {"ref_model_sync_steps": 2}),
    "ref_model_mixup_alpha": ("weights", 0.1, FOLLOWING | {"ref_model_sync_steps": 1}),
}
#: Added to the tiny model's template, which knows no thinking.
THINKING = "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
CLOCK = {"step_time", "time/rollout", "time/eval"}
FIRST = ("grpo", "ppo", "sft", "cispo", "dpo", "simpo", "kto", "distill", "opd", "reward")


def quick(algo, key):
    """Tell whether a pair is in the normal suite: one algorithm that reads the key, and all that pin it."""
    readers = [name for name in FIRST if key in PRESETS[name].reads and key not in PRESETS[name].pinned]
    return key in PRESETS[algo].pinned or algo in readers[:1] or (algo, key) == ("cispo", "epsilon_high")


PAIRS = [
    pytest.param(algo, key, marks=() if quick(algo, key) else pytest.mark.slow)
    for algo, preset in PRESETS.items()
    for key in sorted(preset.reads & CASES.keys())
]


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory):
    """Groups of 3 episodes that guess: half of them are right, not all are equally long. Beside it held-out ones."""
    path, rng = tmp_path_factory.mktemp("mixed") / "guesses.jsonl", Random(0)

    def guess(messages):
        a, b = map(int, re.findall(r"\d+", messages[-1]["content"]))
        return str(a + b) if rng.random() < 0.5 else rng.choice(("7", "12"))

    held = {"held_out.jsonl": {"levels": [2]}, "other.jsonl": {"levels": [2], "seed": 1}}
    for file, count, args in ((path, 20, {}), *((path.with_name(name), 6, args) for name, args in held.items())):
        with TrajectoryWriter(file) as writer:
            for trajectory in rollout(
                "gymtune/Arithmetic-v0", FunctionAgent(guess), count, num_generations=3, env_args=args
            ):
                writer.append(trajectory)
    long = list(read_trajectories(path))[-1]
    long.trajectory_id, long.turns[0].text, long.turns[0].reward = "long", "7 " * 600, -1.0  # the worst of its group
    path.with_name("long.jsonl").write_text(path.read_text() + long.to_json() + "\n")
    return path


@pytest.fixture(scope="module")
def outcome(taught_model, tiny_model, tiny_renderer, mixed_file, tmp_path_factory):
    """Run a config of two steps and return what can be seen of it; the same config is run once."""
    forwards, threads, layers, passes, mirrored, known = [], [], [], [], [], {}
    plain_passes = engine_module.ModelPasses

    def noted(model, cache, layers):
        passes.append(layers)
        return plain_passes(model, cache, layers)

    checkpointed = decoder_module.checkpoint
    plain = update_module.hidden_states

    def run(algo, **changes):
        where = tmp_path_factory.mktemp("options") / "run"
        named = {TINY: str(tiny_model), MIXED: str(mixed_file), TAUGHT: str(taught_model), CACHE: str(where / "cache")}
        named |= {LONG: str(mixed_file.with_name("long.jsonl")), HELD: str(mixed_file.with_name("other.jsonl"))}
        changes = {key: named.get(value, value) if isinstance(value, str) else value for key, value in changes.items()}
        source = {"data": str(mixed_file), "batch_size": 8}
        if "env" in PRESETS[algo].reads and "data" not in changes:
            source = {"env": "gymtune/Arithmetic-v0", "prompts_per_step": 4, "num_generations": 4}
            source |= {"max_completion_length": 4}
        if "trajectories" in changes:
            source = {"prompts_per_step": 4}
        if "teacher_model" in PRESETS[algo].reads:
            source["teacher_model"] = str(tiny_model)
        base = {"model": str(taught_model), "output_dir": str(where), "max_steps": 2, "learning_rate": 0.01}
        if "data" in source and changes.get("eval_steps"):
            source["eval_data"] = str(mixed_file.with_name("held_out.jsonl"))
        forwards.clear()
        layers.clear()
        passes.clear()
        threads.clear()
        mirrored.clear()
        try:
            folder = train(TrainConfig(algo=algo, **(base | source | changes)))
        except (ConfigError, DataError) as error:
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
            "mirrored": len(mirrored),
            "debug": (where / "debug.jsonl").read_text().count("\n") if (where / "debug.jsonl").exists() else 0,
        }

    def once(algo, **changes):
        key = json.dumps([algo, changes])
        if key not in known:
            known[key] = run(algo, **changes)
        return known[key]

    once.again = run
    thinker = Renderer(tiny_renderer.tokenizer, chat_template=tiny_renderer.chat_template + THINKING)

    def loaded(folder, template_options=None, **_):
        return thinker.with_options(template_options or {})

    writer = SimpleNamespace(add_scalar=lambda *point: mirrored.append(point), flush=int, close=int)
    tensorboard = SimpleNamespace(SummaryWriter=lambda **_: writer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
        patch.setattr(Renderer, "from_folder", loaded)  # as loaded, only sooner
        patch.setattr(torch, "set_num_threads", threads.append)
        patch.setattr(engine_module, "ModelPasses", noted)
        patch.setattr(decoder_module, "checkpoint", lambda *a, **k: layers.append(a) or checkpointed(*a, **k))
        patch.setattr(update_module, "hidden_states", lambda *args: forwards.append(args) or plain(*args))
        yield once


def test_the_table_is_complete():
    """These name what a run is; the tests below say what they change. tests/sglang has those of servers."""
    assert set().union(*(preset.reads for preset in PRESETS.values())) - CASES.keys() - SERVERS == {
        "algo",
        "backend",
        "model",
        "output_dir",
        "data",
        "trajectories",
    }


@pytest.mark.parametrize(("algo", "key"), PAIRS)
def test_an_option_changes_something(outcome, algo, key):
    seen, value, besides = CASES[key]
    preset = PRESETS[algo]
    if key in preset.pinned:
        other = value if value != preset.values[key] else besides[key]
        assert "pins it to" in outcome_error(algo, {key: other})
        return
    if key == "device" and torch.cuda.is_available():
        seen = "weights"
    besides = {name: other for name, other in besides.items() if name in preset.reads - preset.pinned.keys()}
    first, second = outcome(algo, **besides), outcome(algo, **(besides | {key: value}))
    assert first["error"] is None
    assert first[seen] != second.get(seen)
    if seen != "error":
        assert second["error"] is None


def outcome_error(algo, changes):
    source = {"env": "E-v0"} if "env" in PRESETS[algo].reads else {"data": "d"}
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


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_stored_episodes_are_what_is_learnt_from(outcome, algo, taught_model, tmp_path):
    """All algorithms learn from them in `test_build.py`; another file, other weights."""
    agent = load_agent(taught_model, Sampling(max_new_tokens=4))
    for seed in (0, 1):
        with TrajectoryWriter(tmp_path / f"{seed}.jsonl") as writer:
            for trajectory in rollout("gymtune/Arithmetic-v0", agent, 8, num_generations=4, seed=seed):
                writer.append(trajectory)
    first, second = (outcome(algo, trajectories=str(tmp_path / f"{seed}.jsonl")) for seed in (0, 1))
    assert first["error"] is None
    assert len({one["weights"] for one in (first, second, outcome(algo))}) == 3


def test_the_commands_in_the_docs_are_accepted():
    page = Path(__file__).parents[2] / "docs" / "algorithms.md"
    commands = re.findall(r"`(?:gymtune train )?--algo (\w+)((?: --set [\w=.]+)*)`", page.read_text(encoding="utf-8"))
    assert len(commands) >= 4
    for algo, sets in commands:
        source = {"env": "E-v0"} if "env" in PRESETS[algo].reads else {"data": "d"}
        source |= {"teacher_model": "t"} if "teacher_model" in PRESETS[algo].reads else {}
        options = {"model": "m", "output_dir": "o"} | source
        if (algo, sets) == ("cispo", " --set averaging=constant"):  # the page says that it is refused
            with pytest.raises(ConfigError, match="pins it"):
                resolve(algo, sets=sets.split()[1::2], options=options)
        else:
            assert resolve(algo, sets=sets.split()[1::2], options=options).config.algo == algo
