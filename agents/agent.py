"""Agents: what acts in an env. A model through a backend, a script that knows the gold, or any function.

Agents keep no state of their own between turns; what happened stands in the trajectory, so one agent serves any
number of episodes at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter
from typing import Any

from ..envs.action import Action
from ..envs.chat_env import ChatEnv
from ..envs.tasks import gold_texts
from ..tools.errors import EnvError
from ..tools.messages import Message
from .backend import Backend, GenerateRequest, derive_seed
from .renderer import Renderer
from .trajectory import Sampling, Trajectory

TEMPLATE_KWARGS = "chat_template_kwargs"
"""Key of a trajectory's metadata: the arguments that the chat template got in this episode."""


class Agent(ABC):
    """Acts in an env and writes what it said into the trajectory.

    Without a renderer the trajectory holds messages only; a trainer renders it when it loads it with a model.
    `thinking_ratio` is the share of episodes whose template opens a thinking span; None leaves it to the template.
    """

    name: str = "agent"
    renderer: Renderer | None = None
    sampling: Sampling | None = None
    max_model_length: int | None = None
    thinking_ratio: float | None = None

    def open(self, trajectory: Trajectory, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> bool:
        """Take the first messages and the tools. Returns whether a turn still fits."""
        if self.renderer is not None:
            renderer = self.renderer_of(trajectory)
            trajectory.metadata.pop(TEMPLATE_KWARGS, None)  # what a task calls so never reached the template
            if renderer.template_options:
                trajectory.metadata[TEMPLATE_KWARGS] = dict(renderer.template_options)
            trajectory.start_segment()
            trajectory.append_context(renderer.prompt(messages, tools))
        return self._fits(trajectory)

    def renderer_of(self, trajectory: Trajectory) -> Renderer:
        """Return the renderer of an episode. Whether it thinks is drawn from run, task and sample alone."""
        assert self.renderer is not None
        if self.thinking_ratio is None:
            return self.renderer
        draw = Random(derive_seed(trajectory.seed, trajectory.task_id, trajectory.sample, "thinking")).random()
        return self.renderer.thinking(draw < self.thinking_ratio)

    def observe(self, trajectory: Trajectory, env: ChatEnv, messages: Sequence[Message]) -> bool:
        """Take the env's answer: append its delta, or begin a segment where the template cannot continue a history.

        Returns whether a turn still fits; when it does not, nothing is appended.
        """
        if self.renderer is None:
            return True
        renderer = self.renderer_of(trajectory)
        context, held = renderer.delta(messages, trajectory.tokens[-1]), len(trajectory.current_ids)
        goes_on = context is not None
        if context is None:
            assert env.episode is not None
            context, held = renderer.prompt(env.episode.messages, env.toolbox.schemas()), 0
        if not self._has_room(held + len(context)):
            return False
        if not goes_on:
            trajectory.start_segment()
        trajectory.append_context(context)
        return True

    @abstractmethod
    async def act(self, trajectory: Trajectory, env: ChatEnv) -> Action:
        """Append the next turn to the trajectory and return it as an action."""

    def close(self, trajectory: Trajectory) -> None:  # noqa: B027 - most agents keep nothing
        """Free what was kept for the episode."""

    def _fits(self, trajectory: Trajectory) -> bool:
        return self.renderer is None or self._has_room(len(trajectory.current_ids))

    def _has_room(self, length: int) -> bool:
        return self.max_model_length is None or length < self.max_model_length


class ModelAgent(Agent):
    """A policy: samples each turn from a backend.

    Raises ConfigError for a `thinking_ratio` where the template knows no argument for it.
    """

    name = "model"

    def __init__(
        self,
        backend: Backend,
        renderer: Renderer,
        sampling: Sampling | None = None,
        *,
        thinking_ratio: float | None = None,
    ) -> None:
        if thinking_ratio is not None:
            renderer.thinking(True)  # now, not in the first episode
        self.backend, self.renderer, self.thinking_ratio = backend, renderer, thinking_ratio
        self.sampling = sampling or Sampling()
        self.max_model_length = backend.max_model_length

    async def act(self, trajectory: Trajectory, env: ChatEnv) -> Action:
        """Sample one turn; its seed is a function of run, task, sample and turn alone."""
        assert self.sampling is not None
        renderer = self.renderer_of(trajectory)
        turn = len(trajectory.turns)
        request = GenerateRequest(
            prompt_ids=trajectory.current_ids,
            sampling=self.sampling,
            stop_ids=renderer.stop_ids,
            seed=derive_seed(trajectory.seed, trajectory.task_id, trajectory.sample, turn),
            session=trajectory.trajectory_id,
            decode=renderer.decode,
        )
        began = perf_counter()
        generation = await self.backend.generate(request)
        text = renderer.decode(generation.ids)
        trajectory.append_turn(
            text,
            generation.finish_reason,
            generation.ids,
            generation.logprobs,
            policy_version=generation.policy_version,
            policy_spans=generation.spans,
            seconds=perf_counter() - began,
        )
        return Action(text, generation.finish_reason, renderer.thinking_open)

    def close(self, trajectory: Trajectory) -> None:
        """Let the backend forget the episode."""
        self.backend.release(trajectory.trajectory_id)


class TextAgent(Agent):
    """An agent that writes text instead of sampling tokens: its tokens carry no log-prob (SFT takes them, RL not)."""

    def __init__(self, renderer: Renderer | None = None) -> None:
        self.renderer = renderer

    @abstractmethod
    def write(self, trajectory: Trajectory, env: ChatEnv) -> str:
        """Return the text of the next action."""

    async def act(self, trajectory: Trajectory, env: ChatEnv) -> Action:
        """Write, and append the tokens a policy would have sampled for that text."""
        text = self.write(trajectory, env)
        ids = self.renderer_of(trajectory).assistant_ids(text) if self.renderer is not None else []
        trajectory.append_turn(text, "stop", ids, [None] * len(ids))
        return Action(text)


class ScriptedAgent(TextAgent):
    """Plays what is on file: the recorded episodes of a task, one a sample, or its gold. Raises EnvError without."""

    name = "scripted"

    def write(self, trajectory: Trajectory, env: ChatEnv) -> str:
        """Return the text of this turn."""
        task = env.task
        recorded = (task.recorded or filter(None, [task.gold])) if task is not None else ()
        episodes = list(recorded)
        if task is None or not episodes:
            raise EnvError(f"task {trajectory.task_id} has no gold episode; the scripted agent has nothing to play")
        texts = gold_texts(episodes[trajectory.sample % len(episodes)], env.chat_format)
        turn = len(trajectory.turns)
        if turn >= len(texts):
            raise EnvError(f"task {task.task_id}: its episode on file has {len(texts)} turns, the env asks for more")
        return texts[turn]


class FunctionAgent(TextAgent):
    """Any function from the messages so far to the next text."""

    name = "function"

    def __init__(self, function: Callable[[Sequence[Message]], str], renderer: Renderer | None = None) -> None:
        super().__init__(renderer)
        self.function = function

    def write(self, trajectory: Trajectory, env: ChatEnv) -> str:
        """Call the function."""
        assert env.episode is not None
        return self.function(env.episode.messages)
