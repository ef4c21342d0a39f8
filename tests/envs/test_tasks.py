"""Tasks: made anew in any process, golds that score full, train and test apart by construction."""

import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, get_args

import pytest

from gymtune.envs import ChatEnv, GeneratedTasks, Split, Task, arithmetic, calculator, make_env
from gymtune.envs.tasks import gold_texts
from gymtune.tools import ParsedCall
from gymtune.tools.errors import ConfigError
from gymtune.tools.messages import user

SPLITS: tuple[Split, ...] = get_args(Split)
LEVELS = {"gymtune/Calculator-v0": (1, 2, 3, 4), "gymtune/Arithmetic-v0": (1, 2, 3)}
EACH = [(env_id, level, split) for env_id, levels in LEVELS.items() for level, split in product(levels, SPLITS)]


def tasks(env_id: str, n: int, **kwargs: Any) -> Iterator[Task]:
    made = make_env(env_id, **kwargs).tasks
    return (made[i] for i in range(n))


def play_gold(env: ChatEnv, index: int) -> tuple[float, bool, dict[str, Any]]:
    env.reset(options={"task_index": index})
    assert env.task is not None
    assert env.task.gold is not None
    total = 0.0
    for text in gold_texts(env.task.gold, env.chat_format):
        _, reward, terminated, _, info = env.step(text)
        total += reward
    return total, terminated, info


def test_the_levels_tried_are_all_there_are() -> None:
    assert LEVELS["gymtune/Calculator-v0"] == calculator.LEVELS
    assert LEVELS["gymtune/Arithmetic-v0"] == tuple(arithmetic.LEVELS)


@pytest.mark.parametrize(("env_id", "level", "split"), EACH)
def test_gold_scores_full(env_id: str, level: int, split: Split) -> None:
    env = make_env(env_id, levels=(level,), split=split, seed=1)
    for index in range(1000):
        total, terminated, info = play_gold(env, index)
        assert (total, terminated, info["success"]) == (1.0, True, True), env.task
        assert env.episode is not None
        assert not any(result.failed for result in env.episode.all_results)


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    **dict.fromkeys(("+", "plus", "sum", "add"), operator.add),
    **dict.fromkeys(("-", "minus", "difference", "subtract"), operator.sub),
    **dict.fromkeys(("*", "times", "product", "multiply"), operator.mul),
}


def read(question: str) -> tuple[list[int], int]:
    """Return the numbers of a question and its value: left to right, as every question is put."""
    numbers = [int(word) for word in re.findall(r"\d+", question)]
    signs = re.findall("|".join(map(re.escape, OPERATIONS)), question)
    value = numbers[0]
    for sign, number in zip(signs, numbers[1:], strict=True):
        value = OPERATIONS[sign](value, number)
    return numbers, value


@pytest.mark.parametrize(("env_id", "level", "split"), EACH)
def test_gt_is_what_the_question_asks(env_id: str, level: int, split: Split) -> None:
    for task in tasks(env_id, 300, split=split, levels=(level,)):
        assert read(task.messages[-1]["content"]) == (task.metadata["operands"], int(task.gt))
        assert task.metadata["level"] == level


