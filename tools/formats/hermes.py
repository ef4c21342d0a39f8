"""The `hermes` format: one JSON object between `<tool_call>` tags. Hermes, Qwen2.5, Qwen3 and MiniMind write it.

The JSON decoder, and not a search for the closing tag, says where a call ends: a tag inside a string ends nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..chat_format import ChatFormat, ParsedCall, register_chat_format
from ..errors import DataError
from ..messages import FunctionCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_MAX_DEPTH = 64
_TOO_DEEP = f"the call is nested more than {_MAX_DEPTH} levels deep"
_SPACE = re.compile(r"\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FORM = f'Write {OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}'
_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # the words on which Hermes and Qwen models were trained


class _Document(str):
    """Text whose line numbers nobody asks for.

    `JSONDecodeError` counts the lines before the error, which makes a megabyte of broken calls quadratic. Were it to
    count in another way one day, parsing would be slower and nothing else.
    """

    __slots__ = ()

    def count(self, *_: object) -> int:
        return 0

    def rfind(self, *_: object) -> int:
        return -1


class _CallError(ValueError):
    """Valid JSON for Python's decoder and yet not for a call; the text is for the model."""


class HermesFormat(ChatFormat):
    """Calls as `<tool_call>` JSON `</tool_call>`; a lone closing tag is content."""

    name = "hermes"

    def scan(self, text: str, turn: int) -> tuple[str, tuple[ParsedCall, ...]]:
        """Split text into content and calls. Each opening tag outside of another call's JSON makes a call."""
        document = _Document(text)
        content: list[str] = []
        calls: list[ParsedCall] = []
        position = 0
        while (start := text.find(OPEN, position)) >= 0:
            content.append(text[position:start])
            call, position = _read_call(document, start, f"call_{turn}_{len(calls)}")
            calls.append(call)
        content.append(text[position:])
        return "".join(content), tuple(calls)

    def render_call(self, call: FunctionCall) -> str:
        """Return the call between its tags."""
        try:
            body = json.dumps(
                {"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False, allow_nan=False
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"arguments of the call to {call['name']!r} have no JSON form: {error}") from None
        return f"{OPEN}\n{body}\n{CLOSE}"

    def tools_prompt(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return the tools and how to call them, in the words of the Hermes and Qwen templates."""
        if not schemas:
            return ""
        return _PROMPT.format(schemas="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))


def _read_call(document: _Document, start: int, call_id: str) -> tuple[ParsedCall, int]:
    """Read the call whose opening tag stands at `start`; return it and the position after it."""
    begin = _skip_space(document, start + len(OPEN))
    value, stop, fault = _decode(document, begin)
    end, closing_fault = _find_end(document, stop, decoded=fault is None)
    name = value.get("name") if isinstance(value, dict) else None
    fault = fault or _fault(value)
    faults = "; ".join(filter(None, [fault, closing_fault]))
    return (
        ParsedCall(
            id=call_id,
            name=name if isinstance(name, str) else "",
            arguments=None if faults else value["arguments"],
            error=f"{faults}. {_FORM}" if faults else None,
            raw=document[start:end].rstrip(),
        ),
        end,
    )


def _decode(document: _Document, begin: int) -> tuple[Any, int, str | None]:
    """Decode the JSON at `begin`; return the value, the position after it, and what is wrong with it."""
    try:
        value, stop = _DECODER.raw_decode(document, begin)
    except _CallError as error:
        return None, begin, str(error)
    except json.JSONDecodeError as error:
        return None, begin, f"the call is not valid JSON: {error.msg} (at character {error.pos - begin} of it)"
    except ValueError:  # Python's own limit for integers, thousands of digits
        return None, begin, "the call holds an integer of too many digits"
    except RecursionError:
        return None, begin, _TOO_DEEP
    return value, stop, None


def _find_end(document: _Document, stop: int, decoded: bool) -> tuple[int, str | None]:
    """Return the position after the call whose JSON stops at `stop`, and what is wrong with how it ends.

    A broken call ends with its closing tag or before the next opening one; looking no further keeps this linear.
    """
    after = _skip_space(document, stop)
    if document.startswith(CLOSE, after):
        return after + len(CLOSE), None
    opening = document.find(OPEN, stop)
    limit = len(document) if opening < 0 else opening
    closing = document.find(CLOSE, stop, limit)
    if closing < 0:
        return limit, f"{CLOSE} is missing" + ("" if opening < 0 else f" before the next {OPEN}")
    extra = "there is text between the JSON object and " + CLOSE if decoded else None
    return closing + len(CLOSE), extra


def _fault(value: Any) -> str | None:
    """Return what keeps a decoded value from being a call, or None."""
    if not isinstance(value, dict):
        return f"the call must be a JSON object, not {_kind(value)}"
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name.strip():
        return '"name" must be a non-empty string' if "name" in value else '"name" is missing'
    if "arguments" not in value:
        return '"arguments" is missing; write {} where there are none'
    if not isinstance(arguments, dict):
        return f'"arguments" must be a JSON object, not {_kind(arguments)}'
    return _deep_fault(value)


def _deep_fault(value: Any) -> str | None:
    """Return what would break whoever writes the call down: too many levels, or strings without a UTF-8 form."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        parts: list[Any] = []
        for item in level:
            if isinstance(item, str) and _SURROGATE.search(item):
                return "a string holds half of a surrogate pair, which is no character"
            if isinstance(item, dict):
                parts += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                parts += item
        if not parts:
            return None
        level = parts
    return _TOO_DEEP


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, part in pairs:
        if key in value:
            raise _CallError(f"the key {key[:64]!r} stands twice in one object")
        value[key] = part
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _CallError(f"{text[:20]} is not a finite JSON number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)

register_chat_format(HermesFormat())
