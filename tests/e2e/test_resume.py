"""A training process killed in the middle (`kill -9`) and resumed ends where an uninterrupted one ends, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymtune.trainers import TrainConfig, train

STEPS, EVERY, KILLED_AFTER = 12, 4, 6
RUN = """
import json, sys, time
from gymtune.trainers import Listeners, TrainConfig, train

def stay(line):  # however late the kill comes, the run has not ended
    if line["step"] > 7:
        time.sleep(600)

train(TrainConfig(**json.loads(sys.argv[1])), listeners=Listeners(on_step=stay))
"""
CLOCK = {"step_time", "time/rollout"}
PATIENCE = 120  # seconds until a run that writes no metrics is taken for broken


def options(algo, model, data, run):
    source = {"data": str(data), "batch_size": 32} if algo == "sft" else {}
    if algo != "sft":
        source = {"env": "gymtune/Arithmetic-v0", "prompts_per_step": 16, "max_completion_length": 4}
    where = {"algo": algo, "model": str(model), "output_dir": str(run)}
    return where | source | {"max_steps": STEPS, "save_steps": EVERY, "learning_rate": 3e-3}


def lines_of(run):
    file = Path(run) / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def kill_after(process, run, lines):
    """Wait until the run has written so many lines of metrics, then kill it where it stands."""
    deadline = time.monotonic() + PATIENCE
    while len(lines_of(run)) < lines:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("algo", ["sft", "grpo", "cispo", "ppo"])
def test_killed_and_resumed_equals_uninterrupted(algo, taught_model, sums_file, tmp_path):
    whole, cut = (options(algo, taught_model, sums_file, tmp_path / name) for name in ("whole", "cut"))
    process = subprocess.Popen([sys.executable, "-c", RUN, json.dumps(cut)])
    try:
        kill_after(process, cut["output_dir"], KILLED_AFTER)
    finally:
        process.kill()
        process.wait()
    seen = len(lines_of(cut["output_dir"]))
    assert KILLED_AFTER <= seen < STEPS
    train(TrainConfig(**cut), resume=True)
    train(TrainConfig(**whole))

    folders = [Path(run["output_dir"]) for run in (whole, cut)]
    for name in ("model.safetensors", "optimizer.safetensors", "trainer_state.json"):
        left, right = ((folder / "checkpoints" / f"step_{STEPS:06d}" / name).read_bytes() for folder in folders)
        assert left == right, name
    lines = [[json.loads(line) for line in lines_of(folder)] for folder in folders]
    left, right = ([{k: v for k, v in line.items() if k not in CLOCK} for line in run] for run in lines)
    assert [line["step"] for line in right] == list(range(1, STEPS + 1))
    assert left == right
    kept = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in folders]
    assert kept[0] == kept[1] == [f"step_{STEPS - EVERY:06d}", f"step_{STEPS:06d}"]
