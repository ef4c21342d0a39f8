"""`gymtune envs new NAME`: a small package with an env, a tool, a checker, a test and a README, to be changed."""

from __future__ import annotations

import keyword
from importlib.resources import files
from pathlib import Path

from ..tools.errors import ConfigError

_SUFFIX = ".txt"  # of the templates, so that no tool takes them for code


def new_env(name: str, folder: str | Path = ".") -> list[Path]:
    """Write the package `name` into `folder` and return its files.

    Raises ConfigError when the name cannot be a package's, or something of that name is there already.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"an env's name must be a Python package's, in small letters, such as my_env; got {name!r}")
    target = Path(folder) / name
    if target.exists():
        raise ConfigError(f"{target} is there already: give another name, or move it away")
    kind = _class_name(name)
    written = []
    try:
        target.mkdir(parents=True)
        for template in sorted(files(__package__).joinpath("template").iterdir(), key=lambda file: file.name):
            path = target / template.name.removesuffix(_SUFFIX).replace("NAME", name)
            text = template.read_text(encoding="utf-8").replace("NAME", name).replace("CLASS", kind)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ConfigError(f"{target}: cannot write: {error.strerror or error}") from error
    return written


def env_id(name: str) -> str:
    """Return the id under which the package `name` registers its env."""
    return f"{name}:{_class_name(name)}-v0"


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_")) + ("" if name.endswith("env") else "Env")
