"""The rollout driver: many episodes at once, tools beside generation, deadlines that nest.

An episode that fails for reasons that are not the agent's (a crash of env or backend) is data, not a crash of the
rollout: its trajectory carries the error and no reward, and every trainer leaves it out.
"""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from ..envs.action import Action
from ..envs.chat_env import ChatEnv
from ..envs.registration import make_env
from ..tools.errors import ConfigError, RunError
from .agent import Agent
from .backend import derive_seed
from .trajectory import ToolUse, Trajectory, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds (None: none). Tool limits are the tools' own; each of these holds the one before it.

    An env that is at work when the deadline passes gets `grace_seconds` more, so that its tools end by their own limits
    and the episode by `deadline`; one that does not return even then has failed.
    """

    turn_seconds: float | None = 600.0
    episode_seconds: float | None = 1800.0
    rollout_seconds: float | None = None
    grace_seconds: float = 15.0
    stall_seconds: float = 60.0  # after so long without a finished episode, say what is pending


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Which episode to run: task, sample of its group, and the ids under which it is kept."""

    task_index: int
    sample: int
    group_id: str
    trajectory_id: str
    seed: int


def plan_episodes(
    task_indices: Sequence[int], num_generations: int, *, run_id: str, seed: int, version: int = 0, first: int = 0
) -> list[EpisodeSpec]:
    """Return `num_generations` episodes of each task: a group by run, version and task, numbered from `first` on."""
    specs = []
    for repeat, index in enumerate(task_indices, first):
        group = f"{run_id}/v{version}/t{index}/r{repeat}"
        group_seed = derive_seed(seed, version, repeat)
        specs += [EpisodeSpec(index, k, group, f"{group}/s{k}", group_seed) for k in range(num_generations)]
    return specs


def rollout(
    env: str | Callable[[], ChatEnv],
    agent: Agent,
    n: int,
    *,
    num_generations: int = 1,
    seed: int = 0,
    env_args: dict[str, Any] | None = None,
    limits: Limits = Limits(),
) -> list[Trajectory]:
    """Run tasks 0 to n - 1 of an env, `num_generations` episodes each, and return the trajectories in that order.

    `env` is an id or a function that makes a fresh env. Raises ConfigError for an unknown id or argument.
    """
    specs = plan_episodes(range(n), num_generations, run_id=f"rollout-{seed}", seed=seed)
    return run_episodes(env_factory(env, agent, env_args), agent, specs, limits=limits)


