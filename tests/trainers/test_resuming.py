"""The same seed is the same run, and a run that was killed and resumed is the uninterrupted one, bit for bit."""

import json
from pathlib import Path

import pytest

from gymtune.trainers import Listeners, train

CLOCK = {"step_time", "time/rollout", "time/eval"}


def lines_of(run):
    lines = (json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


def files_of(run, step):
    folder = Path(run) / "checkpoints" / f"step_{step:06d}"
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def left_of(run):
    """Return what stands beside weights and metrics, but for the run's own id."""
    names = ("best/best.json", "best/model.safetensors", "debug.jsonl", "handoff.json")
    own = (Path(run) / "run_id").read_bytes()
    files = {name: Path(run) / name for name in names}
    return {name: file.read_bytes().replace(own, b"") for name, file in files.items() if file.exists()}


@pytest.mark.parametrize("algo", ["sft", "grpo", "cispo"])
def test_the_same_seed_twice_is_the_same_run(settings, algo):
    first, again = settings(algo, "first", max_steps=3), settings(algo, "again", max_steps=3)
    other = settings(algo, "other", max_steps=3, seed=1)
    finished = [train(run) for run in (first, again, other)]
    models = [(folder / "model.safetensors").read_bytes() for folder in finished]
    assert models[0] == models[1] != models[2]
    assert lines_of(first.output_dir) == lines_of(again.output_dir) != lines_of(other.output_dir)


class KilledError(Exception):
    """Stands for the end of the process."""


FOLLOWING = {"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.5}
LOOKING = {"eval_steps": 2, "eval_tasks": 8, "debug_mode": True, "debug_interval": 2}


@pytest.mark.parametrize(
    ("algo", "at", "more"),
    [
        ("sft", 3, {}),
        ("grpo", 1, LOOKING),
        ("grpo", 3, LOOKING),
        ("grpo", 5, FOLLOWING),
        ("cispo", 5, {}),
        ("ppo", 3, {}),
    ],
)
def test_resume_equals_the_uninterrupted_run_bit_for_bit(settings, algo, at, more):
    whole, cut = settings(algo, "whole", **more), settings(algo, "cut", **more)

    def kill(line):
        if line["step"] == at:
            raise KilledError

    train(whole)
    with pytest.raises(KilledError):
        train(cut, listeners=Listeners(on_step=kill))
    steps = []
    train(cut, resume=True, listeners=Listeners(on_step=lambda line: steps.append(line["step"])))
    assert steps[0] == at // 2 * 2 + 1  # from the latest checkpoint, not from the start
    assert files_of(cut.output_dir, 6) == files_of(whole.output_dir, 6)
    assert lines_of(cut.output_dir) == lines_of(whole.output_dir)
    assert left_of(cut.output_dir) == left_of(whole.output_dir)
    stored = [sorted(p.name for p in (Path(c.output_dir) / "trajectories").glob("*")) for c in (whole, cut)]
    assert stored[0] == stored[1]


def test_resume_of_a_finished_run_trains_nothing(settings):
    done = settings("sft", max_steps=2)
    model = (train(done) / "model.safetensors").read_bytes()
    steps = []
    folder = train(done, resume=True, listeners=Listeners(on_step=steps.append))
    assert steps == []
    assert (folder / "model.safetensors").read_bytes() == model
