"""Layered configuration of a training run: defaults < preset of `--algo` < TOML file < command line.

`TrainConfig` is checked data and may be built by hand in Python; `resolve` builds it from the layers and remembers
where each value came from. Names follow TRL's where TRL has the option. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Self, get_args

from pydantic import (
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from ..tools.errors import ConfigError, closest
from .config_keys import AllKeys
from .contradictions import contradictions
from .presets import PRESETS, unpinned, unread

Keys = tuple[str, ...]
WANTED = {"string_pattern_mismatch": "cpu, cuda or cuda:N", "invalid-json-value": "a value that JSON can hold"}
NOTHING: Mapping[str, Any] = MappingProxyType({})


class TrainConfig(AllKeys):
    """Everything a run acts on; frozen. Missing keys take the value of the algorithm's preset, then the default.

    Raises `ConfigError` for an unknown key, a wrong type or range, a key that `algo` does not read or pins to
    another value, and keys that contradict each other. The text `none` stands for None, which TOML lacks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _layered(cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Refuse keys that would be ignored, lay the preset under `data`, and turn every complaint into one error."""
        if not isinstance(data, Mapping):
            return handler(data)
        given = {key: _plain(key, value) for key, value in data.items()}
        origin: Mapping[str, str] = info.context or {}
        algo = str(given.get("algo"))
        if algo not in PRESETS:
            raise ConfigError(f"unknown algo {algo!r}.{closest(algo, PRESETS)}")
        for key in (key for key in given if key not in cls.model_fields):
            raise ConfigError(f"unknown key {key!r}{_from(origin, key)}.{closest(key, cls.model_fields)}")
        values = {**PRESETS[algo].values, **given}
        refused = unread(values, cls.model_fields) | unpinned(given)
        chosen = (key for key in given if origin.get(key) != f"preset {algo}")  # what a preset brings may be idle
        for key in (key for key in chosen if key in refused):
            raise ConfigError(f"{key}{_from(origin, key)}: {refused[key]}")
        try:
            config = handler(values)
        except ValidationError as error:
            raise ConfigError("; ".join(_complaints(error, origin))) from None
        for wrong in contradictions(config):
            raise ConfigError(wrong)
        return config

    @property
    def passes(self) -> int:
        """Passes over a rollout batch."""
        return self.num_ppo_epochs if self.algo == "ppo" else self.num_iterations

    def effective(self) -> dict[str, Any]:
        """Return the keys that the run reads, with their values as JSON data."""
        values = self.model_dump(mode="json")
        idle = unread(values, values)
        return {key: value for key, value in values.items() if key not in idle}


@dataclass(frozen=True)
class Resolved:
    """A config and, for each value that the run reads (`env_args.levels` for one in a dict), where it came from."""

    config: TrainConfig
    origin: dict[str, str]

    def table(self) -> list[tuple[str, str, str]]:
        """Return `(key, value, origin)` rows; values are written so that `key = value` is a line of TOML."""
        leaves = {".".join(keys): value for keys, value in _leaves(self.config.effective())}
        return [(key, _text(value), self.origin.get(key, "default")) for key, value in leaves.items()]

    def dump(self, path: Path) -> None:
        """Write config and origins as JSON, aside and renamed: a reader finds the old file or the new one."""
        aside = path.with_name(path.name + ".tmp")
        record = {"config": self.config.effective(), "origin": self.origin}
        aside.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(aside, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `dump` wrote. Raises `ConfigError` naming the file."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            values, origin = dict(record["config"]), dict(record["origin"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"file {path} is not the config.json of a run: {error!r}") from error
        return cls(TrainConfig.model_validate(values, context=dict.fromkeys(values, f"file {path}")), origin)


def resolve(
    algo: str, *, file: Path | None = None, sets: Sequence[str] = (), options: Mapping[str, Any] = NOTHING
) -> Resolved:
    """Lay default, preset, `file` (TOML) and command line over each other, the last one wins.

    The command line is `options` (only those that were given) and `sets` (`key=value`, the value as in TOML or plain
    text; `env_args.levels=[1,2]` reaches into a dict). Dicts are merged key by key. Raises `ConfigError`.
    """
    if algo not in PRESETS:
        raise ConfigError(f"unknown algo {algo!r}.{closest(algo, PRESETS)}")
    layers = [(f"preset {algo}", dict(_leaves(PRESETS[algo].values)))]
    if file is not None:
        layers.append((f"file {file}", dict(_leaves(_read_toml(file)))))
    layers.append(("command line", _command_line(sets, options)))
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, leaves in layers:
        for keys, value in leaves.items():
            if keys[0] not in TrainConfig.model_fields:
                raise ConfigError(
                    f"unknown key {keys[0]!r} (from {where}).{closest(keys[0], TrainConfig.model_fields)}"
                )
            if keys == ("algo",) and value != algo:
                raise ConfigError(f"algo is {value!r} in the {where} but {algo!r} was asked for: keep one of them")
            _put(values, keys, value)
            origin[".".join(keys)] = where
            origin[keys[0]] = where
    values["algo"], origin["algo"] = algo, "command line"
    config = TrainConfig.model_validate(values, context=origin)
    shown = [".".join(keys) for keys, _ in _leaves(config.effective())]
    return Resolved(config, {key: origin.get(key, "default") for key in shown})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError tells line and column; UnicodeDecodeError the byte
        raise ConfigError(f"file {path} is not TOML: {error}") from error


def _command_line(sets: Sequence[str], options: Mapping[str, Any]) -> dict[Keys, Any]:
    """Return the leaves of both ways to say it; a key said twice must have one value."""
    said = list(_leaves(options))
    for item in sets:
        name, equals, text = item.partition("=")
        keys = tuple(part.strip() for part in name.split("."))
        if not equals or not all(keys):
            raise ConfigError(f"--set wants key=value, came {item!r}")
        said += _leaves(_nest(keys, _parse(keys, text.strip())))
    merged: dict[Keys, Any] = {}
    for keys, value in said:
        for other, before in merged.items():
            overlap = min(len(keys), len(other))
            if keys[:overlap] == other[:overlap] and (keys != other or before != value):
                raise ConfigError(
                    f"{'.'.join(keys)} is given twice on the command line: {'.'.join(other)} = {_text(before)} "
                    f"and {'.'.join(keys)} = {_text(value)}"
                )
        merged[keys] = value
    return merged


def _parse(keys: Keys, text: str) -> Any:
    """Return `text` as a TOML value, else as it stands; a key that holds text takes `2024` or `true` as text."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    field = TrainConfig.model_fields.get(keys[0])
    wants_text = field is not None and field.annotation in (str, str | None)
    if document.keys() != {"value"} or (wants_text and not isinstance(document["value"], str)):
        return text
    return document["value"]


def _leaves(tree: Mapping[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield `(path, value)` for all that is not a dict; an empty dict is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _nest(keys: Keys, value: Any) -> dict[str, Any]:
    return {keys[0]: _nest(keys[1:], value) if keys[1:] else value}


def _put(tree: dict[str, Any], keys: Keys, value: Any) -> None:
    """Set the leaf at `keys`; a lower layer's plain value in the way is replaced."""
    *above, last = keys
    for key in above:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[last] = value


def _plain(key: str, value: Any) -> Any:
    """Return a path as text, and None for the text `none` where the field may be None."""
    field = TrainConfig.model_fields.get(key)
    if field is not None and NoneType in get_args(field.annotation) and value == "none":
        return None
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _from(origin: Mapping[str, str], key: str) -> str:
    return f" (from {origin[key]})" if key in origin else ""


def _text(value: Any) -> str:
    return json.dumps("none" if value is None else value, ensure_ascii=False, default=str)


def _complaints(error: ValidationError, origin: Mapping[str, str]) -> Iterator[str]:
    """Yield one line a fault: key, what was wanted, what came, from where."""
    for fault in error.errors(include_url=False):
        keys = [str(part) for part in fault["loc"]]
        if fault["type"] == "missing":
            yield f"{keys[0]} is required and not set"
            continue
        where = _from(origin, ".".join(keys)) or _from(origin, keys[0])
        wanted = WANTED.get(fault["type"]) or fault["msg"].removeprefix("Input should be ")
        yield f"{'.'.join(keys)}{where}: wanted {wanted}, came {fault['input']!r}"
