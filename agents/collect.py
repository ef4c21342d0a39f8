"""Collecting trajectories into a file that survives anything: `FILE.jsonl`, and `FILE.config.json` beside it.

The file itself says what is finished, the config what was asked for and under which run id; a resumed collection
needs nothing else. Episodes are appended as they end, so a killed process loses those that were under way and no other;
where a scorer has a say, a group is scored and appended when the last of its missing episodes has ended.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from .. import __version__
from ..envs.chat_env import ChatEnv
from ..envs.registration import make_env
from ..tools.errors import ConfigError, RunError
from .agent import Agent
from .evaluate import check_task_count
from .rollout import EpisodeSpec, Limits, env_factory, plan_episodes, run_episodes
from .scorer import split_rewards
from .store import TrajectoryWriter, describe, read_trajectories
from .trajectory import Sampling, Trajectory


class CollectConfig(BaseModel):
    """What is collected: tasks 0 to n - 1 of an env, `num_generations` episodes each, by which agent.

    Everything that decides what the trajectories are stands here; deadlines and concurrency do not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str
    env_args: dict[str, JsonValue] = Field(default_factory=dict)
    agent: str = "model"
    model: str | None = None
    n: int = Field(ge=1)
    num_generations: int = Field(1, ge=1)
    seed: int = 0
    sampling: Sampling | None = None
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    reward_weights: dict[str, float] = Field(default_factory=dict)
    reward_model: str | None = None


class _Record(BaseModel):
    """What stands in `FILE.config.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    gymtune: str
    config: CollectConfig


@dataclass(slots=True)
class CollectResult:
    """What the file holds so far: a running tally. `sampled_tokens` and `seconds` are of this process alone.

    `cause` is the last line of what the first failed episode raised, `fault` what went wrong in the scorer last.
    """

    path: Path
    episodes: int = 0
    successes: int = 0
    failed: int = 0
    cause: str = ""
    fault: str | None = None
    sampled_tokens: int = 0
    seconds: float = 0.0
    _reward: float = 0.0
    _scored: int = 0

    def add(self, trajectory: Trajectory) -> None:
        """Count an episode."""
        self.episodes += 1
        self.successes += trajectory.success is True
        if trajectory.error is not None:
            self.failed += 1
            self.cause = self.cause or trajectory.error.strip().rpartition("\n")[2]
        if trajectory.reward is not None:
            self._reward += trajectory.reward
            self._scored += 1

    @property
    def mean_reward(self) -> float | None:
        """Mean over the episodes that have a reward; None when none has."""
        return self._reward / self._scored if self._scored else None

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of this process by its seconds."""
        return self.sampled_tokens / self.seconds if self.seconds else 0.0


