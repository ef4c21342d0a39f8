"""Evaluation: how often an agent succeeds on the first tasks of an env, and how sure that number is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, Self

from ..envs.chat_env import ChatEnv
from ..tools.errors import ConfigError, RunError
from .agent import Agent
from .rollout import Limits, env_factory, plan_episodes, run_episodes
from .trajectory import Trajectory

_Z95 = 1.959963984540054  # the 0.975 quantile of the standard normal distribution
_NO_FAILURE = ("ok", "truncated")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the episodes of an evaluation say.

    `episodes` counts those that could be scored; `failed` (a crash of env or backend) and `broken` (the checker could
    not tell) are left out of every mean. `interval` is the Wilson 95 % interval of the success rate, `rewards` the
    mean of each component, `tool_calls` and `turns` are means over episodes, `tool_failures` counts calls by outcome.
    """

    episodes: int
    successes: int
    success_rate: float
    interval: tuple[float, float]
    reward: float
    rewards: dict[str, float]
    tool_calls: float
    tool_failures: dict[str, int]
    turns: float
    truncated: float
    failed: int
    broken: int
    seconds: float

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], seconds: float) -> Self:
        """Sum up finished episodes. Raises RunError when none of them could be scored."""
        failed = [t for t in trajectories if t.error is not None]
        scored = [t for t in trajectories if t.reward is not None]
        if not scored:
            cause = (failed[0].error or "").strip().rpartition("\n")[2] if failed else "the checker could not tell"
            raise RunError(f"none of {len(trajectories)} episodes could be scored, the first one: {cause}")
        successes = sum(t.success is True for t in scored)
        uses = [use.outcome for t in scored for turn in t.turns for use in turn.tools]
        names = sorted({name for t in scored for name in t.rewards})
        return cls(
            episodes=len(scored),
            successes=successes,
            success_rate=successes / len(scored),
            interval=wilson_interval(successes, len(scored)),
            reward=fmean(t.reward or 0.0 for t in scored),
            rewards={name: fmean(t.rewards.get(name) or 0.0 for t in scored) for name in names},
            tool_calls=len(uses) / len(scored),
            tool_failures=dict(sorted(Counter(use for use in uses if use not in _NO_FAILURE).items())),
            turns=fmean(len(t.turns) for t in scored),
            truncated=fmean(t.truncated for t in scored),
            failed=len(failed),
            broken=len(trajectories) - len(scored) - len(failed),
            seconds=seconds,
        )

    @property
    def percent(self) -> str:
        """Success rate and interval for people: `51.5 [44.6, 58.3]`."""
        low, high = self.interval
        return f"{100 * self.success_rate:.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON data."""
        return asdict(self) | {"interval": list(self.interval)}


def evaluate(
    env: str | Callable[[], ChatEnv],
    agent: Agent,
    n: int,
    *,
    seed: int = 0,
    limits: Limits | None = None,
    concurrency: int = 64,
    on_finish: Callable[[Trajectory], None] = lambda _: None,
) -> Evaluation:
    """Run tasks 0 to n - 1 of an env, one episode each.

    `env` is an id, or a function that makes envs (`env_factory(env_id, agent, env_args)` for one with arguments).
    Two agents evaluated with the same `seed` see the same tasks and the same random numbers. Raises ConfigError for
    an unknown env or more tasks than it has, RunError when no episode could be scored.
    """
    make = env_factory(env, agent)
    check_task_count(make, n)
    specs = plan_episodes(range(n), 1, run_id="eval", seed=seed)
    began = perf_counter()
    trajectories = run_episodes(
        make, agent, specs, limits=limits or Limits(), concurrency=concurrency, on_finish=on_finish
    )
    return Evaluation.of(trajectories, perf_counter() - began)


def wilson_interval(successes: int, n: int, z: float = _Z95) -> tuple[float, float]:
    """Return the score interval of a binomial proportion (Wilson, JASA 1927); (0, 1) when nothing was tried.

    With p = successes / n: (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n). Unlike the normal
    interval it stays within [0, 1] and has a width at p = 0 and p = 1.
    """
    if n == 0:
        return 0.0, 1.0
    p, square = successes / n, z * z
    centre = p + square / (2 * n)
    half = z * sqrt(p * (1 - p) / n + square / (4 * n * n))
    scale = 1 + square / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def check_task_count(make: Callable[[], ChatEnv], n: int) -> None:
    """Raise ConfigError when the env has fewer than `n` tasks (or cannot be made at all)."""
    env = make()
    count = len(env.tasks)
    env.close()
    if n > count:
        raise ConfigError(f"{n} tasks are wanted, the env has {count}: ask for fewer")


def write_evaluations(path: Path, asked: Mapping[str, Any], found: Mapping[str, Mapping[str, Evaluation]]) -> None:
    """Write what was asked for and, by model and mode, what was found, as JSON. Raises ConfigError."""
    numbers = {model: {mode: e.to_dict() for mode, e in modes.items()} for model, modes in found.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**asked, "models": numbers}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror or error}") from error
