"""From a config to a run: learning from stored episodes, a dry run, and what is refused before anything is written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gymtune.agents import TrajectoryWriter, read_trajectories
from gymtune.agents.models import load_model
from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.errors import ConfigError, DataError
from gymtune.trainers import Listeners, TrainConfig, dry_run, resolve, train
from gymtune.trainers.dataset import GroupDataset
from gymtune.trainers.offline import check_stored, logprob_gap
from gymtune.trainers.presets import PRESETS

CLOCK = {"step_time", "time/rollout", "time/eval"}
ROUNDING = 1e-6  # float32, sums in another order
ONLINE = sorted(algo for algo, preset in PRESETS.items() if "trajectories" in preset.reads)
SAMPLED = {"env": "gymtune/Arithmetic-v0", "prompts_per_step": 4, "num_generations": 4, "max_completion_length": 4}


@pytest.fixture
def config(taught_model, tmp_path):
    """Make a config of a run in a folder of its own."""

    def make(algo, name="run", **changes):
        base = {"model": str(taught_model), "output_dir": str(tmp_path / name), "max_steps": 2, "learning_rate": 0.003}
        return TrainConfig(algo=algo, **(base | changes))

    return make


@pytest.fixture
def silent(monkeypatch):
    """An engine that must not sample."""

    def sample(self, request):
        raise AssertionError("an engine was asked to sample")

    monkeypatch.setattr(TorchEngine, "generate", sample)


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(run.output_dir) / name).read_text().splitlines()]


def without_clock(metrics):
    return {key: value for key, value in metrics.items() if key not in CLOCK}


# -- stored episodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ONLINE)
def test_stored_episodes_teach_and_nothing_is_sampled(algo, config, sampled_file, silent):
    run = config(algo, trajectories=str(sampled_file), prompts_per_step=12)
    final = train(run)
    before, after = load_file(Path(run.model) / "model.safetensors"), load_file(final / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert final.name == ("ppo_actor" if algo == "ppo" else algo)
    metrics = lines(run)
    assert metrics[0]["sampling/sampling_logp_difference/max"] < 1e-4  # they are this model's own
    mean = sum(line["reward"] for line in metrics) / 2  # two steps see every group once
    assert mean == pytest.approx(sum(t.reward for t in read_trajectories(sampled_file)) / 96)
    assert not (Path(run.output_dir) / "trajectories").exists()


@pytest.mark.parametrize("algo", ["grpo", "cispo", "ppo"])
def test_a_stored_step_is_the_step_that_was_sampled(algo, config):
    """Sampled and learnt from, or stored and read back: the same update."""
    online = config(algo, "online", max_steps=1, **SAMPLED)
    first = load_file(train(online) / "model.safetensors")
    stored = str(Path(online.output_dir) / "trajectories" / "step_000001.jsonl")
    offline = config(algo, "offline", max_steps=1, trajectories=stored, prompts_per_step=4)
    second = load_file(train(offline) / "model.safetensors")
    before = load_file(Path(online.model) / "model.safetensors")
    for name, weights in first.items():
        torch.testing.assert_close(second[name], weights, atol=ROUNDING, rtol=ROUNDING)
    assert max(float((first[name] - before[name]).abs().max()) for name in first) > 100 * ROUNDING


def test_each_episode_counts_at_its_own_temperature(config, sampled_file, tmp_path):
    path = tmp_path / "cooler.jsonl"
    with TrajectoryWriter(path) as writer:
        for trajectory in read_trajectories(sampled_file):
            trajectory.sampling = trajectory.sampling.model_copy(update={"temperature": 0.7})
            writer.append(trajectory)
    run = config("grpo", trajectories=str(path), prompts_per_step=12)
    train(run)
    assert lines(run)[0]["sampling/sampling_logp_difference/mean"] > 0.01  # said to be at 0.7, sampled at 1


def test_a_killed_run_goes_on_as_it_would_have(config, sampled_file):
    changes = {"trajectories": str(sampled_file), "prompts_per_step": 5, "max_steps": 4, "save_steps": 2}
    whole, cut = config("grpo", "whole", **changes), config("grpo", "cut", **changes)

    def stop(metrics):
        if metrics["step"] == 3:
            raise KeyboardInterrupt

    finished = train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(cut, listeners=Listeners(on_step=stop))
    resumed = train(cut, resume=True)
    assert (resumed / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    for one, other in zip(lines(whole), lines(cut), strict=True):
        assert without_clock(one) == without_clock(other)


def test_an_env_beside_stored_episodes_is_for_evaluations(config, sampled_file):
    held_out = {"env": "gymtune/Arithmetic-v0", "eval_steps": 1, "eval_tasks": 4, "max_completion_length": 4}
    run = config("grpo", trajectories=str(sampled_file), prompts_per_step=12, **held_out)
    train(run)
    assert [line["step"] for line in lines(run) if "eval/success" in line] == [0, 1, 2]


def stored(sampled_file, renderer, path, shift=0.0):
    """Return the groups of a file whose log-probs are all `shift` away from what they were."""
    with TrajectoryWriter(path) as writer:
        for trajectory in read_trajectories(sampled_file):
            trajectory.logprobs = [p if p is None else p + shift for p in trajectory.logprobs]
            writer.append(trajectory)
    return GroupDataset(path, renderer, min_group_size=2, max_length=512, seed=0)


def test_the_gap_to_the_model_is_told_or_refused(config, sampled_file, taught_model, tiny_renderer, tmp_path):
    model, settings = load_model(taught_model), config("grpo", trajectories=str(sampled_file))
    own, off, strange = (
        stored(sampled_file, tiny_renderer, tmp_path / f"{shift}.jsonl", shift) for shift in (0.0, -1.0, -4.0)
    )
    assert check_stored(model, own, settings) == []
    assert logprob_gap(model, off.batch(0, 3), 50) == pytest.approx(1.0, abs=1e-4)
    (note,) = check_stored(model, off, settings)
    assert "the log-probs of 16 episodes are 1.00 nats a token away from those of model" in note
    with pytest.raises(DataError, match=r"4\.00 nats .*another model sampled them"):
        check_stored(model, strange, settings)


def test_episodes_of_another_model_are_refused_before_anything_is_written(config, sampled_file, tiny_model):
    run = config("grpo", trajectories=str(sampled_file), model=str(tiny_model))
    with pytest.raises(DataError, match="another model sampled them"):
        train(run)
    assert not Path(run.output_dir).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": "E-v0"}, "nothing is sampled in it but for evaluations, and eval_steps is 0"),
        ({"eval_steps": 3}, "an evaluation samples in an environment, env is not set"),
        ({"temperature": 0.5}, "each counts at the temperature it was sampled at"),
        ({"num_generations": 4}, "their groups are as they were sampled"),
        ({"reward_model": "stub"}, "with what it earned"),
        ({"max_completion_length": 9}, "they are as long as they are"),
        ({"save_trajectories": False}, "trajectories are stored"),
        ({"eval_tasks": 9}, "eval_steps is 0, so nothing is evaluated"),
    ],
)
def test_what_stored_episodes_leave_nothing_to_say(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(algo="grpo", model="m", output_dir="o", trajectories="f.jsonl", **changes)


def test_what_stored_episodes_do_read():
    for changes in ({"min_group_size": 9}, {"max_model_length": 40}, {"mini_batches": 7}, {"beta": 0.1}):
        TrainConfig(algo="grpo", model="m", output_dir="o", trajectories="f.jsonl", **changes)
    TrainConfig(algo="dr_grpo", model="m", output_dir="o", trajectories="f.jsonl", max_completion_length=9)
    whole = {"model": "m", "output_dir": "o", "trajectories": "f.jsonl"}
    keys = {key for key, _, _ in resolve("grpo", options=whole).table()}
    assert "trajectories" in keys
    assert not keys & {"temperature", "env_args", "num_generations", "layers", "reward_weights"}


def test_sft_reads_data():
    with pytest.raises(ConfigError, match="--algo sft does not read it"):
        TrainConfig(algo="sft", model="m", output_dir="o", data="d", trajectories="f.jsonl")


# -- a dry run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["sampled", "stored", "sft", "ppo"])
def test_a_dry_run_tells_the_first_step_and_changes_nothing(source, config, sampled_file, sums_file, tmp_path):
    algo, changes = {
        "sampled": ("grpo", SAMPLED),
        "stored": ("grpo", {"trajectories": str(sampled_file), "prompts_per_step": 6}),
        "sft": ("sft", {"data": str(sums_file), "batch_size": 8}),
        "ppo": ("ppo", SAMPLED | {"num_ppo_epochs": 1}),
    }[source]
    run = config(algo, max_steps=1, **changes)
    weights = (Path(run.model) / "model.safetensors").read_bytes()
    told = dry_run(run)
    assert dry_run(run) == told
    assert list(tmp_path.iterdir()) == []
    assert (Path(run.model) / "model.safetensors").read_bytes() == weights
    train(run)
    (first,) = lines(run)
    same = without_clock(first).keys() - {"step", "learning_rate"}
    assert told.keys() >= same
    assert {key: told[key] for key in same} == pytest.approx({key: first[key] for key in same}, rel=1e-5, abs=1e-7)
    assert {"loss", "grad_norm"} <= told.keys()


# -- what is told and refused ------------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_refused_at_once_and_nothing_is_written(config, tmp_path):
    run = config("grpo", **(SAMPLED | {"env_args": {"levls": [1]}, "device": "cuda:99", "model": "nowhere"}))
    for attempt in (train, dry_run):
        with pytest.raises(ConfigError, match=r"^3 things are wrong; .*\(1\) model: .*\(2\) device: .*\(3\) env: "):
            attempt(run)
    assert list(tmp_path.iterdir()) == []


def test_notes_are_told_before_the_first_step(config, sampled_file):
    told = []
    run = config("grpo", trajectories=str(sampled_file), prompts_per_step=12)
    train(run, listeners=Listeners(on_note=told.append, on_step=lambda _: told.append("step")))
    assert told[0].startswith("trajectories: ")
    assert told[0].endswith("groups have equal rewards: they teach nothing")
    assert told[-2:] == ["step", "step"]
    assert "step" not in told[:-2]
