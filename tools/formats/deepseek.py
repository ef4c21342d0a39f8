"""The `deepseek` format: calls between marks that are special tokens. Writes what V3.1 writes, reads V3's and R1's too.

V3.1 has the arguments right after the tool's name; V3 and R1 have `function` before it, and a fence of ```json around
the arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..chat_format import ParsedCall, register_chat_format
from ..errors import DataError
from ..messages import FunctionCall
from .call_json import Document, call_fault, decode, encode, parsed_call, skip_space
from .marked import MarkedFormat

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_HEAD = re.compile(rf"\s*{CALL}([^<]*+){SEPARATOR}\s*(?:([^<`{{]*+)```(?:json)?\s*)?")
_MARK = re.compile("|".join((CALL_END, CALL, CLOSE, OPEN)))
_FENCE = "```"
_FORM = f"Write {OPEN}{CALL}NAME{SEPARATOR}{{...}}{CALL_END}{CLOSE}"
_TOOL = """
### {name}
Description: {description}

Parameters: {parameters}
"""
_PROMPT = f"""## Tools
You have access to the following tools:
TOOLS
IMPORTANT: ALWAYS adhere to this exact format for tool use:
{OPEN}{CALL}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}{{{{additional_tool_calls}}}}{CLOSE}

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""  # the words of V3.1's template


class DeepSeekFormat(MarkedFormat):
    """Calls one after the other between marks of begin and end."""

    name = "deepseek"
    mark = OPEN
    after_content = ""
    special_tokens = (OPEN, CLOSE, CALL, SEPARATOR, CALL_END)

    def read(self, document: Document, start: int, ids: Iterator[str]) -> tuple[list[ParsedCall], int]:
        """Read the calls that the mark at `start` begins; each call's markup begins where that before it ends."""
        calls: list[ParsedCall] = []
        position, more = start + len(OPEN), True
        while more:
            value, stop, fault = _read_call(document, position)
            position, unclosed, more = _find_end(document, stop, whole=fault is None)
            faults = [fault or call_fault(value), unclosed]
            calls.append(parsed_call(next(ids), document[start:position], value, faults, form=_FORM))
            start = position
        return calls, position

    def render_calls(self, calls: Sequence[FunctionCall]) -> str:
        """Return the calls between the marks of their begin and end."""
        return f"{OPEN}{''.join(map(self.render_call, calls))}{CLOSE}"

    def render_call(self, call: FunctionCall) -> str:
        """Return the call as V3.1 writes it. Raises DataError for a name that the marks cannot hold."""
        name = call["name"]
        if not name.strip() or name.strip() != name or "<" in name:
            raise DataError(f"{self.name} cannot write a call to {name[:64]!r}")
        return f"{CALL}{name}{SEPARATOR}{encode(call['arguments'], name)}{CALL_END}"

    def tools_prompt(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return the tools and how to call them, in the words of V3.1's template."""
        if not schemas:
            return ""
        return _PROMPT.replace("TOOLS", "".join(_describe(schema["function"]) for schema in schemas), 1)


def _describe(function: Mapping[str, Any]) -> str:
    parameters = json.dumps(function.get("parameters", {}), ensure_ascii=False)
    return _TOOL.format(name=function["name"], description=function.get("description", ""), parameters=parameters)


def _read_call(document: Document, position: int) -> tuple[dict[str, Any] | None, int, str | None]:
    """Read name and arguments; return them, the position after the JSON, and what is wrong."""
    head = _HEAD.match(document, position)
    if head is None:
        begin = skip_space(document, position)
        stop = begin + len(CALL) if document.startswith(CALL, begin) else position
        return None, stop, f"{CALL}NAME{SEPARATOR} is missing"
    arguments, stop, fault = decode(document, head.end())
    value = {"name": (head[2] or head[1]).strip(), "arguments": arguments}
    if fault is None and head[2] is not None:
        stop = skip_space(document, stop)
        if not document.startswith(_FENCE, stop):
            return value, stop, f"{_FENCE} is missing after the arguments"
        stop += len(_FENCE)
    return value, stop, fault


def _find_end(document: Document, stop: int, *, whole: bool) -> tuple[int, str | None, bool]:
    """Return the position after the call, what is wrong with how it ends, and whether another one follows.

    A broken call ends with the first mark of an end, or before the first mark of a begin.
    """
    mark = _MARK.search(document, stop)
    if mark is None:
        return len(document), f"{CALL_END} is missing", False
    if mark[0] != CALL_END:
        end = mark.end() if mark[0] == CLOSE else mark.start()
        return end, f"{CALL_END} is missing before {mark[0]}", mark[0] == CALL
    between = document[stop : mark.start()].strip() if whole else ""
    extra = f"there is text between the arguments and {CALL_END}" if between else None
    after = skip_space(document, mark.end())
    if document.startswith(CALL, after):
        return after, extra, True
    if document.startswith(CLOSE, after):
        return after + len(CLOSE), extra, False
    return mark.end(), extra or f"{CLOSE} is missing", False


register_chat_format(DeepSeekFormat())
