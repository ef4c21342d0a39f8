"""Python for a model, in pydantic-monty: a worker process without files, network or host functions, all limits on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from threading import Lock
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError, ToolError
from ..tool import Tool
from .everyday import CLOCK

_MAX_CODE_CHARS = 100_000
_SPLITS = 8  # lines at column 0 tried as the start of the last expression: `f(`, newline, `)` has two
_ECHO_CHARS = 400  # of what was printed before an error
_DEPTH = 500
_MIN_OUTPUT = 100


class PythonSession:
    """One interpreter whose variables live from call to call, as in a REPL; `_` is the value of the call before.

    A run that breaks the limit on time or memory, or crashes the worker, ends that interpreter; the next call starts
    a fresh one. Clock and `random` begin the same in each, and sleeping takes no time, so that a run can be repeated.
    Safe to call from several threads: one call runs at a time, in no promised order.

    Args:
        time_limit: Seconds of execution of one call (and as many again for the `repr` of its value).
        max_memory_mb: Memory of the interpreter in MiB.
        max_output_chars: Characters kept of what a call answers with, at least 100.

    Raises:
        ConfigError: pydantic-monty is not installed, or a limit is out of range.
    """

    def __init__(self, *, time_limit: float = 5.0, max_memory_mb: int = 64, max_output_chars: int = 4096) -> None:
        _check(time_limit, max_memory_mb, max_output_chars)
        self._monty = _load()
        self.time_limit, self.max_memory_mb, self.max_output_chars = time_limit, max_memory_mb, max_output_chars
        self._lock = Lock()
        self._worker = ExitStack()
        self._session: Any = None

    def run(self, code: str) -> str:
        """Run the code and return what it printed, then the `repr` of its last expression unless that is None.

        Raises:
            ToolError: The code failed (names the Python error and the line), broke a limit or crashed the worker.
        """
        if len(code) > _MAX_CODE_CHARS:
            raise ToolError(f"the code has {len(code)} characters, at most {_MAX_CODE_CHARS} are allowed")
        if not self._lock.acquire(timeout=self.time_limit):
            raise ToolError("another call of this session is still running")
        try:
            return self._run(code)
        finally:
            self._lock.release()

    def tools(self) -> list[Tool]:
        """Return the tool `python`, bound to this session."""
        return [_python(self.run, self.time_limit, "Variables are kept from call to call.")]

    def close(self) -> None:
        """End the worker, once a running call has ended. A later call starts a fresh one."""
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, code: str) -> str:
        began_fresh = self._session is None
        printed = _Printed(self.max_output_chars)
        try:
            value = self._evaluate(self._session or self._start(), code, printed)
        except self._monty.MontyError as error:
            lost = isinstance(error, self._monty.MontyCrashedError) or isinstance(
                error.exception(), TimeoutError | MemoryError
            )
            if lost:
                self._end()
            note = "\nThe variables of earlier calls are lost." if lost and not began_fresh else ""
            raise ToolError(self._describe(error) + note + printed.echo()) from None
        return printed.with_value(value)

    def _evaluate(self, session: Any, code: str, printed: _Printed) -> str:
        """Run the code and return the text of its value.

        The value itself never leaves the worker: tuples that share their parts are built in linear time, but take
        exponential time to hash or to print, which no limit would stop in this process. So the code is fed with its
        last expression assigned to `_`, whose `repr` is then fetched. Syntax errors come before anything is run.
        """
        for attempt in _with_value_kept(code):
            try:
                session.feed_run(attempt, print_callback=printed)
                break
            except self._monty.MontySyntaxError:
                continue
        else:
            session.feed_run(f"{code}\n_ = None", print_callback=printed)
        shown = f"'' if _ is None else f'{{_!r}}'[:{self.max_output_chars + 1}]"
        return str(session.feed_run(shown, print_callback=printed))

    def _start(self) -> Any:
        pool = self._worker.enter_context(self._monty.Monty(max_processes=1))
        checkout = pool.checkout(
            limits={
                "max_feed_duration_secs": self.time_limit,
                "max_memory": self.max_memory_mb * 2**20,
                "max_recursion_depth": _DEPTH,
            },
            os_policy={"sleep": "zero", "random_start": {"seed": 0}, "datetime": CLOCK},
        )
        self._session = self._worker.enter_context(checkout)
        return self._session

    def _end(self) -> None:
        self._session = None
        self._worker.close()

    def _describe(self, error: Any) -> str:
        crashed = isinstance(error, self._monty.MontyCrashedError)
        if crashed and not error.timed_out:
            return "the Python process crashed"
        if crashed or str(error).startswith("TimeoutError: feed time limit exceeded"):
            return f"TimeoutError: stopped after {self.time_limit:g} seconds"
        frames = error.traceback() if hasattr(error, "traceback") else []
        where = f" (line {frames[0].line})" if frames else ""
        return (error.display("type-msg") if hasattr(error, "display") else str(error)) + where


def python_tool(*, time_limit: float = 5.0, max_memory_mb: int = 64, max_output_chars: int = 4096) -> Tool:
    """Return the tool `python`, each call of which runs in a fresh interpreter. The limits are `PythonSession`'s.

    Raises:
        ConfigError: pydantic-monty is not installed, or a limit is out of range.
    """
    limits: dict[str, Any] = {
        "time_limit": time_limit,
        "max_memory_mb": max_memory_mb,
        "max_output_chars": max_output_chars,
    }
    PythonSession(**limits)  # refuses bad limits now; starts nothing
    return _python(partial(_run_once, limits), time_limit, "Nothing is kept from call to call.")


def _run_once(options: dict[str, Any], code: str) -> str:
    with PythonSession(**options) as session:
        return session.run(code)


class _Printed:
    """Keeps the first characters of what is printed and counts the rest."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept, self._length = limit, "", 0

    def __call__(self, stream: str, text: str) -> None:
        self._kept += text[: max(0, self._limit - self._length)]
        self._length += len(text)

    def echo(self) -> str:
        text = self._kept[:_ECHO_CHARS].rstrip("\n")
        return f"\nPrinted before: {text}" if text else ""

    def with_value(self, value: str) -> str:
        """Return print and value, at most `limit` characters with the note of the cut."""
        text = self._kept.rstrip("\n") + ("\n" if self._kept and value else "") + value
        if len(text) <= self._limit and self._length <= self._limit:
            return text
        note = "\n[cut: the output is too long]"
        return text[: self._limit - len(note)] + note


