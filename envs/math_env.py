"""gymtune/Math-v0: questions with a verifiable answer, from a file of yours; with tools, or without."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..rewards.checker import Checker
from ..rewards.components import failed_calls, gt_component, unfinished
from ..rewards.registry import get_checker
from ..tools.library.catalog import library_toolbox
from ..tools.messages import Message, assistant, call
from .chat_env import ChatEnv
from .files import FileTasks, Record, example_path
from .tasks import MadeTasks, Task

_ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")  # GSM8K: <<48/2=24>>, a call of the calculator and its result
_MAX_TURNS = 16  # with tools; the longest solution of GSM8K takes 11 calls


def make_task(record: Record, name: str, checker: Checker, with_calculator: bool) -> Task:
    """Make the task of a record. Its gold is the file's own solution, else the answer stated in the shortest way.

    With a calculator, the annotations of a GSM8K solution become the gold's calls.
    """
    solution = record.replies[0].messages if record.replies else ()
    text = solution[-1]["content"] if solution else checker.statement(record.gt)
    gold = calculator_episode(text) if with_calculator else (assistant(text),)
    return Task(f"{name}/{record.line}", record.prompt, record.gt, tuple(gold), record.metadata)


def calculator_episode(solution: str) -> tuple[Message, ...]:
    """Return a GSM8K solution as an episode: a call for each annotation, then the text that is left."""
    turns: list[Message] = []
    said = 0
    for match in _ANNOTATION.finditer(solution):
        before = solution[said : match.start()].strip()
        turns.append(assistant(before, call("calculator", expression=match[1].strip())))
        said = match.end()
    return (*turns, assistant(solution[said:].strip()))


class MathEnv(ChatEnv):
    """Questions from a file, one answer each, verified.

    Args:
        data: a verifiable file (GSM8K, verl, `question` + `answer`, ...); a small one that ships is the default.
        checker: `numeric`, `math`, `math_verify`, `exact`, `choice`, `json_equal`, or `module:Class` of yours.
        tools: tools of the library by name, such as `calculator` and `python`; the gold of a GSM8K file then calls the
            calculator wherever the file's solution is annotated.
        rewards: weights of `gt` (default 1), `failed_calls` and `unfinished` (default 0: seen, not paid).
        max_turns: 1 without tools, 16 with.
    """

    def __init__(
        self,
        data: str | None = None,
        checker: str = "numeric",
        tools: str | Sequence[str] = (),
        rewards: Mapping[str, float] | str | None = None,
        max_turns: int | None = None,
        **options: Any,
    ) -> None:
        path = Path(data) if data is not None else example_path("verifiable")
        names = [tools] if isinstance(tools, str) else list(tools)
        judge = get_checker(checker)
        make = partial(make_task, name=path.stem, checker=judge, with_calculator="calculator" in names)
        super().__init__(
            MadeTasks(FileTasks(path, kind="verifiable"), make),
            [gt_component(judge), failed_calls, unfinished],
            toolbox=library_toolbox(names),
            rewards=rewards,
            max_turns=max_turns if max_turns is not None else _MAX_TURNS if names else 1,
            **options,
        )
