"""Env steps a second: gold episodes of the calculator env, no model."""

from __future__ import annotations

from gymtune.envs import make_env
from gymtune.envs.tasks import gold_texts

from .harness import Result, Settings, compete, rate

ENV = "gymtune/Calculator-v0"


def run(settings: Settings) -> list[Result]:
    """Measure; there is no peer."""
    tasks = settings.pick(300, 20)
    return compete("env steps, gold episodes", "steps/s", {"gymtune": rate(lambda: play(tasks))}, settings)


def play(tasks: int) -> int:
    """Step through the gold episodes; return the number of steps, tool calls among them."""
    env = make_env(ENV)
    steps = 0
    for index in range(tasks):
        env.reset(options={"task_index": index})
        assert env.task is not None
        for text in gold_texts(env.task.gold or (), env.chat_format):
            env.step(text)
            steps += 1
    env.close()
    return steps
