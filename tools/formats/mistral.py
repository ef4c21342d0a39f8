"""The `mistral` format: `[TOOL_CALLS]` and a JSON array of calls, as up to tokenizer v7; newer ones are read too.

From v11 on each call is `[TOOL_CALLS]name[ARGS]{...}`, with `[CALL_ID]id` before `[ARGS]` in some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..chat_format import ParsedCall, register_chat_format
from ..messages import FunctionCall
from .call_json import Document, call_fault, decode, encode, parsed_call, skip_space
from .marked import MarkedFormat

MARK = "[TOOL_CALLS]"

_HEAD = re.compile(r"([^\s\[{]*+)\s*(?:\[CALL_ID\][^\[{]*+)?(?:\[ARGS\]\s*|(?=\{))")
_BETWEEN = re.compile(r"\s*([,\]])\s*")
_FORM = f'Write {MARK}[{{"name": "...", "arguments": {{...}}}}, ...]'
_PROMPT = f"""You have access to these functions:

SCHEMAS

To call functions, write {MARK} and a JSON array with one object for each call, and nothing after it:
{MARK}[{{"name": "function name", "arguments": {{"argument name": "value"}}}}]"""


class MistralFormat(MarkedFormat):
    """Calls as one JSON array after `[TOOL_CALLS]`."""

    name = "mistral"
    mark = MARK
    after_content = ""
    special_tokens = (MARK, "[ARGS]", "[CALL_ID]")

    def call_id(self, turn: int, index: int) -> str:
        """Return nine letters and digits: Mistral's templates refuse another id."""
        return f"call{turn:03}{index:02}"

    def read(self, document: Document, start: int, ids: Iterator[str]) -> tuple[list[ParsedCall], int]:
        """Read the array of calls, or the one call by name, that follows the mark at `start`."""
        begin = skip_space(document, start + len(MARK))
        if head := _HEAD.match(document, begin):
            arguments, stop, fault = decode(document, head.end())
            value = {"name": head[1], "arguments": arguments}
            end = _broken_end(document, head.end()) if fault else stop
            return [parsed_call(next(ids), document[start:end], value, [fault or call_fault(value)], form=_FORM)], end
        if document.startswith("[", begin):
            return _read_array(document, start, begin + 1, ids)
        end = _broken_end(document, begin)
        fault = f"{MARK} must be followed by a JSON array of calls"
        return [parsed_call(next(ids), document[start:end], None, [fault], form=_FORM)], end

    def render_calls(self, calls: Sequence[FunctionCall]) -> str:
        """Return the mark and the array of the calls."""
        return f"{MARK}[{', '.join(map(self.render_call, calls))}]"

    def render_call(self, call: FunctionCall) -> str:
        """Return the call as an element of the array."""
        return encode({"name": call["name"], "arguments": call["arguments"]}, call["name"])

    def tools_prompt(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return the tools and how to call them, in plain words: Mistral's own are special tokens of its template."""
        if not schemas:
            return ""
        written = [json.dumps(schema, ensure_ascii=False) for schema in schemas]
        return _PROMPT.replace("SCHEMAS", "\n".join(written), 1)


def _read_array(document: Document, start: int, position: int, ids: Iterator[str]) -> tuple[list[ParsedCall], int]:
    """Read the elements from `position` on; each call's markup begins where that of the one before ends."""
    calls: list[ParsedCall] = []
    while True:
        value, stop, fault = decode(document, skip_space(document, position))
        between = _BETWEEN.match(document, stop) if fault is None else None
        unclosed = None if fault or between else "after a call in the array there must be , or ]"
        end = between.end() if between else _broken_end(document, stop)
        faults = [fault or call_fault(value), unclosed]
        calls.append(parsed_call(next(ids), document[start:end], value, faults, form=_FORM))
        if between is None or between[1] == "]":
            return calls, end
        start = position = end


def _broken_end(document: Document, position: int) -> int:
    """Return where a broken call ends: before the next mark."""
    following = document.find(MARK, position)
    return len(document) if following < 0 else following


register_chat_format(MistralFormat())
