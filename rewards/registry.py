"""Checkers, components and presets by name. A name loads only its own module, so that listing them costs nothing."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..tools.errors import ConfigError, closest
from .checker import Checker
from .components import Component, failed_calls, unfinished

if TYPE_CHECKING:
    from .presets import RewardPreset

#: name -> where its class is
CHECKERS: Mapping[str, str] = {
    "choice": "gymtune.rewards.choice:ChoiceChecker",
    "contains_gt": "gymtune.rewards.contains:ContainsGt",
    "exact": "gymtune.rewards.exact:ExactChecker",
    "json_equal": "gymtune.rewards.json_equal:JsonEqual",
    "math": "gymtune.rewards.expression:ExpressionChecker",
    "math_verify": "gymtune.rewards.math_verify:MathVerifyChecker",
    "numeric": "gymtune.rewards.numeric:NumericChecker",
    "state_equal": "gymtune.rewards.state_equal:StateEqual",
    "tool_calls_match": "gymtune.rewards.tool_calls_match:ToolCallsMatch",
}


def load_object(spec: str, what: str) -> Any:
    """Import `module:name`; `what` says in errors what it should be, such as `checker`. Raises ConfigError."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ConfigError(f"{what} {spec!r} must have the form 'module:name'")
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} {spec!r}: cannot import {module!r}: {error}") from error
    if not hasattr(home, name):
        raise ConfigError(f"{what} {spec!r}: {module!r} has no {name!r}.{closest(name, vars(home))}")
    return getattr(home, name)


def get_checker(name: str, **options: Any) -> Checker:
    """Make the checker of that name, or the user's own by `module:Class`.

    Raises ConfigError for an unknown name, a class that is no Checker, and an option that the class does not take.
    """
    if name not in CHECKERS and ":" not in name:
        raise ConfigError(f"no checker is named {name!r}.{closest(name, CHECKERS)} Your own: 'module:Class'.")
    kind = load_object(CHECKERS.get(name, name), "checker")
    if not (inspect.isclass(kind) and issubclass(kind, Checker)) or inspect.isabstract(kind):
        raise ConfigError(
            f"checker {name!r} must be a class below gymtune.rewards.Checker with a verdict, got {kind!r}"
        )
    known = inspect.signature(kind).parameters
    for key in options:
        if key not in known:
            mend = closest(key, known) if known else " It takes none."
            raise ConfigError(f"checker {name!r} takes no option {key!r}.{mend}")
    return kind(**options)


def component_names() -> list[str]:
    """Return the names that `get_component` knows, sorted."""
    from .shaping import SHAPING

    return sorted({*SHAPING, unfinished.name, failed_calls.name})


def get_component(name: str) -> Component:
    """Return the shaping component of that name, or the user's own by `module:name`. Raises ConfigError."""
    from .shaping import SHAPING

    if ":" in name:
        own = load_object(name, "component")
        if not isinstance(own, Component):
            raise ConfigError(f"component {name!r} must be a gymtune.rewards.Component, got {own!r}")
        return own
    known = {**SHAPING, unfinished.name: unfinished, failed_calls.name: failed_calls}
    if name not in known:
        raise ConfigError(f"no reward component is named {name!r}.{closest(name, known)} Your own: 'module:name'.")
    return known[name]


def preset_names() -> list[str]:
    """Return the names that `get_preset` knows, sorted."""
    from .presets import PRESETS

    return sorted(PRESETS)


def get_preset(name: str, checker: Checker | None = None) -> RewardPreset:
    """Return the reward preset of that name; `checker` compares with `gt` in place of its own. Raises ConfigError."""
    from .presets import PRESETS

    if name not in PRESETS:
        raise ConfigError(f"no reward preset is named {name!r}.{closest(name, PRESETS)}")
    return PRESETS[name](checker)
