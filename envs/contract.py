"""The contract check: what every env promises, tried on the env itself. `gymtune envs check ID` prints it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env

from ..tools.errors import EnvError
from ..tools.outcomes import Outcome
from .attacks import AttackTable, play_broken, scoring, try_attacks
from .chat_env import ChatEnv
from .registration import make_env
from .tasks import gold_texts

_TASKS_TRIED, _FEW_TASKS = 20, 3
_JUNK = ("I do not know.", "yes", "\u4e2d\u6587", "{}", "0 1 2 3 4 5 6 7 8 9", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise, whether it holds, and what was seen; for the last one, kinds of attack: (tried, taken)."""

    promise: str
    holds: bool
    detail: str
    attacks: AttackTable = field(default_factory=dict)


def check_contract(env_id: str, **kwargs: Any) -> list[Finding]:
    """Try every promise on `env_id`, each on a fresh env, and return the findings in order.

    A broken promise, a crash of the env included, is a finding. Raises ConfigError where no env can be made at all.
    """
    make_env(env_id, **kwargs).close()

    def fresh(attempt: Callable[[ChatEnv], str]) -> Callable[[], str]:
        def run() -> str:
            with closing(make_env(env_id, **kwargs)) as env:
                return attempt(env)

        return run

    tries: dict[str, Callable[[], str]] = {
        "gymnasium's check_env is clean": lambda: _gymnasium(env_id, kwargs),
        "the gold episode scores full": fresh(_gold),
        "saying nothing scores nothing": fresh(lambda env: _refused(env, [""])),
        "junk scores nothing": fresh(lambda env: _refused(env, _JUNK)),
        "the same seed gives the same episode": lambda: _same_seed(fresh(_episode)),
        "a bad call is answered, not run": fresh(_bad_call),
        "a broken checker is no score": fresh(play_broken),
    }
    findings = [_try(promise, attempt) for promise, attempt in tries.items()]
    return [*findings, _attacked(env_id, kwargs)]


def check_briefly(make: Callable[[], ChatEnv]) -> list[Finding]:
    """Try the promises that learning leans on, on one env and a few tasks: a moment where `check_contract` is thorough.

    A broken promise, a crash of the env included, is a finding. What `make` raises is passed on.
    """
    with closing(make()) as env:
        tries: dict[str, Callable[[], str]] = {
            "the gold episode scores full": lambda: _gold(env, _FEW_TASKS),
            "saying nothing scores nothing": lambda: _refused(env, [""], _FEW_TASKS),
            "junk scores nothing": lambda: _refused(env, _JUNK, _FEW_TASKS),
            "a bad call is answered, not run": lambda: _bad_call(env),
        }
        return [_try(promise, attempt) for promise, attempt in tries.items()]


def _attacked(env_id: str, kwargs: dict[str, Any]) -> Finding:
    promise, table = "no attack is taken for the answer", AttackTable()

    def attempt() -> str:
        with closing(make_env(env_id, **kwargs)) as env:
            table.update(try_attacks(env, _TASKS_TRIED))
        if taken := [kind for kind, (_, taken) in table.items() if taken]:
            raise EnvError(f"taken for the answer: {', '.join(taken)}")
        tried = sum(tried for tried, _ in table.values())
        return f"{tried} answers of {len(table)} kinds refused" if table else "the env has no checker"

    return replace(_try(promise, attempt), attacks=table)


def _try(promise: str, attempt: Callable[[], str]) -> Finding:
    try:
        return Finding(promise, True, attempt())
    except EnvError as error:
        return Finding(promise, False, str(error))
    except Exception as error:  # noqa: BLE001 - the env is user code on trial: its crash is what was to be found
        return Finding(promise, False, f"{type(error).__name__}: {error}")


def _gymnasium(env_id: str, kwargs: dict[str, Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with closing(gymnasium.make(env_id.rpartition(":")[2], **kwargs)) as env:
            check_env(env.unwrapped)
    if caught:
        raise EnvError("; ".join(str(w.message) for w in caught))
    return "no warning"


def _gold(env: ChatEnv, tasks: int = _TASKS_TRIED) -> str:
    tried = range(min(tasks, len(env.tasks)))
    played = sum(_play_gold(env, index) for index in tried)
    return f"{played} tasks" if played == len(tried) else f"{played} of {len(tried)} tasks have a gold episode"


def _play_gold(env: ChatEnv, index: int) -> bool:
    """Play the gold episode of a task; return whether it has one."""
    task = env.tasks[index]
    if task.gold is None:
        return False
    env.reset(options={"task_index": index})
    ending: dict[str, Any] = {}
    for text in gold_texts(task.gold, env.chat_format):
        _, _, terminated, _, info = env.step(text)
        ending = {"terminated": terminated, "success": info["success"], "rewards": info["rewards"]}
    if not ending.get("terminated") or ending["success"] is not True:
        raise EnvError(f"task {task.task_id}: its gold episode ended with {ending}")
    return True


def _refused(env: ChatEnv, texts: Sequence[str], tasks: int = _TASKS_TRIED) -> str:
    component = scoring(env)
    for index in range(min(tasks, len(env.tasks))):
        if component and component.checker and component.checker.wants_nothing(env.tasks[index].gt):
            continue
        for text in texts:
            env.reset(options={"task_index": index})
            _, reward, *_, info = env.step(text)
            if info["success"] or (reward > 0 and not env.pays_without_success):
                raise EnvError(f"task {env.tasks[index].task_id}: {text!r} earned {reward}, success {info['success']}")
    return f"{len(texts)} texts refused"


def _episode(env: ChatEnv) -> str:
    """Return what is seen of one seeded episode, as text; seconds apart, which differ from run to run."""
    first = env.reset(seed=7)
    call = env.chat_format.render("", [{"name": name, "arguments": {}} for name in env.toolbox.names])
    return repr((first, env.step(call)[:4]))


def _same_seed(episode: Callable[[], str]) -> str:
    first, second = episode(), episode()
    if first != second:
        raise EnvError(f"seed 7 gave {first} and then {second}")
    return "seed 7, twice"


def _bad_call(env: ChatEnv) -> str:
    env.reset(options={"task_index": 0})
    if not env.toolbox.names:
        return "the env has no tools"
    answer, *_, info = env.step(env.chat_format.render("", [{"name": "no_such_tool", "arguments": {}}]))
    outcomes = [result.outcome for result in info["tool_results"]]
    if outcomes != [Outcome.unknown_tool] or [message["role"] for message in answer] != ["tool"]:
        raise EnvError(f"a call of an unknown tool ended in {outcomes} and was answered by {answer}")
    return "unknown_tool"
