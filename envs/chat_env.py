"""ChatEnv: a chat task as a `gymnasium.Env`. Subclass it, or hand it tasks, tools and reward components.

How an action ends decides what happens; nothing else does:

=================================  ==========  ===================  ==========  =========
the action ends by                 calls run?  `gt` scored?         flags       bootstrap
=================================  ==========  ===================  ==========  =========
`stop`, with calls, turns left     yes         no                   neither     -
`stop`, with calls, at max_turns   yes         no                   truncated   yes
`stop`, no calls, a user replies   -           no                   neither     -
`stop`, no calls                   -           yes                  terminated  no
`length`                           no          yes, what is there   truncated   yes
`context`, `deadline`              no          yes, the last text   truncated   yes
=================================  ==========  ===================  ==========  =========
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, SupportsIndex

import gymnasium

from ..rewards.components import Component
from ..rewards.episode import Episode
from ..rewards.registry import component_names, get_component, get_preset
from ..tools.chat_format import ChatFormat, get_chat_format
from ..tools.errors import ConfigError, EnvError, closest
from ..tools.messages import Message, system, user
from ..tools.toolbox import Toolbox
from .action import Action
from .spaces import MessagesSpace, TextSpace
from .tasks import Task, TaskSet

Observation = tuple[Message, ...]


class ChatEnv(gymnasium.Env[Observation, str]):
    """One episode: a task's messages, then assistant texts answered by tool results until the end.

    Args:
        tasks: what episodes start from.
        components: the reward components the env can score; the first one is paid with weight 1, the others are seen.
        rewards: the weights that count instead: of these components, of a shaping component by its name
            (`gymtune.rewards.component_names()`), or the name of a preset, which brings components and weights.
        toolbox: the tools; override `make_toolbox` for tools with a state of their own per episode.
        max_turns: actions an episode may take.
        chat_format: how the model family writes tool calls (`hermes` by default); the driver hands it in.
        system_prompt: replaces the system message of the tasks when given.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as gymnasium declares it
    #: An env whose shaping may pay a little for an episode without success says so here; presets set it.
    pays_without_success: bool = False

    def __init__(
        self,
        tasks: TaskSet,
        components: Sequence[Component],
        *,
        toolbox: Toolbox | None = None,
        rewards: Mapping[str, float] | str | None = None,
        max_turns: int = 8,
        chat_format: str | ChatFormat = "hermes",
        **options: Any,
    ) -> None:
        if len(tasks) == 0:
            raise EnvError(f"{type(self).__name__}: a task set must hold at least one task, got none")
        if max_turns < 1:
            raise ConfigError(f"{type(self).__name__}: max_turns must be at least 1, got {max_turns}")
        self.system_prompt: str | None = options.pop("system_prompt", None)
        self.render_mode: str | None = options.pop("render_mode", None)
        if options:
            key = next(iter(options))
            raise ConfigError(
                f"{type(self).__name__} takes no argument {key!r}.{closest(key, ['system_prompt', 'render_mode'])}"
            )
        if self.render_mode not in (None, "ansi"):
            raise ConfigError(f"{type(self).__name__}: render_mode must be 'ansi' or None, got {self.render_mode!r}")
        self.tasks, self.toolbox, self.max_turns = tasks, toolbox or Toolbox([]), max_turns
        self.components = {component.name: component for component in components}
        if len(self.components) < len(components):
            raise ConfigError(f"{type(self).__name__}: two components have one name: {[c.name for c in components]}")
        self.weights: dict[str, float] = {} if rewards is not None else {c.name: 1.0 for c in components[:1]}
        self.weigh(rewards or {})
        self.chat_format = get_chat_format(chat_format) if isinstance(chat_format, str) else chat_format
        self.observation_space = MessagesSpace()
        self.action_space = TextSpace()
        self.task: Task | None = None
        self.episode: Episode | None = None

    def weigh(self, rewards: Mapping[str, float] | str) -> None:
        """Lay weights over those the env has, taking in the components they name; or those of a preset.

        A preset compares with the env's own checker, where there is one. `module:name` is a component of yours. Raises
        ConfigError for a name that is neither the env's own nor a shaping component, and for an unknown preset.
        """
        if isinstance(rewards, str):
            gt = self.components.get("gt")
            preset = get_preset(rewards, gt.checker if gt is not None else None)
            self.components |= {name: component for name, (component, _) in preset.components.items()}
            self.weights = preset.weights
            self.pays_without_success = True
            return
        for name, weight in rewards.items():
            if name not in self.components:
                if ":" not in name and name not in component_names():
                    known = {*self.components, *component_names()}
                    raise ConfigError(f"rewards: no component {name!r} in this env.{closest(name, known)}")
                component = get_component(name)
                self.components[component.name] = component
                self.pays_without_success = True
            self.weights[name.rpartition(":")[2] if ":" in name else name] = float(weight)

    def make_toolbox(self, task: Task) -> Toolbox:
        """Return the tools of an episode of `task`; override where tools keep a state."""
        return self.toolbox

    def state(self) -> Any:
        """Return what the tools' world looks like now, in JSON's terms, for checkers of it; None where it has none."""
        return None

    def user_reply(self, episode: Episode) -> str | None:
        """Return what a simulated user says to a turn without calls; None when it has nothing more to say."""
        return None

    def draw_task(self, rng: Random, progress: float) -> int:
        """Return the index of a task to train on at `progress` (0 to 1) of a run; override for a curriculum."""
        return rng.randrange(len(self.tasks))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode of `options["task_index"]`, or of a task drawn by the env's own rng.

        Returns the task's messages and `info` with `task_id` and `tools` (OpenAI schemas). Raises ConfigError for
        another option, and for an index that no task has.
        """
        super().reset(seed=seed)
        task = self.task = self.tasks[self._task_index(options or {})]
        self.toolbox = self.make_toolbox(task)
        messages = [message.copy() for message in task.messages]
        if self.system_prompt is not None:
            messages = [system(self.system_prompt), *(m for m in messages if m["role"] != "system")]
        self.episode = Episode(
            task.gt, list(messages), task.metadata, self.toolbox, state=self.state, opening=len(messages)
        )
        return tuple(messages), {"task_id": task.task_id, "tools": self.toolbox.schemas()}

    def _task_index(self, options: Mapping[str, Any]) -> int:
        for name in sorted(set(options) - {"task_index"}):
            raise ConfigError(f"reset: unknown option {name!r}.{closest(name, ['task_index'])}")
        index = options.get("task_index")
        if index is None:
            return int(self.np_random.integers(len(self.tasks)))
        if not isinstance(index, SupportsIndex) or not 0 <= operator.index(index) < len(self.tasks):
            raise ConfigError(f"reset: task_index must be a whole number below {len(self.tasks)}, got {index!r}")
        return operator.index(index)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take one assistant text; return the env's answer, this turn's reward, the two flags and `info`.

        `info`: `rewards` (value of each component that fired, unweighted, None when broken), `tool_results`,
        `success` (None until scored, or when the checker broke) and `stop_reason` (None while the episode runs).
        Raises EnvError when the episode is over, when `action` is no text, and when a component's value is not finite.
        """
        episode = self.episode
        if episode is None or episode.over:
            raise EnvError("step was called on an episode that is over (or never began); call reset() first")
        if action not in self.action_space:
            raise EnvError(f"an action must be a str, got {type(action).__name__}")
        action = Action.of(action)
        episode.results = []
        replies: list[Message] = []
        if action.finish_reason in ("context", "deadline"):
            episode.truncated = episode.scored = True  # nothing new was said: the last text stands
            episode.stop_reason = action.finish_reason
        else:
            replies = self._take_turn(episode, action)
        reward, values = self._reward(episode)
        info = {
            "rewards": values,
            "tool_results": list(episode.results),
            "success": episode.success,
            "stop_reason": episode.stop_reason,
        }
        return tuple(replies), reward, episode.terminated, episode.truncated, info

    def _take_turn(self, episode: Episode, action: Action) -> list[Message]:
        """Parse the action, run its calls, set the flags; return the tool messages."""
        schemas = self.toolbox.schemas()
        turn = self.chat_format.parse(action, thinking_open=action.thinking_open, turn=episode.turn, tools=schemas)
        episode.messages.append(turn.message())
        episode.turn += 1
        episode.answer = turn.content
        episode.texts.append(str(action))
        episode.turns.append(turn)
        if action.finish_reason == "length":
            episode.truncated = episode.scored = True
            episode.stop_reason = "length"
            return []
        if turn.calls:
            episode.results = self.toolbox.call_all(turn.calls)
            episode.all_results.extend(episode.results)
            replies = [result.message() for result in episode.results]
        else:
            reply = self.user_reply(episode)
            if reply is None:
                episode.terminated = episode.scored = True
                episode.stop_reason = "stop"
                return []
            replies = [user(reply)]
        episode.messages.extend(replies)
        if episode.turn >= self.max_turns:
            episode.truncated = True
            episode.stop_reason = "max_turns"
        return replies

    def _reward(self, episode: Episode) -> tuple[float, dict[str, float | None]]:
        """Return the weighted sum of what fired this turn, and the values themselves."""
        before, values = episode.earned, {}
        fired = [component for component in self.components.values() if component.fires(episode)]
        for component in sorted(fired, key=lambda component: component.when == "total"):
            value = values[component.name] = component.value(episode)
            if value is not None and not math.isfinite(value):
                raise EnvError(f"component {component.name!r} must be a finite number or None, got {value}")
            episode.earned += self.weights.get(component.name, 0.0) * (value or 0.0)
        return episode.earned - before, values

    def render(self) -> str | None:
        """Return the conversation so far as text (`render_mode="ansi"`)."""
        if self.render_mode is None or self.episode is None:
            return None
        lines = (f"[{m['role']}] {m['content']} {m.get('tool_calls', '')}" for m in self.episode.messages)
        return "\n".join(line.rstrip() for line in lines)
