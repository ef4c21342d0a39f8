"""The arithmetic env as a curriculum: levels one by one, then the real set."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from gymtune.envs import make_env
from gymtune.tools import ConfigError

ENV = "gymtune/Arithmetic-v0"


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "real.jsonl"
    records = [{"question": f"Twice {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(5)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def drawn(env, progress: float, count: int = 200) -> Counter[object]:
    rng = Random(0)
    tasks = [env.tasks[env.draw_task(rng, progress)] for _ in range(count)]
    return Counter(task.metadata.get("level", "real") for task in tasks)


def test_a_run_goes_through_the_levels_and_then_to_the_real_set(data: str) -> None:
    env = make_env(ENV, data=data, levels=[1, 2], warmup=0.2, size=100)
    assert len(env.tasks) == 100 + 100 + 5
    assert [set(drawn(env, p)) for p in (0.0, 0.09, 0.1, 0.19, 0.2, 0.99)] == [{1}, {1}, {2}, {2}, {"real"}, {"real"}]


def test_warm_up_alone_ends_in_all_levels_mixed() -> None:
    env = make_env(ENV, levels=[1, 3], warmup=0.5)
    assert set(drawn(env, 0.0)) == {1}
    assert set(drawn(env, 0.3)) == {3}
    assert set(drawn(env, 0.6)) == {1, 3}


def test_a_held_out_env_has_no_warm_up(data: str) -> None:
    env = make_env(ENV, data=data, split="test")
    assert len(env.tasks) == 5
    assert set(drawn(env, 0.0)) == {"real"}


def test_the_default_is_ten_percent_with_a_file_and_none_without(data: str) -> None:
    assert set(drawn(make_env(ENV, data=data), 0.05)) == {1}
    assert set(drawn(make_env(ENV, data=data), 0.1)) == {"real"}
    assert set(drawn(make_env(ENV, levels=[1, 2]), 0.0)) == {1, 2}


@pytest.mark.parametrize("warmup", [-0.1, 1.5])
def test_a_share_is_a_share(warmup: float) -> None:
    with pytest.raises(ConfigError, match="warmup must be a share of the run"):
        make_env(ENV, warmup=warmup)


def test_the_files_gold_scores_full(data: str) -> None:
    env = make_env(ENV, data=data, split="test")
    env.reset(options={"task_index": 3})
    assert env.task is not None
    assert env.step(env.task.gold[0]["content"])[4]["success"] is True
