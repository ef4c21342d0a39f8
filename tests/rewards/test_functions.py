import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gymtune.rewards.functions import Scores, call_function, call_scorer, load_function
from gymtune.tools.errors import ConfigError
from gymtune.tools.messages import Message, user

PROMPTS = [[user("1 + 1?")], [user("2 + 2?")], [user("3 + 3?")]]
COMPLETIONS = ["2", "5", ""]
COLUMNS: dict[str, Any] = {"gt": ["2", "4", "6"], "level": [1, 2, 3], "completion_ids": [[7], [8, 9], []]}


def call(function: Any) -> Scores:
    return call_function(function, PROMPTS, COMPLETIONS, COLUMNS)


def everything(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    assert (prompts, completions, columns) == (PROMPTS, COMPLETIONS, COLUMNS)
    return [1.0, None, 0]


def columns_by_name(completions: list[str], gt: list[str], level: list[int], weight: float = 2.0) -> list[float]:
    return [weight * n * (a == b) for a, b, n in zip(completions, gt, level, strict=True)]


def by_keyword(*, completion_ids: list[list[int]], completions: list[str], trainer_state: Any = None) -> list[int]:
    assert trainer_state is None
    return [len(ids) - len(text) for ids, text in zip(completion_ids, completions, strict=True)]


async def patient(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


class CallableObject:
    def __call__(self, prompts: Any, completions: list[str]) -> list[bool]:
        return [text != "" for text in completions]


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (everything, [1.0, None, 0.0]),
        (columns_by_name, [2.0, 0.0, 0.0]),
        (functools.partial(columns_by_name, weight=3.0), [3.0, 0.0, 0.0]),
        (by_keyword, [0.0, 1.0, 0.0]),
        (patient, [1.0, 1.0, 0.0]),
        (CallableObject(), [1.0, 1.0, 0.0]),
    ],
)
def test_a_function_gets_what_it_takes(function: Any, values: list[float | None]) -> None:
    scores = call(function)
    assert scores == Scores(values)
    assert all(type(value) is float for value in scores.values if value is not None)


def test_an_async_function_runs_under_a_running_loop_too() -> None:
    async def within() -> Scores:
        return call(patient)

    assert asyncio.run(within()) == Scores([1.0, 1.0, 0.0])


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for result in (numpy.array([1, 2, 3], numpy.float32), torch.tensor([1.0, 2.0, 3.0]), (1, 2, 3)):
        assert call(lambda completions, result=result: result) == Scores([1.0, 2.0, 3.0])


def crash(completions: list[str]) -> list[float]:
    return [1 / len(text) for text in completions]


async def late_crash(completions: list[str]) -> list[float]:
    raise KeyError("late")


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (crash, "crash: ZeroDivisionError: division by zero"),
        (late_crash, "late_crash: KeyError: 'late'"),
        (lambda completions: [1.0, float("nan"), 0.0], "<lambda>: ValueError: a score must be a finite number"),
        (lambda completions: [1.0, float("-inf"), 0.0], "got -inf"),
        (lambda completions: [1.0, "0.5", 0.0], "got '0.5'"),
        (lambda completions: [1.0, [0.5], 0.0], "TypeError"),
        (lambda completions: None, "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_failure_scores_nobody_and_tells_the_cause(function: Any, cause: str) -> None:
    scores = call(function)
    assert scores.values == [None, None, None]
    assert cause in (scores.error or "")


def test_an_interrupt_passes() -> None:
    def interrupted(completions: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupted)


def needs_more(completions: Any, solution: Any) -> list[float]:
    return []


def by_position(prompts: Any, completions: Any, /) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: [1.0], "'<lambda>' must return 3 scores, got 1"),
        (lambda completions: [0.0] * 4, "must return 3 scores, got 4"),
        (
            needs_more,
            "'needs_more' needs 'solution'; what it can have, by name: completion_ids, completions, gt, level",
        ),
        (by_position, "'by_position' needs 'prompts'"),
    ],
)
def test_what_the_user_can_mend_is_an_error(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(function)


def test_a_column_never_hides_what_was_said() -> None:
    scores = call_function(lambda completions: [float(c) for c in completions], ["p"], ["3"], {"completions": ["9"]})
    assert scores == Scores([3.0])


class Judge:
    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        return [None if not messages else float(messages[-1]["content"]) for messages in conversations]


def test_a_judge_scores_conversations_and_fails_as_a_function_does() -> None:
    assert call_scorer(Judge(), [[user("1")], [], [user("-2.5")]]) == Scores([1.0, None, -2.5])
    failed = call_scorer(Judge(), [[user("1")], [user("good")]])
    assert failed.values == [None, None]
    assert "Judge: ValueError: could not convert" in (failed.error or "")
    with pytest.raises(ConfigError, match="'Judge' must return 2 scores, got 1"):
        call_scorer(type("Judge", (), {"score": lambda self, c: [1.0]})(), [[], []])


def test_a_function_is_loaded_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def short(completions, **_):\n    return [-len(c) for c in completions]\nnumber = 3\nclass Short: pass\n"
    (tmp_path / "own_functions.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call(load_function("own_functions:short")) == Scores([-1.0, -1.0, 0.0])
    for spec, message in [
        ("own_functions:shot", "Did you mean 'short'"),
        ("own_functions:number", "must be a function of prompts and completions, got 3"),
        ("own_functions:Short", "must be a function"),
        ("no_such_module:f", "cannot import"),
        ("short", "must have the form 'module:name'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_function(spec)