def env_factory(
    env: str | Callable[[], ChatEnv],
    agent: Agent,
    env_args: dict[str, Any] | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> Callable[[], ChatEnv]:
    """Return a function that makes envs which talk the agent's chat format and pay by these weights over their own."""
    kwargs = dict(env_args or {})
    if agent.renderer is not None:
        kwargs.setdefault("chat_format", agent.renderer.chat_format)

    def make() -> ChatEnv:
        made = env() if callable(env) else make_env(env, **kwargs)
        made.weigh(reward_weights or {})
        return made

    return make


def run_episodes(
    make: Callable[[], ChatEnv],
    agent: Agent,
    specs: Sequence[EpisodeSpec],
    *,
    limits: Limits = Limits(),
    concurrency: int = 64,
    on_finish: Callable[[Trajectory], None] = lambda _: None,
    on_stall: Callable[[list[str]], None] = lambda _: None,
) -> list[Trajectory]:
    """Run the episodes of `specs`, at most `concurrency` at once; return their trajectories in the order of `specs`.

    `on_finish` is called with each trajectory as it ends, `on_stall` with the ids of what is pending. What `make` or
    these two raise ends the rollout; what an episode raises is written into its trajectory.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, got {concurrency}")
    driver = _Driver(make, agent, limits, on_finish, on_stall)
    return asyncio.run(driver.run(specs, concurrency))


class _Interrupted(Exception):  # noqa: N818 - no error: it carries an interrupt through the tasks
    """Whatever ends the process, raised inside an episode. A task that raised it itself would take the loop down with
    the other episodes still open.
    """

    def __init__(self, interrupt: BaseException) -> None:
        self.interrupt = interrupt


class _Driver:
    """One rollout: a pool of envs, the pending episodes, the clock."""

    def __init__(
        self,
        make: Callable[[], ChatEnv],
        agent: Agent,
        limits: Limits,
        on_finish: Callable[[Trajectory], None],
        on_stall: Callable[[list[str]], None],
    ) -> None:
        self.make, self.agent, self.limits = make, agent, limits
        self.on_finish, self.on_stall = on_finish, on_stall
        self.idle: list[ChatEnv] = []
        self.open: list[ChatEnv] = []
        self.pending: dict[str, float] = {}
        self.progressed = perf_counter()
        self.began = perf_counter()

    async def run(self, specs: Sequence[EpisodeSpec], concurrency: int) -> list[Trajectory]:
        """Run all; every env is closed on success, error and cancel."""
        places = asyncio.Semaphore(concurrency)
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._guarded(spec, places)) for spec in specs]
            return [task.result() for task in tasks]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first.interrupt if isinstance(first, _Interrupted) else first from None
        finally:
            watch.cancel()
            while self.open:
                self._close(self.open[-1])

    async def _guarded(self, spec: EpisodeSpec, places: asyncio.Semaphore) -> Trajectory:
        async with places:
            await asyncio.sleep(0)  # episodes that never wait leave the loop room for an interrupt
            env = self._take_env()
            trajectory = self._begin(spec, env)
            self.pending[spec.trajectory_id] = perf_counter()
            try:
                await self._episode(env, trajectory)
                trajectory.check_writable()
                self.idle.append(env)
            except Exception as error:  # noqa: BLE001 - the rollout boundary: a failed episode is data
                trajectory = self._failed(trajectory, self._begin(spec, env), error)
                self._close(env)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                raise _Interrupted(interrupt) from None
            finally:
                self.agent.close(trajectory)
                del self.pending[spec.trajectory_id]
            self.progressed = perf_counter()
            self.on_finish(trajectory)
            return trajectory

    def _begin(self, spec: EpisodeSpec, env: ChatEnv) -> Trajectory:
        return Trajectory(
            trajectory_id=spec.trajectory_id,
            group_id=spec.group_id,
            task_id="",
            env_id=env.spec.id if env.spec else type(env).__name__,
            task_index=spec.task_index,
            sample=spec.sample,
            seed=spec.seed,
            agent=self.agent.name,
            sampling=self.agent.sampling,
            tokenizer=self.agent.renderer.fingerprint if self.agent.renderer is not None else None,
        )

    def _failed(self, trajectory: Trajectory, blank: Trajectory, error: Exception) -> Trajectory:
        """Return the trajectory with its error; a blank one when what it holds has no JSON form."""
        text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()
        trajectory.error = blank.error = text
        try:
            trajectory.to_json()
        except ValueError:
            return blank
        return trajectory

    def _close(self, env: ChatEnv) -> None:
        """Close an env; one that cannot even be closed is left alone, since its episode has been told of already."""
        self.open.remove(env)
        with suppress(Exception):
            env.close()

    def _take_env(self) -> ChatEnv:
        if self.idle:
            return self.idle.pop()
        env = self.make()
        self.open.append(env)
        return env

    async def _episode(self, env: ChatEnv, trajectory: Trajectory) -> None:
        """Reset, then act and step until the env says it is over."""
        deadline = self._deadline()
        reset = partial(env.reset, options={"task_index": trajectory.task_index})
        messages, info = await self._call(env, deadline, reset)
        assert env.task is not None
        assert env.episode is not None
        trajectory.task_id, trajectory.gt, trajectory.prompt_messages = env.task.task_id, env.task.gt, len(messages)
        trajectory.metadata = dict(env.task.metadata)
        trajectory.tools = json.dumps(info["tools"], ensure_ascii=False)
        try:
            await self._turns(env, trajectory, self.agent.open(trajectory, messages, info["tools"]), deadline)
        finally:
            trajectory.messages = list(env.episode.messages)

    async def _turns(self, env: ChatEnv, trajectory: Trajectory, fits: bool, deadline: float | None) -> None:
        while True:
            action = await self._act(env, trajectory, deadline) if fits else Action("", "context")
            began = perf_counter()
            messages, reward, terminated, truncated, info = await self._call(env, deadline, partial(env.step, action))
            self._record(trajectory, action, reward, info, perf_counter() - began)
            if terminated or truncated:
                break
            fits = self.agent.observe(trajectory, env, messages)
        trajectory.terminated, trajectory.truncated = terminated, truncated
        trajectory.success, trajectory.stop_reason = info["success"], info["stop_reason"]

    def _deadline(self) -> float | None:
        """Return when the episode must be over, on the event loop's clock."""
        now = asyncio.get_running_loop().time()
        rest = self.limits.rollout_seconds
        ends = [
            now + self.limits.episode_seconds if self.limits.episode_seconds is not None else None,
            now + rest - (perf_counter() - self.began) if rest is not None else None,
        ]
        return min((end for end in ends if end is not None), default=None)

    async def _act(self, env: ChatEnv, trajectory: Trajectory, deadline: float | None) -> Action:
        """Let the agent act; past the deadline of turn, episode or rollout the action is the empty one."""
        now, turn = asyncio.get_running_loop().time(), self.limits.turn_seconds
        ends = [now + turn if turn is not None else None, deadline]
        end = min((end for end in ends if end is not None), default=None)
        if end is not None and now >= end:  # an agent that never waits would not notice
            return Action("", "deadline")
        try:
            async with asyncio.timeout_at(end) as limit:
                return await self.agent.act(trajectory, env)
        except TimeoutError:
            if not limit.expired():  # the backend's own: a failure, not the agent's slowness
                raise
            return Action("", "deadline")

    async def _call(self, env: ChatEnv, deadline: float | None, function: Callable[[], T]) -> T:
        """Call the env: at once when its tools are in memory, else in a thread, so that sampling goes on beside it.

        Raises RunError when it does not return in time; nobody can step it any more then.
        """
        if env.toolbox.in_memory:
            return function()
        grace, now = self.limits.grace_seconds, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(None if deadline is None else max(now, deadline) + grace) as limit:
                return await _in_thread(function)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RunError(
                f"the env did not return within {grace:g} seconds of the deadline of its episode: its tools need a "
                "time_limit shorter than that"
            ) from error

    def _record(
        self, trajectory: Trajectory, action: Action, reward: float, info: dict[str, Any], seconds: float
    ) -> None:
        """Write what the env made of the action onto the last turn."""
        if not trajectory.turns:  # not even one turn could be sampled
            trajectory.turns.append(
                Turn(
                    start=len(trajectory.tokens),
                    end=len(trajectory.tokens),
                    text="",
                    finish_reason=action.finish_reason,
                )
            )
        turn = trajectory.turns[-1]
        turn.reward += reward
        turn.step_seconds += seconds
        turn.tools += [ToolUse(name=r.name, outcome=r.outcome, seconds=r.seconds) for r in info["tool_results"]]
        for name, value in info["rewards"].items():
            before = trajectory.rewards.get(name, 0.0)
            trajectory.rewards[name] = None if value is None or before is None else before + value

    async def _watch(self) -> None:
        """Say what is pending whenever nothing has finished for a while."""
        while True:
            await asyncio.sleep(self.limits.stall_seconds)
            now = perf_counter()
            if self.pending and now - self.progressed > self.limits.stall_seconds:
                self.on_stall([f"{name} ({now - began:.0f} s)" for name, began in self.pending.items()])


async def _in_thread(function: Callable[[], T]) -> T:
    """Call `function` in a daemon thread of its own: one that hangs keeps neither the loop nor the process."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again where the rollout awaits it
            errors.append(error)
        with suppress(RuntimeError):  # the rollout is over, its loop closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, daemon=True, name="gymtune-env").start()
    await ended.wait()
    if errors:
        raise errors[0]
    return results[0]
