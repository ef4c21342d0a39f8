"""The error tree. Everything a user can mend derives from `GymtuneError` and is printed as one line.

::

    GymtuneError
    +-- ConfigError        an option, key or preset is wrong             (exit code 2)
    +-- DataError          a file or record is wrong; names file, line   (exit code 2)
    +-- ModelError         a model folder, tokenizer or template is wrong (exit code 2)
    +-- EnvError           an environment breaks its contract            (exit code 1)
    +-- RunError           a run cannot go on                            (exit code 1)
    ToolError              raised inside a tool: becomes an outcome, never reaches the user
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GymtuneError(Exception):
    """Something the user can mend. The message says what was wanted, what came, where, and the mend."""

    exit_code = 1


class ConfigError(GymtuneError):
    """An option, a config key or a preset is wrong."""

    exit_code = 2


class DataError(GymtuneError):
    """A file or one of its records is wrong."""

    exit_code = 2


class ModelError(GymtuneError):
    """A model folder, tokenizer or chat template is wrong."""

    exit_code = 2


class EnvError(GymtuneError):
    """An environment breaks its contract."""


class RunError(GymtuneError):
    """A run cannot go on."""


class ToolError(Exception):
    """Raised by a tool to tell the model what it did wrong; `Toolbox.call` turns it into an outcome."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest of `known`, or the list of all when none is near."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(names)}."
