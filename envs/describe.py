"""What an env is, for people: its words, its arguments, its tools and one of its tasks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from ..tools.messages import Message
from .registration import env_arguments, make_env
from .tasks import gold_texts


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """An env in words.

    `arguments` maps a name to the text of its default, `components` a reward component to its weight;
    `messages`, `gold` (texts of the gold episode, may be empty) and `gt` are those of the first task.
    """

    env_id: str
    summary: str
    text: str
    arguments: dict[str, str]
    components: dict[str, float]
    tools: list[dict[str, Any]]
    messages: tuple[Message, ...]
    gold: tuple[str, ...]
    gt: Any


def describe_env(env_id: str, **env_args: Any) -> EnvDescription:
    """Return the description of an env. Raises ConfigError for an unknown id or argument."""
    env = make_env(env_id, **env_args)
    messages, info = env.reset(options={"task_index": 0})
    assert env.task is not None
    text = inspect.getdoc(type(env)) or ""
    description = EnvDescription(
        env_id=env_id,
        summary=text.partition("\n")[0],
        text=text,
        arguments={name: _default(parameter) for name, parameter in env_arguments(type(env)).items()},
        components={name: env.weights.get(name, 0.0) for name in env.components},
        tools=info["tools"],
        messages=messages,
        gold=tuple(gold_texts(env.task.gold or (), env.chat_format)),
        gt=env.task.gt,
    )
    env.close()
    return description


def _default(parameter: inspect.Parameter) -> str:
    return "required" if parameter.default is inspect.Parameter.empty else repr(parameter.default)
