"""JSON as the standard has it. What Python's reader lets through besides (NaN, a key twice) is refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from .records import shown_key

MAX_DEPTH = 100  # levels of lists and objects; deeper ones would overflow whatever walks them

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """What came instead of JSON, and at which path of the value where that is known."""

    def __init__(self, came: str, path: str = "") -> None:
        super().__init__(came)
        self.came, self.path = came, path


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise JsonError(f"the key {shown_key(twice)!r} twice in one object")
    return made


def _constant(text: str) -> Any:
    raise JsonError(f"{text}, which is no JSON")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise JsonError(f"the number {text[:60]}, which no float holds")
    return number


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
_LENIENT = json.JSONDecoder(parse_int=str, parse_float=str)


def loads(text: str) -> Any:
    """Return the value that `text` holds.

    Raises:
        JsonError: It is no JSON, holds a key twice in one object, a number that is not finite, half a surrogate pair
            (which has no UTF-8 form), or more than 100 levels.
    """
    try:
        return _check(_STRICT.decode(text), text)
    except json.JSONDecodeError as error:
        raise JsonError(f"what is no JSON ({error.msg.removesuffix(' at')} at character {error.pos + 1})") from None
    except RecursionError:
        raise JsonError(f"more than {MAX_DEPTH} levels of lists and objects") from None
    except ValueError as error:
        raise _named(error) from None


def decode_next(text: str, place: int) -> tuple[Any, int]:
    """Return the value that begins at `place`, or the JsonError that `loads` would raise, and where it ends.

    Raises JSONDecodeError or RecursionError where no end can be found.
    """
    try:
        value, end = _STRICT.raw_decode(text, place)
        return _check(value, text[place:end]), end
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return _named(error), _LENIENT.raw_decode(text, place)[1]


def _named(error: ValueError) -> JsonError:
    """Python reads no whole number of more than 4,300 digits, and says so by a plain ValueError."""
    return error if isinstance(error, JsonError) else JsonError("a number of thousands of digits")


def _check(value: Any, text: str) -> Any:
    """Return `value`, read from `text`, when it is neither too deep nor holds half a surrogate pair."""
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if ("\\u" in text and _ESCAPED.search(text)) or (not text.isascii() and _SURROGATE.search(text)):
        _check_surrogates(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = [child for node in inner for child in node]
        if not level:
            return
    raise JsonError(f"more than {MAX_DEPTH} levels of lists and objects")


def _check_surrogates(value: Any) -> None:
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, str):
            if found := _SURROGATE.search(node):
                what = "bytes that are not UTF-8" if "\udc80" <= found[0] <= "\udcff" else "half a surrogate pair"
                raise JsonError(f"{what} at character {found.start() + 1}", path)
        elif isinstance(node, dict):
            for key in filter(_SURROGATE.search, node):
                raise JsonError(f"half a surrogate pair in the key {key[:60]!r}", path)
            todo += [(f"{path}.{shown_key(key)}".removeprefix("."), child) for key, child in node.items()]
        elif isinstance(node, list):
            todo += [(f"{path}[{index}]", child) for index, child in enumerate(node)]
