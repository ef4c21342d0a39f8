"""Toolbox: the tools of one task. Whatever a model writes or a tool does, a call ends in a `ToolResult`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .chat_format import ParsedCall
from .errors import ConfigError, ToolError, closest
from .execution import Ending, Wait
from .outcomes import Outcome, ToolResult
from .tool import Tool

_CONCURRENT = 32  # threads of one turn; a model that writes a thousand calls gets them in waves
_ERROR_CHARS = 1000
_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class _Started:
    call: ParsedCall
    tool: Tool
    violation: str | None
    wait: Wait


class Toolbox:
    """Tools by name, called with what a model wrote.

    Args:
        tools: In the order in which the model is told of them.
        max_result_chars: Characters kept of a result; the note of how many were cut comes on top.

    Raises:
        ConfigError: Two tools of one name, or a limit below 1.
    """

    def __init__(self, tools: Sequence[Tool], *, max_result_chars: int = 4096) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            names = [tool.name for tool in tools]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"tool names must differ, got twice: {', '.join(twice)}. Give one of them another name=.")
        if max_result_chars < 1:
            raise ConfigError(f"max_result_chars must be at least 1, got {max_result_chars}")
        self.max_result_chars = max_result_chars

    @property
    def tools(self) -> list[Tool]:
        """The tools, in order."""
        return list(self._tools.values())

    @property
    def names(self) -> list[str]:
        """Names of the tools, in order."""
        return list(self._tools)

    @property
    def in_memory(self) -> bool:
        """Whether every tool is quick enough to be called in the thread that samples."""
        return all(tool.in_memory for tool in self._tools.values())

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools in the OpenAI form, in order."""
        return [tool.schema() for tool in self._tools.values()]

    def call(self, parsed: ParsedCall) -> ToolResult:
        """Run one call. See `call_all`."""
        return self.call_all([parsed])[0]

    def call_all(self, calls: Sequence[ParsedCall]) -> list[ToolResult]:
        """Run the calls of one turn and return their results in call order.

        In-memory tools run inline, the others beside each other, each with its own time limit. Never raises for what
        the model wrote or a tool did.

        Raises:
            KeyboardInterrupt: Passed through.
        """
        results: list[ToolResult] = []
        for first in range(0, len(calls), _CONCURRENT):
            begun = [self._begin(call) for call in calls[first : first + _CONCURRENT]]
            results += [self._finish(it) if isinstance(it, _Started) else it for it in begun]
        return results

    def _begin(self, call: ParsedCall) -> _Started | ToolResult:
        if call.error is not None or call.arguments is None:
            return self._error(call, Outcome.parse_error, call.error or "the call has no arguments")
        tool = self._tools.get(call.name)
        if tool is None:
            name = call.name[:_NAME_CHARS]
            mend = closest(name, self._tools) if self._tools else " There are no tools."
            return self._error(call, Outcome.unknown_tool, f"no tool is named {name!r}.{mend}")
        violation = tool.violations(call.arguments)
        if violation is not None and tool.on_violation == "refuse":
            return self._error(call, Outcome.schema_violation, violation, violation=violation)
        return _Started(call, tool, violation, tool.start(call.arguments))

    def _finish(self, started: _Started) -> ToolResult:
        ending = started.wait()
        outcome, text = _read(ending, started.tool)
        if outcome is not Outcome.ok:
            return self._error(started.call, outcome, text, seconds=ending.seconds, violation=started.violation)
        cut = len(text) - self.max_result_chars
        if cut > 0:
            outcome = Outcome.truncated
            text = f"{text[: self.max_result_chars]}\n[{cut} more characters cut]"
        return ToolResult(started.call.id, started.call.name, outcome, text, ending.seconds, started.violation)

    def _error(
        self, call: ParsedCall, outcome: Outcome, text: str, seconds: float = 0.0, violation: str | None = None
    ) -> ToolResult:
        limit = min(_ERROR_CHARS, self.max_result_chars)
        text = _well_formed(text)
        text = text if len(text) <= limit else f"{text[:limit]} ..."
        return ToolResult(call.id, call.name, outcome, f"error ({outcome}): {text}", seconds, violation)


def _read(ending: Ending, tool: Tool) -> tuple[Outcome, str]:
    """Return the outcome and its text: the result, or what went wrong."""
    if ending.timed_out:
        return Outcome.timeout, f"no result within {tool.time_limit:g} seconds"
    if ending.error is not None:
        return Outcome.exception, _describe(ending.error)
    try:
        return Outcome.ok, _result_text(ending.value)
    except Exception as error:  # noqa: BLE001  the tool's result is the tool's doing, whatever its methods raise
        return Outcome.exception, f"the tool's result has no JSON form: {_describe(error)}"


def _result_text(value: Any) -> str:
    text = str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _well_formed(text)


def _describe(error: BaseException) -> str:
    """Return a `ToolError`'s message as it is, else type and message; never a traceback."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  an exception class of the tool may break in its own __str__
        text = ""
    return text if isinstance(error, ToolError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _well_formed(text: str) -> str:
    """Replace lone surrogates by U+FFFD: they have no UTF-8 form, and tokenizers and files refuse them."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
