"""gymtune/Arithmetic-v0: a single turn of arithmetic, verified by number. No tools.

It can be the warm-up of a harder set: with `data` or `warmup` a training run goes through the levels one by one and
then on to the real set, where a weak model would at first earn nothing to learn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from ..rewards.components import gt_component, unfinished
from ..rewards.numeric import NumericChecker
from ..tools.errors import ConfigError
from ..tools.messages import assistant, user
from .chat_env import ChatEnv
from .files import FileTasks
from .math_env import make_task as make_file_task
from .tasks import GeneratedTasks, JoinedTasks, MadeTasks, Split, Task, TaskSet

#: level -> (largest operand, operations)
LEVELS: Mapping[int, tuple[int, str]] = {1: (9, "+"), 2: (20, "+-"), 3: (99, "+-*")}
_WARMUP = 0.1  # share of a run, as in train-llm-from-scratch: 100 of 1000 iterations
_HELD_OUT_SHARE = 5  # one unordered pair of operands in so many is held out


def held_out(a: int, b: int) -> bool:
    """Tell whether the pair belongs to the held-out tasks; `a, b` and `b, a` are on the same side."""
    low, high = sorted((a, b))
    return ((low * 1009 + high) * 2654435761 >> 16) % _HELD_OUT_SHARE == 0


def make_task(rng: Random, split: Split, levels: Sequence[int]) -> Task:
    """Make one task `What is a op b?` with its one-message gold episode."""
    level = rng.choice(levels)
    largest, operations = LEVELS[level]
    while True:
        a, b = rng.randint(0, largest), rng.randint(0, largest)
        if held_out(a, b) == (split == "test"):
            break
    operation = rng.choice(operations)
    value = {"+": a + b, "-": a - b, "*": a * b}[operation]
    question = user(f"What is {a} {operation} {b}? Answer with the number.")
    return Task("", (question,), str(value), (assistant(str(value)),), {"level": level, "operands": [a, b]})


class ArithmeticEnv(ChatEnv):
    """One question, one answer, scored as a number.

    Args:
        split: `train` or `test`; their pairs of operands are disjoint.
        levels: 1 sums to 9 + 9, 2 sums and differences to 20, 3 also products, to 99.
        data: a verifiable file with number answers, such as GSM8K: the real set after the warm-up.
        warmup: share of a training run spent on the levels, one after the other, before the real set (that of `data`,
            else all levels mixed). Default 0.1 with `data`, else 0.
        size, seed: how many tasks of each set there are and which.
        rewards: weights of `gt` (default 1) and `unfinished` (default 0: seen, not paid).
        max_turns: more than 1 gives an agent that calls a tool, where there is none, another turn to answer.
    """

    def __init__(
        self,
        split: Split = "train",
        levels: Sequence[int] = (1,),
        data: str | None = None,
        warmup: float | None = None,
        size: int = 100_000,
        seed: int = 0,
        rewards: Mapping[str, float] | str | None = None,
        **options: Any,
    ) -> None:
        chosen = tuple(levels)
        if not chosen or any(level not in LEVELS for level in chosen):
            raise ConfigError(f"levels must be some of {tuple(LEVELS)}, got {levels!r}")
        self.warmup = warmup if warmup is not None else _WARMUP if data is not None else 0.0
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"warmup must be a share of the run, 0 to 1, got {warmup!r}")

        def generated(name: str, some: Sequence[int]) -> TaskSet:
            make = partial(make_task, levels=some)
            return GeneratedTasks(name, make, size=size, split=split, seed=seed)

        stages = (
            [generated(f"arithmetic-{level}", (level,)) for level in chosen] if self.warmup and split == "train" else []
        )
        stages.append(generated("arithmetic", chosen) if data is None else _real_set(data))
        self.stages = JoinedTasks(stages)
        options.setdefault("max_turns", 1)
        super().__init__(self.stages, [gt_component(NumericChecker()), unfinished], rewards=rewards, **options)

    def draw_task(self, rng: Random, progress: float) -> int:
        """Return a task of the stage that the run has come to."""
        levels = len(self.stages.parts) - 1
        stage = levels if not levels or progress >= self.warmup else int(progress / self.warmup * levels)
        return self.stages.starts[stage] + rng.randrange(len(self.stages.parts[stage]))


def _real_set(data: str) -> TaskSet:
    make = partial(make_file_task, name=Path(data).stem, checker=NumericChecker(), with_calculator=False)
    return MadeTasks(FileTasks(data, kind="verifiable"), make)
