"""A server that is killed, started anew and frozen while a rollout runs: every episode comes back once, and whole."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from sglang_fixtures import RealServer, a_free_port, start_server

from gymtune.agents import Trajectory, read_trajectories
from gymtune.agents.models import load_model
from gymtune.agents.sglang.parity import score_with

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

GYMTUNE = str(Path(sys.executable).with_name("gymtune"))
EPISODES, KILLS, FROZEN_SECONDS = 200, 6, 20
ROLLOUT_SECONDS = 1800
TOLERANCE = 1e-4  # of a log-prob in float32


def test_six_kills_cost_no_episode(sglang_python: Path, sglang_model: Path, tmp_path: Path) -> None:
    port, out, random = a_free_port(), tmp_path / "episodes.jsonl", Random(0)
    server = serve(sglang_python, sglang_model, tmp_path, port)
    command = ["rollout", "--env", "gymtune/Calculator-v0", "--model", str(sglang_model), "-n", str(EPISODES)]
    command += ["--sglang-url", server.url, "--max-completion-length", "200", "--concurrency", "16", "--out", str(out)]
    rollout = subprocess.Popen([GYMTUNE, *command], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    under_way = 0
    try:
        for kill in range(1, KILLS + 1):
            wait_for_episodes(out, kill * EPISODES // (KILLS + 2), rollout)
            if kill == KILLS // 2:
                freeze(server)
            time.sleep(random.uniform(0, 1))
            assert rollout.poll() is None, "it was over before the last kill: let it sample more"
            under_way += count(out) < EPISODES
            server.end()
            server = serve(sglang_python, sglang_model, tmp_path, port)
        said, _ = rollout.communicate(timeout=ROLLOUT_SECONDS)
    finally:
        rollout.kill()
        rollout.wait()
        server.end()
    assert rollout.returncode == 0, said
    assert under_way == KILLS

    found = list(read_trajectories(out))
    assert len(found) == EPISODES
    assert len({t.trajectory_id for t in found}) == EPISODES
    assert sorted(t.task_index for t in found) == list(range(EPISODES))
    assert [t.error for t in found if t.error is not None] == []
    score = score_with(load_model(sglang_model))
    assert max(gap(score, t) for t in found) < TOLERANCE


def serve(python: Path, model: Path, folder: Path, port: int) -> RealServer:
    return start_server(python, model, folder / "server.log", "--skip-tokenizer-init", port=port)


def freeze(server: RealServer) -> None:
    """Stop all processes of a server for a while: connections stay open, and nothing comes."""
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGSTOP)
    time.sleep(FROZEN_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGCONT)


def count(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def wait_for_episodes(out: Path, episodes: int, rollout: subprocess.Popen) -> None:
    until = time.monotonic() + ROLLOUT_SECONDS
    while count(out) < episodes:
        assert rollout.poll() is None, rollout.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)


def gap(score: Callable[[list[int]], list[float]], trajectory: Trajectory) -> float:
    """Return how far the log-probs of what was sampled are, at most, from those of the model for the whole episode.

    A hole, a token twice, or a turn that was put together of two answers would shift all that follows.
    """
    assert trajectory.turns
    assert len(trajectory.segment_starts) == 1
    assert sum(turn.end - turn.start for turn in trajectory.turns) == sum(trajectory.response_mask) > 0
    pairs = zip(trajectory.logprobs[1:], score(trajectory.tokens), strict=True)
    return max(abs(told - scored) for told, scored in pairs if told is not None)
