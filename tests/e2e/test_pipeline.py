"""The example pipeline, every stage once: `benchmarks/pipeline.py --quick` as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gymtune import cli

ROOT = Path(cli.__file__).resolve().parent
STAGES = ("sft", "dpo", "ppo", "grpo")


@pytest.mark.slow
def test_the_pipeline_runs_and_tells(tmp_path: Path):
    out = tmp_path / "pipeline"
    words = [sys.executable, str(ROOT / "benchmarks" / "pipeline.py"), "--quick", "--out", str(out)]
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    for stage in STAGES:
        assert f"after {stage}" in done.stdout
    assert "of held-out pairs in the right order" in done.stdout
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert set(table) == {*STAGES, "reward", "minutes", "total"}
    assert all(0 <= table[stage][mode] <= 1 for stage in STAGES for mode in ("sampled", "greedy"))
    assert 0 <= table["reward"] <= 1
    assert set(table["minutes"]) == {*STAGES, "reward"}
    said = json.loads((out / "reward" / "handoff.json").read_text(encoding="utf-8"))
    assert said["prefix"] == "reward"
    paid = json.loads((out / "ppo" / "config.json").read_text(encoding="utf-8"))["config"]
    assert (paid["reward_weights"], paid["reward_model"]) == ({"gt": 0.0}, str(out / "reward" / "reward"))
