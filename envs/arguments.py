"""Arguments of envs: which ones a class takes, and how they are written on a command line."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from typing import Any

from ..rewards.registry import preset_names
from ..tools.errors import ConfigError
from .registration import env_arguments, make_env


def takes_argument(env_id: str, name: str) -> bool:
    """Tell whether the env of `env_id` takes the argument. Raises ConfigError for an unknown id."""
    env = make_env(env_id)
    env.close()
    return name in env_arguments(type(env))


def parse_env_args(items: Sequence[str], option: str = "--env-arg") -> dict[str, Any]:
    """Return `key=value` items as keyword arguments; a value is TOML, else plain text; `rewards.gt=1` reaches into a
    dict.

    Raises ConfigError, naming the option that they came by, for an item without `=` and for a key that is given twice.
    """
    lines = []
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise ConfigError(f"{option} wants key=value, came {item!r}")
        lines.append(f"{key} = {text}" if _is_json(key, text) else f"{key} = {json.dumps(text)}")
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{option} {' '.join(items)}: {error}") from error


def _is_json(key: str, text: str) -> bool:
    """Tell whether the text is one TOML value that JSON can hold (a date is text)."""
    try:
        json.dumps(tomllib.loads(f"{key} = {text}"))
    except (tomllib.TOMLDecodeError, TypeError):
        return False
    return "\n" not in text


def parse_rewards(items: Sequence[str]) -> tuple[str | None, dict[str, float]]:
    """Return the preset and the weights that `--reward` items name: `NAME=WEIGHT`, `NAME` (weight 1), or a preset.

    Raises ConfigError for a weight that is no number, a name given twice, and two presets.
    """
    preset: str | None = None
    weights: dict[str, float] = {}
    for item in items:
        name, equals, text = (part.strip() for part in item.rpartition("=")) if "=" in item else (item, "", "1")
        if not equals and name in preset_names():
            if preset is not None:
                raise ConfigError(f"--reward: two presets are given, {preset} and {name}; choose one")
            preset = name
            continue
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not name or not math.isfinite(weight):
            raise ConfigError(f"--reward wants NAME=WEIGHT or a preset ({', '.join(preset_names())}), came {item!r}")
        if name in weights:
            raise ConfigError(f"--reward {name} is given twice")
        weights[name] = weight
    return preset, weights
