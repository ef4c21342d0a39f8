"""JSON as calls hold it: decoded from the middle of a text, with what is wrong told to the model; written without loss.

The decoder, and not a search for the closing markup, says where a call ends: markup inside a string ends nothing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ..chat_format import ParsedCall
from ..errors import DataError

_MAX_DEPTH = 64
_TOO_DEEP = f"nested more than {_MAX_DEPTH} levels deep"
_SPACE = re.compile(r"\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Document(str):
    """Text whose line numbers nobody asks for.

    `JSONDecodeError` counts the lines before the error, which makes a megabyte of broken calls quadratic. Were it to
    count in another way one day, parsing would be slower and nothing else.
    """

    __slots__ = ()

    def count(self, *_: object) -> int:
        """Return 0: no lines."""
        return 0

    def rfind(self, *_: object) -> int:
        """Return -1: no last line break."""
        return -1


class _CallError(ValueError):
    """Valid JSON for Python's decoder and yet not for a call; the text is for the model."""


def skip_space(text: str, position: int) -> int:
    """Return the first position from `position` on that holds no white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def decode(document: Document, begin: int) -> tuple[Any, int, str | None]:
    """Decode the JSON that begins exactly at `begin`.

    Returns the value, the position after it, and what is wrong (None when nothing is; else the value is None and the
    position is `begin`). Refuses keys that stand twice and numbers that are not finite.
    """
    try:
        value, stop = _DECODER.raw_decode(document, begin)
    except _CallError as error:
        return None, begin, str(error)
    except json.JSONDecodeError as error:
        return None, begin, f"not valid JSON: {error.msg} (at character {error.pos - begin} of it)"
    except ValueError:  # Python's own limit for integers, thousands of digits
        return None, begin, "an integer has too many digits"
    except RecursionError:
        return None, begin, _TOO_DEEP
    return value, stop, None


def decode_whole(text: str) -> tuple[Any, str | None]:
    """Decode a text that is JSON and nothing else; return the value and what is wrong with it."""
    document = Document(text)
    value, stop, fault = decode(document, skip_space(document, 0))
    if fault is None and skip_space(document, stop) < len(document):
        return None, "not valid JSON: there is text after it"
    fault = fault or deep_fault(value)
    return (None, fault) if fault else (value, None)


def call_fault(value: Any, key: str = "arguments") -> str | None:
    """Return what keeps a decoded value from being a call whose arguments stand under `key`, or None."""
    if not isinstance(value, dict):
        return f"the call must be a JSON object, not {_kind(value)}"
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name.strip():
        return '"name" must be a non-empty string' if "name" in value else '"name" is missing'
    if key not in value:
        return f'"{key}" is missing; write {{}} where there are none'
    if not isinstance(arguments, dict):
        return f'"{key}" must be a JSON object, not {_kind(arguments)}'
    return deep_fault(value)


def deep_fault(value: Any) -> str | None:
    """Return what would break whoever writes the value down: too many levels, or strings without a UTF-8 form."""
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


def parsed_call(
    call_id: str, raw: str, value: Any, faults: list[str | None], *, form: str, key: str = "arguments"
) -> ParsedCall:
    """Make the call of a decoded value, malformed when there is a fault.

    Args:
        call_id: Its id.
        raw: Its markup.
        value: An object with `name` and, under `key`, the arguments; anything when there is a fault.
        faults: What is wrong, None for what is not.
        form: How to write a call, told to the model after the faults.
        key: Where the arguments stand.
    """
    told = "; ".join(filter(None, faults))
    name = value.get("name") if isinstance(value, dict) else None
    return ParsedCall(
        id=call_id,
        name=name if isinstance(name, str) else "",
        arguments=None if told else value[key],
        error=f"{told}. {form}" if told else None,
        raw=raw.strip(),
    )


def encode(value: Any, name: str) -> str:
    """Write a value of the call to `name` as JSON on one line. Raises DataError when it has no JSON form."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"arguments of the call to {name!r} have no JSON form: {error}") from None


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


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
