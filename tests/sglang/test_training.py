"""Training over a real server: the weights of every step arrive, by each way; sampling ahead says how old its episodes
are; every key of servers changes what it is for.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymtune.agents.store import read_trajectories
from gymtune.tools.errors import RunError
from gymtune.trainers import TrainConfig, dry_run, train

pytestmark = pytest.mark.sglang

GAP = 1e-4  # of log-probs, float32
STEPS = 3


@pytest.fixture
def run(server: Any, tmp_path: Path) -> Callable[..., Path]:
    """Train a few steps over the server and return the run's folder."""

    def make(name: str, **changes: Any) -> Path:
        small = {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8, "save_steps": 0}
        where = {"model": str(server.model), "output_dir": str(tmp_path / name), "env": "gymtune/Arithmetic-v0"}
        served = {"backend": "sglang", "sglang_url": [server.url], "max_steps": STEPS, "learning_rate": 1e-2}
        paid = {"reward_model": "stub"}  # a model that knows nothing earns nothing else
        train(TrainConfig(algo="rloo", **(where | small | served | paid | {"beta": 0.0} | changes)))
        return tmp_path / name

    return make


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def versions(run: Path, step: int) -> set[int]:
    file = run / "trajectories" / f"step_{step:06d}.jsonl"
    return {turn.policy_version for trajectory in read_trajectories(file) for turn in trajectory.turns}


@pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
def test_each_step_is_sampled_by_its_own_weights(run, way):
    folder = run(way, weight_sync=way, importance_sampling_correction="token_truncate")
    lines = metrics(folder)
    assert [versions(folder, step) for step in range(1, STEPS + 1)] == [{0}, {1}, {2}]
    for line in lines:
        assert line["sync/logprob_gap"] < GAP
        assert line["sampling/sampling_logp_difference/max"] < GAP  # the trainer finds what the server said as likely
        assert "staleness/mean" not in line
    assert (folder / "weights").exists() == (way == "disk")


def test_a_folder_of_ones_own_for_the_weights(run, tmp_path):
    run("here", weight_sync_dir=str(tmp_path / "shared"))
    assert any((tmp_path / "shared").rglob("*.safetensors"))
    assert not (tmp_path / "here" / "weights").exists()


def test_beyond_the_tolerance_the_run_stops(run):
    with pytest.raises(RunError, match="sync_tolerance"):
        run("strict", sync_tolerance=1e-12)


def test_sampling_ahead_is_as_old_as_it_says(run):
    ahead = {"max_staleness": 1, "importance_sampling_correction": "token_truncate", "max_steps": 4}
    lines = metrics(run("ahead", **ahead))
    assert lines[0]["staleness/max"] == 0
    assert all(0 <= line["staleness/mean"] <= line["staleness/max"] <= 1 for line in lines)
    assert any(line["staleness/max"] == 1 for line in lines)
    assert all(line["staleness/dropped"] == 0 for line in lines)


def test_a_dry_run_samples_one_batch_and_none_ahead(server, tmp_path):
    sampled = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "reward_model": "stub"}
    where = {"model": str(server.model), "output_dir": str(tmp_path / "dry"), "env": "gymtune/Arithmetic-v0"}
    ahead = {"max_staleness": 2, "importance_sampling_correction": "token_truncate"}
    served = {"backend": "sglang", "sglang_url": [server.url]}
    told = dry_run(TrainConfig(algo="grpo", **(where | sampled | served | ahead)))
    assert "staleness/mean" not in told
    assert not any(thread.name.startswith("gymtune-sampling") for thread in threading.enumerate())
    assert not (tmp_path / "dry").exists()


def test_episodes_that_are_too_old_are_dropped(run):
    ahead = {"max_staleness": 1, "drop_staleness": 0, "importance_sampling_correction": "token_truncate"}
    lines = metrics(run("dropped", **ahead))
    assert sum(line["staleness/dropped"] for line in lines) > 0
