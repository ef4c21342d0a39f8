"""Arguments of envs: which ones a class takes, and how they are written on a command line."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Sequence
from typing import Any

from ..tools.errors import ConfigError
from .chat_env import ChatEnv
from .registration import make_env

_PLUMBING = {"self", "options", "kwargs", "chat_format", "render_mode"}


def env_arguments(kind: type[ChatEnv]) -> dict[str, inspect.Parameter]:
    """Return the arguments an env class and its ancestors below `ChatEnv` name, and `system_prompt`.

    What only `ChatEnv` names is left out: an env may have fixed it (`max_turns=1`).
    """
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if issubclass(base, ChatEnv) and base is not ChatEnv:
            own = inspect.signature(base).parameters
            found |= {name: p for name, p in own.items() if name not in found and name not in _PLUMBING}
    found.setdefault("system_prompt", inspect.Parameter("system_prompt", inspect.Parameter.KEYWORD_ONLY, default=None))
    return found


def takes_argument(env_id: str, name: str) -> bool:
    """Tell whether the env of `env_id` takes the argument. Raises ConfigError for an unknown id."""
    env = make_env(env_id)
    env.close()
    return name in env_arguments(type(env))


def parse_env_args(items: Sequence[str]) -> dict[str, Any]:
    """Return `key=value` items as keyword arguments; a value is TOML, else plain text; `rewards.gt=1` reaches into a
    dict.

    Raises ConfigError for an item without `=` and for a key that is given twice.
    """
    lines = []
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise ConfigError(f"--env-arg wants key=value, came {item!r}")
        lines.append(f"{key} = {text}" if _is_json(key, text) else f"{key} = {json.dumps(text)}")
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--env-arg {' '.join(items)}: {error}") from error


def _is_json(key: str, text: str) -> bool:
    """Tell whether the text is one TOML value that JSON can hold (a date is text)."""
    try:
        json.dumps(tomllib.loads(f"{key} = {text}"))
    except (tomllib.TOMLDecodeError, TypeError):
        return False
    return "\n" not in text
