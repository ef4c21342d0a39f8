"""What an env cannot score alone: batch functions as TRL has them, and reward models and judges behind a protocol."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from ..tools.errors import ConfigError
from ..tools.messages import Message
from .registry import load_object


class RewardFunction(Protocol):
    """TRL's form: one score for each completion, None where the function has nothing to say. May be async.

    It may name as parameters what it needs of the columns (`gt`, `completion_ids`, ...) or take all by `**columns`,
    and may leave `prompts` out.
    """

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> Sequence[float | None] | Awaitable[Sequence[float | None]]:
        """Return the scores of a batch, in order."""
        ...


class ConversationScorer(Protocol):
    """A reward model or a judge: one score for each conversation, None where it has none.

    Where its `score` has a parameter `tools`, it gets the JSON text of each conversation's tools too.
    """

    def score(self, conversations: Sequence[Sequence[Message]]) -> Sequence[float | None]:
        """Return the scores of a batch, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a batch. `error` says why all of them are None where what scores failed."""

    values: list[float | None]
    error: str | None = None


def load_function(spec: str) -> RewardFunction:
    """Return the reward function `module:name`. Raises ConfigError."""
    function = load_object(spec, "reward function")
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"reward function {spec!r} must be a function of prompts and completions, got {function!r}")
    found: RewardFunction = function  # what else it takes is read at the call
    return found


def call_function(
    function: RewardFunction, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> Scores:
    """Call a reward function on a batch, with those of the columns that it takes; wait for an async one.

    A crash, or a score that is no finite number, makes every score of the batch None and is told in `error`: nobody
    learns from half a batch. Raises ConfigError, naming the function, where it needs a column that is not there or
    returns another number of scores than there are completions.
    """
    name = getattr(function, "__name__", type(function).__name__)
    taken = _taken(function, name, {**columns, "prompts": prompts, "completions": completions})
    return _scores(name, lambda: function(**taken), len(completions))


def call_scorer(
    scorer: ConversationScorer, conversations: Sequence[Sequence[Message]], tools: Sequence[str] | None = None
) -> Scores:
    """Score a batch of conversations by a reward model or a judge, which gets `tools` where it takes them.

    `tools` is the JSON text of each conversation's. Failures and errors are those of `call_function`.
    """
    takes = tools is not None and "tools" in inspect.signature(scorer.score).parameters
    more: dict[str, Any] = {"tools": tools} if takes else {}
    return _scores(type(scorer).__name__, lambda: scorer.score(conversations, **more), len(conversations))


def _scores(name: str, run: Callable[[], Any], count: int) -> Scores:
    try:
        result = run()
        scores = list(_wait(result) if inspect.isawaitable(result) else result)
        values = [None if score is None else _number(score) for score in scores]
    except Exception as error:  # noqa: BLE001 - user code run on hostile text: its crash is data, as a checker's
        return Scores([None] * count, f"{name}: {type(error).__name__}: {error}")
    if len(values) != count:
        raise ConfigError(f"reward function {name!r} must return {count} scores, got {len(values)}")
    return Scores(values)


def _taken(function: RewardFunction, name: str, offered: dict[str, Any]) -> dict[str, Any]:
    """Return what of `offered` the function takes by name."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for missing in (key for key in needed if key not in named or key not in offered):
        raise ConfigError(
            f"reward function {name!r} needs {missing!r}; what it can have, by name: {', '.join(sorted(offered))}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    return {key: value for key, value in offered.items() if key in named}


def _wait(result: Awaitable[Any]) -> Any:
    """Wait for an async function in a loop of its own, in a thread of its own: the caller may run a loop already."""

    async def waiting() -> Any:
        return await result

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, waiting()).result()


def _number(score: Any) -> float:
    if isinstance(score, str) or not math.isfinite(float(score)):
        raise ValueError(f"a score must be a finite number or None, got {score!r}")
    return float(score)
