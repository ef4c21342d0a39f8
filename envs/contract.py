"""The contract check: what every env promises, tried on the env itself. `gymtune envs check ID` prints it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env

from ..tools.chat_format import ChatFormat
from ..tools.errors import EnvError
from ..tools.messages import Message
from .chat_env import ChatEnv
from .registration import make_env

_TASKS_TRIED = 20
_JUNK = ("I do not know.", "yes", "\u4e2d\u6587", "{}", "0 1 2 3 4 5 6 7 8 9", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise, whether it holds, and what was seen."""

    promise: str
    holds: bool
    detail: str


def gold_texts(gold: tuple[Message, ...], chat_format: ChatFormat) -> list[str]:
    """Return the texts a policy of this chat format would write for a task's gold messages."""
    return [
        chat_format.render(m["content"], [call["function"] for call in m.get("tool_calls", [])]) for m in gold
    ]


def check_contract(env_id: str, **kwargs: Any) -> list[Finding]:
    """Try every promise on `env_id` and return the findings in order. Never raises for a broken promise."""
    tries: list[tuple[str, Callable[[], str]]] = [
        ("gymnasium's check_env is clean", lambda: _gymnasium(env_id, kwargs)),
        ("the gold episode scores full", lambda: _gold(make_env(env_id, **kwargs))),
        ("saying nothing scores nothing", lambda: _texts_fail(make_env(env_id, **kwargs), [""])),
        ("junk scores nothing", lambda: _texts_fail(make_env(env_id, **kwargs), list(_JUNK))),
        ("the same seed gives the same episode", lambda: _same_seed(env_id, kwargs)),
        ("a bad call is answered, not run", lambda: _bad_call(make_env(env_id, **kwargs))),
    ]
    findings = []
    for promise, attempt in tries:
        try:
            findings.append(Finding(promise, True, attempt()))
        except (EnvError, AssertionError) as error:
            findings.append(Finding(promise, False, str(error)))
    return findings


def _gymnasium(env_id: str, kwargs: dict[str, Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = gymnasium.make(env_id.rpartition(":")[2], **kwargs)
        check_env(env.unwrapped)
        env.close()
    if caught:
        raise EnvError("; ".join(str(w.message) for w in caught))
    return "no warning"


def _gold(env: ChatEnv) -> str:
    tried = min(_TASKS_TRIED, len(env.tasks))
    for index in range(tried):
        task = env.tasks[index]
        if task.gold is None:
            return f"task {task.task_id} has no gold"
        env.reset(options={"task_index": index})
        info: dict[str, Any] = {}
        for text in gold_texts(task.gold, env.chat_format):
            *_, info = env.step(text)
        if info.get("success") is not True:
            raise EnvError(f"task {task.task_id}: gold ended with {info}")
    return f"{tried} of {tried} tasks"


def _texts_fail(env: ChatEnv, texts: list[str]) -> str:
    for index in range(min(_TASKS_TRIED, len(env.tasks))):
        for text in texts:
            env.reset(options={"task_index": index})
            *_, info = env.step(text)
            if info["success"]:
                raise EnvError(f"task {env.tasks[index].task_id}: {text!r} was scored as right")
    return f"{len(texts)} texts refused"


def _same_seed(env_id: str, kwargs: dict[str, Any]) -> str:
    first, second = (make_env(env_id, **kwargs).reset(seed=7) for _ in range(2))
    if first != second:
        raise EnvError(f"seed 7 gave {first} and then {second}")
    return first[1]["task_id"]  # type: ignore[no-any-return]


def _bad_call(env: ChatEnv) -> str:
    env.reset(options={"task_index": 0})
    assert env.task is not None
    if not env.toolbox.names:
        return "the env has no tools"
    call: Any = {"name": env.toolbox.names[0], "arguments": {}}
    *_, info = env.step(env.chat_format.render("", [{**call, "name": "no_such_tool"}]))
    outcome = info["tool_results"][0].outcome
    if outcome != "unknown_tool":
        raise EnvError(f"a call of an unknown tool ended in {outcome!r}")
    return "unknown_tool"
