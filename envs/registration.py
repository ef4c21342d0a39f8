"""Registration with gymnasium, by string entry points: listing the ids builds nothing and imports no torch."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import gymnasium

from ..tools.errors import ConfigError, closest
from .chat_env import ChatEnv

_ENTRY_POINTS = {
    "gymtune/Arithmetic-v0": "gymtune.envs.arithmetic:ArithmeticEnv",
    "gymtune/Calculator-v0": "gymtune.envs.calculator:CalculatorEnv",
    "gymtune/Dialog-v0": "gymtune.envs.dialog:DialogEnv",
    "gymtune/Math-v0": "gymtune.envs.math_env:MathEnv",
    "gymtune/Preference-v0": "gymtune.envs.preference:PreferenceEnv",
    "gymtune/ToolUse-v0": "gymtune.envs.tool_use:ToolUseEnv",
}


_PLUMBING = {"self", "options", "kwargs", "chat_format", "render_mode"}
_OF_CHAT_ENV = {"rewards", "max_turns", "chat_format", "render_mode"}  # every env takes them, unless it sets them


def register_all() -> None:
    """Register what is not registered yet."""
    for env_id, entry_point in _ENTRY_POINTS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=entry_point)


def env_ids() -> list[str]:
    """Return the ids below `gymtune/`, sorted."""
    return sorted(env_id for env_id in gymnasium.registry if env_id.startswith("gymtune/"))


def make_env(env_id: str, **kwargs: Any) -> ChatEnv:
    """Make the bare env of `env_id`: one of ours, or `your_module:Your/Id-v0` for one that your module registers.

    Raises ConfigError for an unknown id, a module that cannot be imported, an argument the env does not take, and an
    env that is no `ChatEnv`.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"env {env_id!r}: cannot import {module!r}: {error}") from error
    if name not in gymnasium.registry:
        raise ConfigError(f"unknown env {env_id!r}.{closest(name, env_ids())}")
    spec = gymnasium.spec(name)
    _check_arguments(name, spec, kwargs)
    try:
        env = gymnasium.make(name, disable_env_checker=True, **kwargs).unwrapped
    except TypeError as error:  # an argument of the wrong type, or one that the env sets itself
        raise ConfigError(f"env {env_id!r} cannot be made with {kwargs}: {error}") from error
    if not isinstance(env, ChatEnv):
        raise ConfigError(f"env {env_id!r} must be a gymtune.envs.ChatEnv, got {type(env).__name__}")
    return env


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


def _check_arguments(env_id: str, spec: Any, kwargs: dict[str, Any]) -> None:
    """Refuse an argument that no class in the env's line of ancestors names."""
    entry = spec.entry_point
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
    if not inspect.isclass(entry) or not issubclass(entry, ChatEnv):
        return
    known = env_arguments(entry).keys() | _OF_CHAT_ENV
    for key in kwargs:
        if key not in known:
            raise ConfigError(f"env {env_id!r} takes no argument {key!r}.{closest(key, known)}")
