"""Tools of the library by name: those without a state, which every episode may share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ConfigError, closest
from ..tool import Tool
from ..toolbox import Toolbox
from .calculator import calculator_tool
from .everyday import everyday_tools
from .python_sandbox import python_tool

_OWN: dict[str, Callable[[], Tool]] = {"calculator": calculator_tool, "python": python_tool}


def tool_names() -> list[str]:
    """Return the names that `library_tools` knows."""
    return sorted([*_OWN, *(tool.name for tool in everyday_tools())])


def library_tools(names: Sequence[str]) -> list[Tool]:
    """Return the tools of these names, in order. Raises ConfigError for an unknown name and a missing extra."""
    everyday = {tool.name: tool for tool in everyday_tools()}
    for name in names:
        if name not in _OWN and name not in everyday:
            raise ConfigError(f"no tool of the library is named {name!r}.{closest(name, [*_OWN, *everyday])}")
    return [_OWN[name]() if name in _OWN else everyday[name] for name in names]


def library_toolbox(names: Sequence[str]) -> Toolbox:
    """Return a toolbox of the tools of these names."""
    return Toolbox(library_tools(names))