class Collection:
    """A trajectory file, what was asked for, and which episodes it still lacks (`missing`). Made by `open`.

    `weights` are those of the env's components, `scorer` adds what the env cannot score.
    """

    def __init__(self, path: Path, config: CollectConfig, run_id: str) -> None:
        self.path, self.config, self.run_id = path, config, run_id
        self.weights, self.scorer = split_rewards(config.reward_weights, config.reward_model)
        self.result = CollectResult(path)
        finished = set()
        if path.exists():
            TrajectoryWriter(path).close()  # cuts what a killed writer left half-written
            for trajectory in read_trajectories(path):
                finished.add(trajectory.trajectory_id)
                self.result.add(trajectory)
        specs = plan_episodes(range(config.n), config.num_generations, run_id=run_id, seed=config.seed)
        self.missing: list[EpisodeSpec] = [spec for spec in specs if spec.trajectory_id not in finished]

    @classmethod
    def open(cls, path: str | Path, config: CollectConfig, *, resume: bool = False) -> Collection:
        """Begin a file, or go on with one (with `resume`; one that was never begun is begun). Writes nothing yet.

        Raises ConfigError for an env or argument that is not there, and when the file is there but `resume` is not
        asked for, was collected with another config, or has none beside it.
        """
        path = Path(path)
        beside = config_path(path)
        if path.exists() and not resume:
            raise ConfigError(f"{path} is there already: go on with --resume, or give another --out")
        if path.exists() and not beside.exists():
            raise ConfigError(
                f"{path} has no {beside.name} beside it, so nobody knows how to go on: give another --out"
            )
        run_id = _same_run(beside, config) if resume and beside.exists() else uuid4().hex
        collection = cls(path, config, run_id)
        check_task_count(collection.make_env, config.n)
        return collection

    def make_env(self) -> ChatEnv:
        """Make the env as it was asked for. Raises ConfigError for an unknown id, argument or reward."""
        env = make_env(self.config.env, **self.config.env_args)
        env.weigh(self.weights)
        return env

    def run(
        self,
        agent: Agent,
        *,
        limits: Limits | None = None,
        concurrency: int = 64,
        on_finish: Callable[[Trajectory], None] = lambda _: None,
        on_stall: Callable[[list[str]], None] = lambda _: None,
    ) -> CollectResult:
        """Run the missing episodes, appending each as it ends (before `on_finish` hears of it).

        Raises ConfigError when the folder cannot be written, RunError when every episode of the file failed.
        """
        _write(config_path(self.path), _Record(run_id=self.run_id, gymtune=__version__, config=self.config))
        make = env_factory(self.config.env, agent, dict(self.config.env_args), self.weights)
        result, scorer, began = self.result, self.scorer, perf_counter()
        missing = Counter(spec.group_id for spec in self.missing)
        waiting: dict[str, list[Trajectory]] = {}
        with TrajectoryWriter(self.path) as writer:

            def finish(trajectory: Trajectory) -> None:
                group = waiting.setdefault(trajectory.group_id, []) if scorer else []
                group.append(trajectory)
                if scorer:
                    if len(group) < missing[trajectory.group_id]:
                        return
                    scorer.score(waiting.pop(trajectory.group_id))
                for ended in group:
                    writer.append(ended)
                    result.add(ended)
                    result.sampled_tokens += ended.sampled_tokens
                    result.seconds = perf_counter() - began
                    on_finish(ended)

            run_episodes(
                make,
                agent,
                self.missing,
                limits=limits or Limits(),
                concurrency=concurrency,
                on_finish=finish,
                on_stall=on_stall,
            )
        if self.missing and result.failed == result.episodes:
            raise RunError(f"{self.path}: all {result.failed} episodes failed, the first one with: {result.cause}")
        result.fault = scorer.fault
        return result


def collect(
    path: str | Path, agent: Agent, config: CollectConfig, *, resume: bool = False, **run: Any
) -> CollectResult:
    """Open a file and run what it lacks; `run` are the keyword arguments of `Collection.run`."""
    return Collection.open(path, config, resume=resume).run(agent, **run)


def config_path(path: Path) -> Path:
    """Return where the config of a trajectory file stands: `FILE.config.json` beside `FILE.jsonl`."""
    return path.with_name(f"{path.stem if path.suffix == '.jsonl' else path.name}.config.json")


def _write(target: Path, record: _Record) -> None:
    """Write the record aside, bring it to the disk and rename it."""
    aside = target.with_name(target.name + ".tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("w", encoding="utf-8") as file:
            file.write(record.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except OSError as error:
        raise ConfigError(f"{target}: cannot write: {error.strerror or error}; give another --out") from error


def _same_run(beside: Path, wanted: CollectConfig) -> str:
    """Return the run id of a config file. Raises ConfigError when it asks for something else than `wanted`."""
    try:
        record = _Record.model_validate_json(beside.read_bytes())
    except OSError as error:
        raise ConfigError(f"{beside}: cannot read: {error.strerror or error}") from error
    except ValidationError as error:
        raise ConfigError(f"{beside} is not the config of a collection: {describe(error)}") from error
    stored, now = record.config.model_dump(mode="json"), wanted.model_dump(mode="json")
    for key in stored:
        if stored[key] != now[key]:
            raise ConfigError(
                f"--resume: {beside} has {key} = {json.dumps(stored[key])}, now {json.dumps(now[key])} was asked for; "
                "give the same options, or another --out"
            )
    return record.run_id