def _python(run: Callable[[str], str], time_limit: float, memory: str) -> Tool:
    return Tool(
        name="python",
        description="Run Python code. Answers with what it prints and the value of its last expression. "
        f"There are no files, no network and no third-party packages. {memory}",
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
            "additionalProperties": False,
        },
        function=run,
        time_limit=3 * time_limit + 5,  # the wait for the session, the run and the repr, each with the worker's grace
    )


def _with_value_kept(code: str) -> list[str]:
    """Return the code with `_ =` before its last expression, for each of the lines where that may start.

    Wrong guesses are syntax errors: `pass` cannot stand inside an expression, and inside a string the opening
    parenthesis is swallowed, which leaves the closing one alone. It all ends in an assignment, so that the code's own
    parentheses (`1); (value`) cannot make the whole have a value, which would leave the worker.
    """
    lines = code.split("\n")
    starts = (n for n in range(len(lines) - 1, -1, -1) if lines[n].strip() and lines[n][0] not in " \t#")
    return [
        "\n".join([*lines[:n], "pass; _ = (" + "\n".join(lines[n:]), ")", "_ = _"]) for n in islice(starts, _SPLITS)
    ]


def _check(time_limit: float, max_memory_mb: int, max_output_chars: int) -> None:
    if not 0 < time_limit <= 3600:
        raise ConfigError(f"python: time_limit must be above 0 and at most 3600 seconds, got {time_limit!r}")
    if max_memory_mb < 1:
        raise ConfigError(f"python: max_memory_mb must be at least 1, got {max_memory_mb!r}")
    if max_output_chars < _MIN_OUTPUT:
        raise ConfigError(f"python: max_output_chars must be at least {_MIN_OUTPUT}, got {max_output_chars!r}")


def _load() -> Any:
    try:
        import pydantic_monty
    except ImportError:
        raise ConfigError("the tool 'python' needs pydantic-monty. Run: pip install 'gymtune[python]'") from None
    return pydantic_monty
