"""gymtune/Calculator-v0: arithmetic in words and symbols that needs the calculator, one operation a call.

The calculator takes one operation at a time, so a task of two operations needs two calls, the second of which uses
the result of the first. Held-out tasks use operands that no training task uses: the integers are split in two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from ..rewards.components import failed_calls, gt_component, unfinished
from ..rewards.numeric import NumericChecker
from ..tools.errors import ConfigError
from ..tools.library.calculator import Limits, calculator_tool
from ..tools.messages import assistant, call, system, user
from ..tools.toolbox import Toolbox
from .chat_env import ChatEnv
from .tasks import GeneratedTasks, Split, Task

LEVELS = (1, 2, 3, 4)
_SYSTEM = "Use the calculator. Answer with the number."
_RANGES = ((10, 99), (100, 999))  # an operand has two or three digits, as likely the one as the other
_HELD_OUT_SHARE = 4  # one operand in so many is held out
_RESULT_CHARS = 64  # results are short; what is said of a bad call need not be long


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation: how it is asked, what the calculator is given, what comes out."""

    symbol: str
    first: tuple[str, ...]  # phrases for "a op b" as a whole question
    then: str  # phrase that applies "op b" to the result so far
    apply: Callable[[int, int], int]


_STEPS = (
    _Step("+", ("{a} plus {b}", "the sum of {a} and {b}"), "add {b}", lambda a, b: a + b),
    _Step("-", ("{a} minus {b}", "the difference of {a} and {b}"), "subtract {b}", lambda a, b: a - b),
    _Step("*", ("{a} times {b}", "the product of {a} and {b}"), "multiply by {b}", lambda a, b: a * b),
)


def held_out(operand: int) -> bool:
    """Tell whether `operand` belongs to the held-out tasks (a multiplicative hash, so no digit gives it away)."""
    return (operand * 2654435761 >> 16) % _HELD_OUT_SHARE == 0


def _operand(rng: Random, split: Split) -> int:
    while True:
        operand = rng.randint(*rng.choice(_RANGES))
        if held_out(operand) == (split == "test"):
            return operand


def _question(rng: Random, level: int, numbers: Sequence[int], steps: Sequence[_Step]) -> str:
    """Return the question: level 1 and 3 in symbols, 2 and 4 in words."""
    a, b = numbers[:2]
    if level == 1:
        return f"What is {a} {steps[0].symbol} {b}?"
    in_words = rng.choice(steps[0].first).format(a=a, b=b)
    if level == 2:
        return f"What is {in_words}?"
    c = numbers[2]
    if level == 3:
        return f"What is ({a} {steps[0].symbol} {b}) {steps[1].symbol} {c}?"
    return f"Take {in_words}, then {steps[1].then.format(b=c)}."


def make_task(rng: Random, split: Split, levels: Sequence[int]) -> Task:
    """Make one task of one of `levels`, with the gold episode: a call for each operation, then the number."""
    level = rng.choice(levels)
    operations = 1 if level <= 2 else 2
    steps = [rng.choice(_STEPS)]
    if operations == 2:  # a product of a product has more digits than the task is about
        steps.append(rng.choice([step for step in _STEPS if not step.symbol == steps[0].symbol == "*"]))
    numbers = [_operand(rng, split) for _ in range(operations + 1)]
    question = _question(rng, level, numbers, steps)
    value, gold = numbers[0], []
    for step, operand in zip(steps, numbers[1:], strict=True):
        gold.append(assistant("", call("calculator", expression=f"{value} {step.symbol} {operand}")))
        value = step.apply(value, operand)
    gold.append(assistant(str(value)))
    metadata = {"level": level, "operands": numbers, "calls_needed": operations}
    return Task("", (system(_SYSTEM), user(question)), str(value), tuple(gold), metadata)


@cache
def _toolbox() -> Toolbox:
    """The calculator has no state: one toolbox, its schema compiled once, serves every env of the process."""
    return Toolbox([calculator_tool(Limits(max_operations=1))], max_result_chars=_RESULT_CHARS)


class CalculatorEnv(ChatEnv):
    """Questions of one or two operations; a calculator that takes one operation a call; the number as the answer.

    Args:
        split: `train` or `test`; their operands are disjoint.
        levels: 1 one operation in symbols, 2 in words, 3 two operations in symbols, 4 in words.
        size, seed: how many tasks there are and which.
        rewards: weights of `gt` (default 1), `failed_calls` and `unfinished` (default 0: seen, not paid).
    """

    def __init__(
        self,
        split: Split = "train",
        levels: Sequence[int] = LEVELS,
        size: int = 100_000,
        seed: int = 0,
        rewards: Mapping[str, float] | None = None,
        max_turns: int = 4,
        **options: Any,
    ) -> None:
        if split not in ("train", "test"):
            raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
        chosen = tuple(levels)
        if not chosen or any(level not in LEVELS for level in chosen):
            raise ConfigError(f"levels must be some of {LEVELS}, got {levels!r}")
        super().__init__(
            GeneratedTasks(
                "calculator", lambda rng, side: make_task(rng, side, chosen), size=size, split=split, seed=seed
            ),
            [gt_component(NumericChecker()), failed_calls, unfinished],
            toolbox=_toolbox(),
            rewards=rewards,
            max_turns=max_turns,
            **options,
        )
