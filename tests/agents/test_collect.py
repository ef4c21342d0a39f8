"""Collecting into a file: what is finished is never lost, never repeated, and never mixed with another run."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from gymtune import __version__
from gymtune.agents import FunctionAgent, ScriptedAgent, plan_episodes, read_trajectories
from gymtune.agents.collect import CollectConfig, Collection, collect, config_path
from gymtune.tools.errors import ConfigError, RunError

ENV = "gymtune/Arithmetic-v0"
SLOW_ENV = '''
import time
import gymnasium
from gymtune.envs.arithmetic import ArithmeticEnv

class SlowEnv(ArithmeticEnv):
    """Sleeps in each step."""
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)

gymnasium.register("Slow-v0", entry_point="slow_env:SlowEnv")
'''


def config(**changes) -> CollectConfig:
    return CollectConfig(**{"env": ENV, "agent": "scripted", "n": 6, "num_generations": 2} | changes)


def ids(path: Path) -> list[str]:
    return [trajectory.trajectory_id for trajectory in read_trajectories(path)]


def planned(path: Path) -> list[str]:
    """The ids that the config beside a file asks for."""
    record = json.loads(config_path(path).read_text())
    asked = record["config"]
    specs = plan_episodes(range(asked["n"]), asked["num_generations"], run_id=record["run_id"], seed=asked["seed"])
    return [spec.trajectory_id for spec in specs]


def stop_after(count: int) -> Callable[[object], None]:
    """Return a listener that interrupts the rollout at the `count`th episode."""
    seen = []

    def on_finish(trajectory: object) -> None:
        seen.append(trajectory)
        if len(seen) == count:
            raise KeyboardInterrupt

    return on_finish


def interrupted(path: Path, count: int, acting=None, **changes) -> None:
    with pytest.raises((KeyboardInterrupt, RunError)):
        collect(path, acting or ScriptedAgent(), config(**changes), concurrency=1, on_finish=stop_after(count))


def test_a_whole_collection_holds_each_episode_once_and_its_config_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gold.jsonl"
    result = collect(path, ScriptedAgent(), config())
    assert sorted(ids(path)) == sorted(planned(path))
    assert (result.episodes, result.successes, result.failed, result.mean_reward) == (12, 12, 0, 1.0)
    record = json.loads((tmp_path / "new" / "gold.config.json").read_text())
    assert record["gymtune"] == __version__
    assert record["config"] == {
        "env": ENV, "env_args": {}, "agent": "scripted", "model": None, "n": 6, "num_generations": 2, "seed": 0,
        "sampling": None, "reward_weights": {}, "reward_model": None, "chat_template_kwargs": {},
    }  # fmt: skip


def test_two_collections_never_share_an_id(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        collect(tmp_path / name, ScriptedAgent(), config())
    assert not set(ids(tmp_path / "a.jsonl")) & set(ids(tmp_path / "b.jsonl"))


def test_resume_runs_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    interrupted(path, 5)
    before = path.read_bytes()
    assert len(ids(path)) == 5
    ran = []
    result = collect(path, ScriptedAgent(), config(), resume=True, on_finish=ran.append)
    assert len(ran) == 7
    assert path.read_bytes().startswith(before)
    assert sorted(ids(path)) == sorted(planned(path))
    assert (result.episodes, result.successes, result.mean_reward) == (12, 12, 1.0)


def test_resume_of_a_finished_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    collect(path, ScriptedAgent(), config())
    before = path.read_bytes()
    result = collect(path, ScriptedAgent(), config(), resume=True, on_finish=pytest.fail)
    assert path.read_bytes() == before
    assert result.episodes == 12


def test_resume_of_what_was_never_begun_begins(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert collect(path, ScriptedAgent(), config(), resume=True).episodes == 12


def test_a_file_cut_at_any_byte_is_resumed_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    collect(path, ScriptedAgent(), config(n=3, num_generations=1))
    whole, wanted = path.read_bytes(), sorted(planned(path))
    last_two = whole.rstrip(b"\n").rfind(b"\n", 0, whole.rstrip(b"\n").rfind(b"\n"))
    for cut in [0, *range(last_two, len(whole), 29), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        collect(path, ScriptedAgent(), config(n=3, num_generations=1), resume=True)
        assert sorted(ids(path)) == wanted, cut
        kept = whole[: whole[:cut].rfind(b"\n") + 1]
        assert path.read_bytes().startswith(kept), cut


def test_resumed_sampling_gives_the_tokens_of_the_uninterrupted_run(tmp_path: Path, tiny_model: Path) -> None:
    from gymtune.agents.loading import load_agent, make_sampling

    agent = load_agent(tiny_model, make_sampling(max_new_tokens=8))
    asked = {"agent": "model", "model": str(tiny_model), "sampling": agent.sampling}
    collect(tmp_path / "whole.jsonl", agent, config(**asked), concurrency=1)
    interrupted(tmp_path / "cut.jsonl", 5, agent, **asked)
    collect(tmp_path / "cut.jsonl", agent, config(**asked), resume=True, concurrency=1)

    def tokens(name: str) -> dict[tuple[int, int], list[int]]:
        return {(t.task_index, t.sample): t.tokens for t in read_trajectories(tmp_path / name)}

    assert tokens("whole.jsonl") == tokens("cut.jsonl")
    assert len({tuple(ids) for ids in tokens("whole.jsonl").values()}) == 12  # no two samples of a group are alike
    collect(tmp_path / "other.jsonl", agent, config(**asked, seed=1), concurrency=1)
    assert tokens("other.jsonl") != tokens("whole.jsonl")


# -- refusals --------------------------------------------------------------------------------------------------------


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    collect(path, ScriptedAgent(), config())
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"r\.jsonl is there already: go on with --resume, or give another --out"):
        collect(path, ScriptedAgent(), config())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 7, "seed": 3}, "has n = 6, now 7 was asked for"),
        ({"env_args": {"split": "test"}}, r'has env_args = \{\}, now \{"split": "test"\} was asked for'),
        ({"model": "m"}, 'has model = null, now "m" was asked for'),
    ],
)
def test_resume_with_another_config_names_the_first_differing_key(tmp_path: Path, changes, message) -> None:
    path = tmp_path / "r.jsonl"
    collect(path, ScriptedAgent(), config())
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=message):
        collect(path, ScriptedAgent(), config(**changes), resume=True)
    assert path.read_bytes() == before


def test_a_file_without_its_config_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    collect(path, ScriptedAgent(), config())
    config_path(path).unlink()
    with pytest.raises(ConfigError, match=r"no r\.config\.json beside it"):
        collect(path, ScriptedAgent(), config(), resume=True)
    config_path(path).write_text("{}")
    with pytest.raises(ConfigError, match=r"not the config of a collection: run_id: Field required"):
        collect(path, ScriptedAgent(), config(), resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": "gymtune/Arithmetik-v0"}, "Did you mean 'gymtune/Arithmetic-v0'"),
        ({"env_args": {"splt": "test"}}, "Did you mean 'split'"),
        ({"env_args": {"size": 5}}, "6 tasks are wanted, the env has 5"),
    ],
)
def test_a_wrong_env_leaves_no_file_behind(tmp_path: Path, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        collect(tmp_path / "r.jsonl", ScriptedAgent(), config(**changes))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/r\.config\.json: cannot write"):
        collect(tmp_path / "file" / "r.jsonl", ScriptedAgent(), config())


def test_some_failed_episodes_are_counted_and_kept(tmp_path: Path) -> None:
    def answer(messages: object) -> str:
        if "What is 0" in str(messages) or "+ 0" in str(messages):
            raise RuntimeError("no zeros")
        return "1"

    path = tmp_path / "r.jsonl"
    result = collect(path, FunctionAgent(answer), config(agent="function", n=60, num_generations=1))
    assert result.failed == sum("no zeros" in (t.error or "") for t in read_trajectories(path))
    assert 0 < result.failed < 60
    assert result.cause == "RuntimeError: no zeros"


def test_when_every_episode_fails_the_cause_is_told(tmp_path: Path) -> None:
    def answer(_: object) -> str:
        raise RuntimeError("the server is down")

    with pytest.raises(RunError, match="all 12 episodes failed, the first one with: RuntimeError: the server is down"):
        collect(tmp_path / "r.jsonl", FunctionAgent(answer), config(agent="function"))
    assert len(ids(tmp_path / "r.jsonl")) == 12


def test_opening_reads_and_writes_nothing_new(tmp_path: Path) -> None:
    collection = Collection.open(tmp_path / "r.jsonl", config())
    assert len(collection.missing) == 12
    assert not list(tmp_path.iterdir())


# -- kill -9 -----------------------------------------------------------------------------------------------------------


def start(folder: Path, n: int) -> subprocess.Popen[bytes]:
    """Start the real command on an env that takes its time."""
    (folder / "slow_env.py").write_text(SLOW_ENV)
    command = [str(Path(sys.executable).with_name("gymtune")), "rollout", "--env", "slow_env:Slow-v0", "--resume"]
    command += ["--agent", "scripted", "-n", str(n), "--out", "out.jsonl"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def test_kill_9_at_random_moments_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    n, rng, path = 120, random.Random(7), tmp_path / "out.jsonl"
    kept, kills_in_the_middle = b"", 0
    for _ in range(4):
        process = start(tmp_path, n)
        deadline = monotonic() + 60
        while (path.stat().st_size if path.exists() else 0) <= len(kept) and process.poll() is None:
            assert monotonic() < deadline
            sleep(0.005)
        sleep(rng.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        now = path.read_bytes()
        whole = now[: now.rfind(b"\n") + 1]
        assert now.startswith(kept)
        kills_in_the_middle += len(kept) < len(whole) and whole.count(b"\n") < n
        kept = whole
    assert kills_in_the_middle >= 3
    with path.open("ab") as file:
        file.write(kept[:100])  # a torn line, should no kill have left one
    process = start(tmp_path, n)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert path.read_bytes().startswith(kept)
    assert len(ids(path)) == n
    assert sorted(ids(path)) == sorted(planned(path))
