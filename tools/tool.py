"""Tool: a function that a model may call, with its JSON Schema and time limit; `@tool` makes one from a function."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal, overload

from .errors import ConfigError
from .execution import Wait, run_inline, start_isolated, start_thread
from .schema import ArgumentSchema, compile_schema
from .signature import read_signature

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

OnViolation = Literal["refuse", "report"]


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Args:
        name: 1 to 64 of letters, digits, `_`, `.`, `-`.
        description: What it does, for the model.
        parameters: JSON Schema (draft 2020-12) of the arguments, of type object.
        function: Called with the arguments by keyword; sync or async. Tells the model of a mistake by `ToolError`.
        time_limit: Seconds, after which the call is abandoned and ends in `timeout`.
        in_memory: Trusted and quick: called inline in the caller's thread, which takes microseconds; the time limit
            cannot be enforced then. Otherwise the function runs in a daemon thread, an async one in its own event loop.
        isolate: The function runs in a worker process, which is killed at the time limit. For code that may hang or
            crash; it must be importable, and it shares no state with this process.
        on_violation: `refuse` does not run the tool on arguments that break the schema; `report` runs it all the same
            and records the violation, for data sets whose gold calls break their own schemas.

    Raises:
        ConfigError: One of these is wrong.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    time_limit: float = 10.0
    in_memory: bool = False
    isolate: bool = False
    on_violation: OnViolation = "refuse"
    _compiled: ArgumentSchema = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"tool name {self.name!r} must be 1 to 64 of letters, digits, '_', '.', '-'. Give name=.")
        where = f"tool {self.name!r}"
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type") != "object":
            raise ConfigError(
                f'{where}: parameters must be a JSON Schema with "type": "object", got {self.parameters!r}'
            )
        if not (0 < self.time_limit < math.inf):
            raise ConfigError(f"{where}: time_limit must be a positive number of seconds, got {self.time_limit!r}")
        if self.on_violation not in ("refuse", "report"):
            raise ConfigError(f"{where}: on_violation must be 'refuse' or 'report', got {self.on_violation!r}")
        if self.in_memory and inspect.iscoroutinefunction(self.function):
            raise ConfigError(f"{where}: in_memory calls inline, which an async function cannot be. Drop in_memory.")
        if self.isolate:
            self._check_isolated(where)
        object.__setattr__(self, "_compiled", compile_schema(self.parameters, where))

    def schema(self) -> dict[str, Any]:
        """Return the OpenAI form of the tool, as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def violations(self, arguments: Mapping[str, Any]) -> str | None:
        """Return where the arguments break the schema, as text for the model, or None."""
        return self._compiled.violations(arguments)

    def _check_isolated(self, where: str) -> None:
        from .processes import pickle_call

        if self.in_memory:
            raise ConfigError(f"{where}: in_memory calls inline, isolate in another process. Choose one.")
        try:
            pickle_call(self.function)
        except ConfigError as error:
            raise ConfigError(f"{where}: isolate=True: {error}") from None

    def start(self, arguments: Mapping[str, Any]) -> Wait:
        """Call the function, unchecked, and return what waits for its ending (already there when `in_memory`)."""
        if self.isolate:
            return start_isolated(self.function, arguments, self.time_limit)
        if not self.in_memory:
            return start_thread(self.function, arguments, self.time_limit)
        ending = run_inline(self.function, arguments, self.time_limit)
        return lambda: ending


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    time_limit: float = 10.0,
    in_memory: bool = False,
    isolate: bool = False,
    on_violation: OnViolation = "refuse",
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    **options: Any,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a `Tool` of a function or a bound method, as `@tool` or `@tool(name=..., time_limit=...)`.

    Name, description and schema come from the function: its type hints, defaults and Google-style docstring. With
    `parameters` given, hints are not read and the function gets the JSON values as they are; without, it gets them
    turned into its annotated types. A stateful tool is a bound method: `tool(instance.method)`.

    Raises:
        ConfigError: A parameter is without annotation, is `*args` or `**kwargs`, or a field of `Tool` is wrong.
    """

    def make(function: Callable[..., Any]) -> Tool:
        given = name or str(getattr(function, "__name__", ""))
        if parameters is not None:
            doc, schema, run = inspect.getdoc(function) or "", parameters, function
        else:
            signature = read_signature(function, f"tool {given!r}")
            doc, schema, run = signature.description, signature.parameters, signature.typed
        if options.get("isolate"):
            run = _Sent(function, run)
        return Tool(given, doc if description is None else description, schema, run, **options)

    return make if function is None else make(function)


class _Sent:
    """A function that pickles by its name although `@tool` has put the Tool in its place."""

    def __init__(self, function: Callable[..., Any], run: Callable[..., Any]) -> None:
        self.function = function
        self.run = run

    def __call__(self, /, **arguments: Any) -> Any:
        return self.run(**arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        typed = self.run is not self.function
        if not inspect.isfunction(self.function):  # a bound method or a partial: pickles as it is
            return _received, (self.function, typed)
        from .processes import check_importable

        check_importable(self.function)
        return _found, (self.function.__module__, self.function.__qualname__, typed)


@cache
def _found(module: str, name: str, typed: bool) -> Callable[..., Any]:
    found = attrgetter(name)(import_module(module))
    return found.function if isinstance(found, Tool) else _received(found, typed)


def _received(function: Callable[..., Any], typed: bool) -> Callable[..., Any]:
    return read_signature(function, "an isolated tool").typed if typed else function
