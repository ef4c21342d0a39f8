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
}


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


def _check_arguments(env_id: str, spec: Any, kwargs: dict[str, Any]) -> None:
    """Refuse an argument that no class in the env's line of ancestors names."""
    entry = spec.entry_point
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
    if not inspect.isclass(entry) or not issubclass(entry, ChatEnv):
        return
    known = {"system_prompt", "render_mode"}
    for base in entry.__mro__:
        if issubclass(base, ChatEnv):
            known |= set(inspect.signature(base.__init__).parameters)
    known -= {"self", "options", "tasks", "components", "toolbox", "kwargs"}
    for key in kwargs:
        if key not in known:
            raise ConfigError(f"env {env_id!r} takes no argument {key!r}.{closest(key, known)}")
