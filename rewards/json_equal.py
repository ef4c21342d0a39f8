"""JSON values compared as values, and the checker `json_equal` for answers that are one JSON value.

Numbers are equal by value (1 equals 1.0; no tolerance), a boolean is no number, the order of keys is free, the order
of a list is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn

from .checker import Checker, Verdict

_MAX_DEPTH = 64
_SHOWN_KEY, _SHOWN_DIFFERENCES = 40, 3  # characters of a key, differences in a verdict's detail
_FENCE = "```"


def check_json(value: Any, what: str) -> None:
    """Raise ValueError where `value` is not JSON: another type, a number that is not finite, more than 64 levels."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        parts: list[Any] = []
        for item in level:
            if isinstance(item, dict) and all(isinstance(key, str) for key in item):
                parts += item.values()
            elif isinstance(item, list):
                parts += item
            elif not (item is None or isinstance(item, str | bool | int) or _finite(item)):
                raise ValueError(f"{what} must be JSON, got {item!r:.100}")
        if not parts:
            return
        level = parts
    raise ValueError(f"{what} must be JSON of at most {_MAX_DEPTH} levels")


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def read_json(text: str) -> Any:
    """Return the one JSON value that `text` is, bare or in one fence. Raises ValueError for anything else.

    Refused are a second value or words beside the first, a key that stands twice, NaN, infinities, and numbers so
    large that they would be one.
    """
    body = text.strip()
    if body.startswith(_FENCE) and body.endswith(_FENCE):
        language, _, body = body[len(_FENCE) : -len(_FENCE)].partition("\n")
        if language.strip().lower() not in ("", "json"):
            raise ValueError("the fence does not say json")
    try:
        value = json.loads(body, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_json(value, "the answer")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def canonical(value: Any, *, unordered_lists: bool = False) -> str:
    """Return one text for all values that are equal: keys sorted, lists too where asked, whole floats as integers."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)}:{canonical(value[key], unordered_lists=unordered_lists)}" for key in sorted(value))
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        items = [canonical(item, unordered_lists=unordered_lists) for item in value]
        return f"[{','.join(sorted(items) if unordered_lists else items)}]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, allow_nan=False)


def differences(
    found: Any, wanted: Any, *, extra_keys: bool = False, unordered_lists: bool = False, path: str = "$"
) -> Iterator[str]:
    """Yield where `found` differs from `wanted`, by path. The work is bounded by `wanted`, which `check_json` passed.

    `extra_keys`: keys that `wanted` does not name are free. `unordered_lists`: see `canonical`; `found` must have
    passed `check_json` then.
    """
    options = {"extra_keys": extra_keys, "unordered_lists": unordered_lists}
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key, value in wanted.items():
            inner = f"{path}.{key[:_SHOWN_KEY]}"
            if key in found:
                yield from differences(found[key], value, path=inner, **options)
            else:
                yield f"{inner} is missing"
        if not extra_keys:
            yield from (f"{path}.{str(key)[:_SHOWN_KEY]} is extra" for key in found if key not in wanted)
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        if not unordered_lists:
            for index, pair in enumerate(zip(found, wanted, strict=True)):
                yield from differences(*pair, path=f"{path}[{index}]", **options)
        elif canonical(found, unordered_lists=True) != canonical(wanted, unordered_lists=True):
            yield f"{path} differs"
    elif not _same_scalar(found, wanted):
        yield f"{path} differs"


def _same_scalar(found: Any, wanted: Any) -> bool:
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    numbers = isinstance(found, int | float) and isinstance(wanted, int | float)
    texts = isinstance(found, str) and isinstance(wanted, str)
    return bool(found == wanted) if numbers or texts else found is None and wanted is None


def summary(found: Iterator[str]) -> str:
    """Return the first of `differences` as one short line; empty for none. Half surrogates are shown escaped."""
    first = [text for text, _ in zip(found, range(_SHOWN_DIFFERENCES + 1), strict=False)]
    shown = "; ".join(first[:_SHOWN_DIFFERENCES]).encode("utf-8", "backslashreplace").decode()
    return shown + "; and more" * (len(first) > _SHOWN_DIFFERENCES)


def near_misses(value: Any, *, nested: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield (kind, other value) pairs that look like `value` and are not equal to it: what attacks are made of."""
    if value != {}:
        yield "wrapped in an object", {_new_key(value): value}
    yield "in a list", [value]
    if isinstance(value, dict):
        yield "an extra key", {**value, _new_key(value): 1}
        for key in value:
            yield "a missing key", {other: part for other, part in value.items() if other != key}
    elif isinstance(value, list):
        yield "a longer list", [*value, value[-1] if value else None]
        yield from [("a shorter list", value[:-1])] * bool(value)
    elif isinstance(value, bool):
        yield from [("a changed value", not value), ("a number for a boolean", int(value)), ("a text", str(value))]
    elif isinstance(value, str):
        yield from [("a superstring", f"{value}0"), ("a hedge", f"{value} or {value}0"), ("null", None)]
        yield from [("an empty text", "")] * bool(value)
    else:
        yield "a changed value", -value if value else 1
        yield "a text", str(value)
        yield from [("a boolean", bool(value))] * (value is None or value in (0, 1))
    if nested and isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            for kind, part in near_misses(value[key]):
                yield kind, ({**value, key: part} if isinstance(value, dict) else _with(value, key, part))


def _new_key(value: Any) -> str:
    return "x" * (1 + max(map(len, value), default=0)) if isinstance(value, dict) else "x"


def _with(items: list[Any], index: int, part: Any) -> list[Any]:
    return [*items[:index], part, *items[index + 1 :]]


class JsonEqual(Checker):
    """Right when the answer is one JSON value, bare or in one fence, that equals `gt`.

    `gt` is a JSON value; a text that spells an object or an array stands for what it spells, as text columns of files
    have it. `unordered_lists` makes the order of every list free.
    """

    positives: ClassVar[tuple[tuple[str, Any], ...]] = (
        ('{"a": 1, "b": [true, null, "x"]}', {"b": [True, None, "x"], "a": 1}),
        ('```json\n{"a": {"b": 2.50}}\n```', {"a": {"b": 2.5}}),
        ("```\n[1.0, 2]\n```", [1, 2.0]),
        (' "text"\n', "text"),
        ("-7", -7),
        ('{"a": 1}', '{"a": 1.0}'),
        ("false", False),
    )
    negatives: ClassVar[tuple[tuple[str, Any], ...]] = (
        ("", {"a": 1}),
        ('{"a": 1, "b": 2}', {"a": 1}),
        ("{}", {"a": 1}),
        ('{"a": true}', {"a": 1}),
        ('{"a": "1"}', {"a": 1}),
        ('{"a": 2, "a": 1}', {"a": 1}),
        ('{"a": 1} {"a": 1}', {"a": 1}),
        ('```json\n{"a": 1}\n```\n```json\n{"a": 2}\n```', {"a": 1}),
        ('Not {"a": 1}', {"a": 1}),
        ("{'a': 1}", {"a": 1}),
        ('{"a": 1,}', {"a": 1}),
        ("[2, 1]", [1, 2]),
        ("NaN", 1),
        ("1e999", 1),
        ("text", "text"),
    )

    def __init__(self, *, unordered_lists: bool = False) -> None:
        self.unordered_lists = unordered_lists

    def verdict(self, answer: str, gt: Any) -> Verdict:
        """Judge `answer`. Raises ValueError when `gt` is not JSON (-> `broken`)."""
        wanted = _wanted(gt)
        try:
            found = read_json(answer)
        except ValueError as error:
            return Verdict.unparsed(f"the answer is not one JSON value: {str(error)[:200]}")
        detail = summary(differences(found, wanted, unordered_lists=self.unordered_lists))
        return Verdict.of(not detail, detail)

    def statement(self, gt: Any) -> str:
        """Return `gt` as JSON."""
        return json.dumps(_wanted(gt), ensure_ascii=False)

    def attacks(self, gt: Any) -> Iterator[tuple[str, str]]:
        """Yield texts that hold the right value, or nearly, and do not state it."""
        wanted, right = _wanted(gt), self.statement(gt)
        yield from [("empty", ""), ("blank", " \n"), ("twice", f"{right} {right}"), ("cut", right[:-1] or "{")]
        yield from [("negation", f"It is not {right}"), ("hedge", f"{right} or {{}}"), ("two lines", f"{right}\nnull")]
        yield "two fences", f"```json\n{right}\n```\n```json\nnull\n```"
        yield from [("a comment", f"{right} // or not"), ("a trailing comma", f"{right},"), ("NaN", f"[{right}, NaN]")]
        if isinstance(wanted, Mapping) and wanted:
            key = json.dumps(next(iter(wanted)))
            yield "a key twice, the right one last", f"{{{key}: [0, 1], {right[1:]}"
            yield "a key twice, the right one first", f"{right[:-1]}, {key}: [0, 1]}}"
        if isinstance(wanted, list) and not self.unordered_lists and canonical(wanted) != canonical(wanted[::-1]):
            yield "another order", json.dumps(wanted[::-1])
        for kind, value in near_misses(wanted):
            yield kind, json.dumps(value)


def _wanted(gt: Any) -> Any:
    if isinstance(gt, str) and gt.lstrip()[:1] in ("{", "["):
        try:
            return read_json(gt)
        except ValueError:
            return gt  # a text that merely begins so
    check_json(gt, "gt")
    return gt
