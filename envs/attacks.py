"""Attacks: what holds the right answer and does not state it, played in an env. None may be taken for the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..rewards.checker import Checker, Verdict
from ..rewards.components import Component, gt_component
from ..tools.errors import EnvError
from .action import Action
from .chat_env import ChatEnv
from .tasks import Task, gold_texts

#: kind of attack -> how often it was tried, how often it was taken for the answer
AttackTable = dict[str, tuple[int, int]]

_DONE = "Done."  # what is said after calls that were an attack


class Broken(Checker):
    """A checker that always crashes."""

    def verdict(self, answer: Any, gt: Any) -> Verdict:
        """Crash."""
        raise RuntimeError("broken on purpose")


def scoring(env: ChatEnv) -> Component | None:
    """Return the component by which the env scores `gt`, or None when it has none with a checker."""
    return next((c for c in env.components.values() if c.checker is not None), None)


def try_attacks(env: ChatEnv, tasks: int) -> AttackTable:
    """Play every attack on the first `tasks` tasks: at once, and once more where the gold's last answer would stand.

    The second way gives an attack the tool results and the user's answers to copy from.
    """
    component = scoring(env)
    table: AttackTable = {}
    if component is None or component.checker is None:
        return table
    for index in range(min(tasks, len(env.tasks))):
        task = env.tasks[index]
        for kind, attack in component.checker.attacks(task.gt):
            for texts in _ways(env, task, attack, component.checker.reads):
                tried, taken = table.get(kind, (0, 0))
                table[kind] = (tried + 1, taken + _succeeds(env, index, texts))
    return table


def _ways(env: ChatEnv, task: Task, attack: Any, reads: str) -> Iterator[list[str]]:
    """Yield the turns that carry an attack on a checker of answers or of calls; a state cannot be said.

    A text also stands in the place of the gold's last one, unless the turns before that are what is judged.
    """
    if isinstance(attack, str):
        yield [attack]
        before = gold_texts((task.gold or ())[:-1], env.chat_format)
        if before and reads == "answer":
            yield [*before, attack]
    elif reads == "calls":
        yield [env.chat_format.render("", list(attack)), _DONE] if attack else [_DONE]


def _succeeds(env: ChatEnv, index: int, texts: Sequence[str]) -> bool:
    """Tell whether the last of the texts is taken for the answer; an episode that ends before it is none."""
    env.reset(options={"task_index": index})
    for text in texts[:-1]:
        *_, terminated, truncated, _ = env.step(text)
        if terminated or truncated:
            return False
    *_, info = env.step(texts[-1])
    return info["success"] is True


def play_broken(env: ChatEnv) -> str:
    """Let the checker crash on task 0 and see that nobody is paid for it, or punished. Raises EnvError otherwise."""
    component = scoring(env)
    if component is None:
        return "the env has no checker"
    env.components[component.name] = gt_component(Broken(), component.name)
    env.reset(options={"task_index": 0})
    texts = gold_texts(env.tasks[0].gold or (), env.chat_format) or [_DONE]
    for text in texts:
        _, reward, terminated, truncated, info = env.step(text)
        if terminated or truncated:
            break
    else:  # there is no gold, or it does not end: the driver would end it
        _, reward, *_, info = env.step(Action("", "deadline"))
    value = info["rewards"].get(component.name, "left out")
    if value is not None or info["success"] is not None:
        raise EnvError(f"the checker crashed, and {component.name} is {value}, success {info['success']}")
    return f"{component.name} is None, reward {reward:g} without it"