def test_calculator_splits_share_no_operand() -> None:
    """Over the whole range: every operand is on one side, and both sides have numbers of every length."""
    sides = {split: {n for n in range(10, 1000) if calculator.held_out(n) == (split == "test")} for split in SPLITS}
    assert sides["train"] | sides["test"] == set(range(10, 1000))
    assert not sides["train"] & sides["test"]
    for split, least in (("train", 60), ("test", 15)):
        assert sum(n < 100 for n in sides[split]) >= least  # of 90
        assert sum(n >= 100 for n in sides[split]) >= 10 * least  # of 900
        assert {n % 10 for n in sides[split]} == set(range(10))  # no last digit tells
        assert {n // 100 for n in sides[split] if n >= 100} == set(range(1, 10))
    for split in SPLITS:
        drawn = {n for task in tasks("gymtune/Calculator-v0", 2000, split=split) for n in task.metadata["operands"]}
        assert drawn <= sides[split]
        assert len(drawn) > 0.8 * len(sides[split])


def test_arithmetic_splits_share_no_pair() -> None:
    """Whatever the order of the two, and at every level both sides have pairs."""
    for a, b in product(range(100), repeat=2):
        assert arithmetic.held_out(a, b) == arithmetic.held_out(b, a)
    for largest, _ in arithmetic.LEVELS.values():
        pairs = [(a, b) for a in range(largest + 1) for b in range(a + 1)]
        assert 0.1 < sum(arithmetic.held_out(*pair) for pair in pairs) / len(pairs) < 0.35
    seen: dict[Split, set[frozenset[int]]] = {
        split: {
            frozenset(t.metadata["operands"])
            for t in tasks("gymtune/Arithmetic-v0", 3000, split=split, levels=(1, 2, 3))
        }
        for split in SPLITS
    }
    assert all(len(pairs) > 300 for pairs in seen.values())
    assert not seen["train"] & seen["test"]


@pytest.mark.parametrize("split", SPLITS)
def test_two_in_five_calculator_tasks_need_two_dependent_calls(split: Split) -> None:
    """Two calls, the second with the first one's result; one call cannot hold both operations."""
    two = 0
    env = make_env("gymtune/Calculator-v0", split=split)
    for task in (env.tasks[i] for i in range(1000)):
        assert task.gold is not None
        calls = [m["tool_calls"][0]["function"]["arguments"]["expression"] for m in task.gold if "tool_calls" in m]
        assert len(calls) == task.metadata["calls_needed"]
        if len(calls) == 2:
            two += 1
            between = env.toolbox.call(ParsedCall("c", "calculator", {"expression": calls[0]}, None, "")).content
            assert calls[1].startswith(f"{between} ")
            both = f"({calls[0]}){calls[1].removeprefix(between)}"
            assert env.toolbox.call(ParsedCall("c", "calculator", {"expression": both}, None, "")).failed
    assert two >= 400


def test_the_same_tasks_in_another_process() -> None:
    code = (
        "from gymtune.envs import make_env\n"
        f"for env_id in {list(LEVELS)}:\n"
        "    for split in ('train', 'test'):\n"
        "        print([make_env(env_id, split=split, seed=5).tasks[i] for i in (0, 1, 99_999)])\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    here = "".join(
        f"{[make_env(env_id, split=split, seed=5).tasks[i] for i in (0, 1, 99_999)]}\n"
        for env_id, split in product(LEVELS, SPLITS)
    )
    assert seen == {here}


@pytest.mark.parametrize("env_id", LEVELS)
def test_other_seeds_and_splits_are_other_tasks(env_id: str) -> None:
    kinds = [{"seed": 0}, {"seed": 1}, {"seed": 0, "split": "test"}]
    drawn = [list(tasks(env_id, 20, **kind)) for kind in kinds]
    assert len({task.task_id for batch in drawn for task in batch}) == 60
    assert len({tuple(task.messages[-1]["content"] for task in batch) for batch in drawn}) == 3


@pytest.mark.parametrize("env_id", LEVELS)
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"split": "tset"}, "'train' or 'test', got 'tset'"),
        ({"levels": (9,)}, r"levels must be some of \(1, 2, 3.*got \(9,\)"),
        ({"levels": ()}, "levels must be some of"),
        ({"levels": 1}, "cannot be made with"),
        ({"size": 0}, "size must be at least 1, got 0"),
    ],
)
def test_what_no_tasks_can_be_made_of(env_id: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_env(env_id, **kwargs)


def test_generated_tasks_are_a_sequence() -> None:
    made = GeneratedTasks("n", lambda rng, split: Task("", (user(f"{split} {rng.random()}"),), 0), size=5)
    assert len(made) == 5
    assert [task.task_id for task in made] == [f"n/train/0/{i}" for i in range(5)]
    assert list(made) == [made[i] for i in range(5)] == made[:]
    assert made[-1] == made[4]
    assert made[1:3] == [made[1], made[2]]
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"item {index} of 5"):
            made[index]
