"""gymtune/Arithmetic-v0: a single turn of arithmetic, verified by number. No tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from ..rewards.components import gt_component, unfinished
from ..rewards.numeric import NumericChecker
from ..tools.errors import ConfigError
from ..tools.messages import Message, user
from .chat_env import ChatEnv
from .tasks import GeneratedTasks, Split, Task

#: level -> (largest operand, operations)
LEVELS: Mapping[int, tuple[int, str]] = {1: (9, "+"), 2: (20, "+-"), 3: (99, "+-*")}
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
    gold: tuple[Message, ...] = ({"role": "assistant", "content": str(value)},)
    question = user(f"What is {a} {operation} {b}? Answer with the number.")
    return Task("", (question,), str(value), gold, {"level": level, "operands": [a, b]})


class ArithmeticEnv(ChatEnv):
    """One question, one answer, scored as a number.

    Args:
        split: `train` or `test`; their pairs of operands are disjoint.
        levels: 1 sums to 9 + 9, 2 sums and differences to 20, 3 also products, to 99.
        size, seed: how many tasks there are and which.
        rewards: weights of `gt` (default 1) and `unfinished` (default 0: seen, not paid).
        max_turns: more than 1 gives an agent that calls a tool, where there is none, another turn to answer.
    """

    def __init__(
        self,
        split: Split = "train",
        levels: Sequence[int] = (1,),
        size: int = 100_000,
        seed: int = 0,
        rewards: Mapping[str, float] | None = None,
        max_turns: int = 1,
        **options: Any,
    ) -> None:
        chosen = tuple(levels)
        if not chosen or any(level not in LEVELS for level in chosen):
            raise ConfigError(f"levels must be some of {tuple(LEVELS)}, got {levels!r}")
        super().__init__(
            GeneratedTasks(
                "arithmetic", lambda rng, side: make_task(rng, side, chosen), size=size, split=split, seed=seed
            ),
            [gt_component(NumericChecker()), unfinished],
            rewards=rewards,
            max_turns=max_turns,
            **options,
        )
