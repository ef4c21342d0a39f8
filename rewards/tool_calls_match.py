"""The checker `tool_calls_match`: the agent made the wanted calls, no more and no fewer.

A wanted call is `{"name": ..., "arguments": {...}}`, whose arguments must be equal by the rules of `json_equal`, or
BFCL's `{function: {parameter: [acceptable values]}}`, where "" among the values says that the parameter may be left
out, an empty list that it must be, and a dict value lists acceptable values for each of its keys. BFCL's values are
compared by its own rules: texts without ` ,./-_*^`, in lower case, with `'` as `"`; an integer counts as a float and
not the other way about; a boolean is no number.

Differences from BFCL's own checker: calls are assigned to wanted ones by a matching that is found whenever there is
one (theirs is greedy), the type of a value is that of the acceptable ones (theirs asks the tool's schema too, which a
required parameter that is left out must pass as well), and texts of nothing but those signs are compared as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from ..tools.messages import FunctionCall
from .checker import Checker, Verdict
from .episode import Episode
from .json_equal import canonical, check_json, differences, near_misses

_MAY_BE_LEFT_OUT = ""
_UNSEEN = str.maketrans("'", '"', " ,./-_*^")
_SHOWN = 60  # characters of a wanted call's name in a verdict's detail

_WEATHER = {"name": "weather", "arguments": {"city": "Paris", "days": 3}}
_TIME = {"name": "time", "arguments": {}}
_BFCL = [{"weather": {"city": ["Paris", "Paris, France"], "days": [3, ""], "unit": ["", "C"]}}]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One wanted call: its name, what its arguments must pass, and arguments that do."""

    name: str
    accepts: Callable[[Mapping[str, Any]], bool]
    gold: dict[str, Any]
    acceptable: Mapping[str, Sequence[Any]] | None  # None for exact arguments


class ToolCallsMatch(Checker):
    """Right when the calls are the wanted ones: in any order, or with `ordered` in the order of `gt`.

    `gt` is a list of wanted calls; an empty one wants no call at all. Every call of the episode counts; a malformed
    one, a superfluous one and one made twice are wrong.
    """

    positives: ClassVar[tuple[tuple[Any, Any], ...]] = (
        ([_WEATHER], [_WEATHER]),
        ([_TIME, _WEATHER], [_WEATHER, _TIME]),
        ([], []),
        ([{"name": "weather", "arguments": {"days": 3.0, "city": "Paris"}}], [_WEATHER]),
        ([{"name": "weather", "arguments": {"city": "paris france", "days": 3}}], _BFCL),
        ([{"name": "weather", "arguments": {"city": "Paris", "unit": "c"}}], _BFCL),
    )
    negatives: ClassVar[tuple[tuple[Any, Any], ...]] = (
        ([], [_WEATHER]),
        ([_TIME], []),
        ([_WEATHER, _WEATHER], [_WEATHER]),
        ([_WEATHER, _TIME], [_WEATHER]),
        ([{"name": "weather", "arguments": {"city": "Paris", "days": "3"}}], [_WEATHER]),
        ([{"name": "weather", "arguments": {"city": "paris", "days": 3}}], [_WEATHER]),
        ([{"name": "weather", "arguments": {"city": ["Paris", "Paris, France"], "days": 3}}], _BFCL),
        ([{"name": "weather", "arguments": {"city": "Paris", "days": 3.0}}], _BFCL),
        ([{"name": "weather", "arguments": {"days": 3}}], _BFCL),
        ([{"name": "weather", "arguments": {"city": "Paris", "days": True}}], _BFCL),
        ([{"name": "forecast", "arguments": {"city": "Paris"}}], _BFCL),
        ('[{"name": "time", "arguments": {}}]', [_TIME]),
    )

    reads = "calls"

    def __init__(self, *, ordered: bool = False) -> None:
        self.ordered = ordered

    def verdict(self, answer: Sequence[FunctionCall] | str, gt: Any) -> Verdict:
        """Judge the calls `answer`. Raises ValueError when `gt` is no list of wanted calls (-> `broken`)."""
        wanted = _read(gt)
        if isinstance(answer, str):
            return Verdict.unparsed("the answer is no list of calls")
        if len(answer) != len(wanted):
            return Verdict.of(False, f"{len(answer)} calls, {len(wanted)} wanted")
        fits = [
            [i for i, call in enumerate(answer) if call["name"] == want.name and want.accepts(call["arguments"])]
            for want in wanted
        ]
        missed = next((i for i, those in enumerate(fits) if i not in those), None) if self.ordered else _unmatched(fits)
        return Verdict.of(missed is None, "" if missed is None else f"no call for {wanted[missed].name!r:.{_SHOWN}}")

    def judge(self, episode: Episode) -> Verdict:
        """Judge every call of the episode."""
        calls: list[FunctionCall] = []
        for call in episode.calls:
            if call.error is not None or call.arguments is None:
                _read(episode.gt)  # a gt that cannot be compared with is broken here too
                return Verdict.of(False, "a call is malformed")
            calls.append({"name": call.name, "arguments": call.arguments})
        return self.verdict(calls, episode.gt)

    def wants_nothing(self, gt: Any) -> bool:
        """Tell whether no call is wanted."""
        return bool(gt == [])

    def gold(self, gt: Any) -> list[FunctionCall]:
        """Return calls that are right: the first acceptable value of each parameter. Raises as `verdict`."""
        return [{"name": want.name, "arguments": want.gold} for want in _read(gt)]

    def attacks(self, gt: Any) -> Iterator[tuple[str, Any]]:
        """Yield lists of calls that are nearly the wanted ones, and texts that merely tell of them."""
        wanted, right = _read(gt), self.gold(gt)
        yield "an extra call", [*right, _call("x", {})]
        if right:
            yield from [("no call", []), ("no text", ""), ("told, not done", json.dumps(right))]
        if self.ordered and canonical(list(right)) != canonical(right[::-1]):
            yield "another order", right[::-1]
        for index, (want, call) in enumerate(zip(wanted, right, strict=True)):
            others = right[:index], right[index + 1 :]
            yield "a call dropped", [*others[0], *others[1]]
            yield "a call doubled", [*right, call]
            for kind, other in _near_calls(want, call):
                yield kind, [*others[0], other, *others[1]]


def _call(name: str, arguments: dict[str, Any]) -> FunctionCall:
    return {"name": name, "arguments": arguments}


def _read(gt: Any) -> list[_Wanted]:
    if not isinstance(gt, list):
        raise ValueError(f"gt must be a list of wanted calls, got {gt!r:.100}")
    check_json(gt, "gt")
    return [_read_wanted(item) for item in gt]


def _read_wanted(item: Any) -> _Wanted:
    match item:
        case {"name": str(name), "arguments": dict(arguments)} if len(item) == 2:
            return _Wanted(name, lambda found: not any(differences(found, arguments)), arguments, None)
        case dict() if len(item) == 1:
            name, choices = next(iter(item.items()))
            if isinstance(choices, dict) and all(isinstance(values, list) for values in choices.values()):
                return _Wanted(name, lambda found: _all_acceptable(found, choices), _first(choices), choices)
    raise ValueError(
        'a wanted call must be {"name": ..., "arguments": {...}} or {function: {parameter: [acceptable, ...]}}, '
        f"got {item!r:.100}"
    )


def _all_acceptable(found: Any, choices: Mapping[str, Any]) -> bool:
    """Tell whether every value is acceptable for its key, and every key that must be there is."""
    if not isinstance(found, dict) or not found.keys() <= choices.keys():
        return False
    return all(
        any(_acceptable(found[key], choice) for choice in _choices(values)) if key in found else _may_miss(values)
        for key, values in choices.items()
    )


def _choices(values: Any) -> list[Any]:
    """Return the acceptable values; a few records have one bare value in place of their list."""
    return values if isinstance(values, list) else [values]


def _may_miss(values: Any) -> bool:
    return values == [] or _MAY_BE_LEFT_OUT in _choices(values)


def _acceptable(value: Any, choice: Any) -> bool:
    match choice:
        case dict():
            return _all_acceptable(value, choice)
        case list():
            alike = isinstance(value, list) and len(value) == len(choice)
            return alike and all(map(_acceptable, value, choice))
        case str():
            return isinstance(value, str) and (_plain(value) or value) == (_plain(choice) or choice)
        case float():
            return isinstance(value, int | float) and not isinstance(value, bool) and value == choice
    return type(value) is type(choice) and bool(value == choice)  # an integer, a boolean, null


def _plain(text: str) -> str:
    return text.translate(_UNSEEN).lower()


def _first(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first acceptable value of each key, without the keys that may be left out by that."""
    first = {key: _choices(values)[0] for key, values in choices.items() if values != []}
    return {key: _first_of(choice) for key, choice in first.items() if choice != _MAY_BE_LEFT_OUT}


def _first_of(choice: Any) -> Any:
    match choice:
        case dict():
            return _first(choice)
        case list():
            return [_first_of(item) for item in choice]
    return choice


def _unmatched(fits: Sequence[Sequence[int]]) -> int | None:
    """Return the first row that is left without a column when each row takes one of `fits[row]`, or None.

    Kuhn's algorithm (1955) for bipartite matching: a row that finds its columns taken looks, breadth first, for owners
    that can move to another.
    """
    owner: dict[int, int] = {}  # column -> row
    column: dict[int, int] = {}  # row -> column
    for root in range(len(fits)):
        reached: dict[int, int] = {}  # column -> row from which it was reached
        rows, free = [root], None
        for row in rows:
            new = [c for c in fits[row] if c not in reached]
            reached.update(dict.fromkeys(new, row))
            free = next((c for c in new if c not in owner), None)
            if free is not None:
                break
            rows += [owner[c] for c in new]
        if free is None:
            return root
        row = -1
        while row != root:
            row = reached[free]
            owner[free], column[row], free = row, free, column.get(row, -1)
    return None


def _near_calls(want: _Wanted, call: FunctionCall) -> Iterator[tuple[str, FunctionCall]]:
    """Yield calls that are nearly `call`, each of which `want` must refuse."""
    name, arguments = call["name"], call["arguments"]
    exact = want.acceptable is None
    choices = {key: [value] if want.acceptable is None else want.acceptable[key] for key, value in arguments.items()}
    known = {key: set(map(_text, values)) for key, values in choices.items()}
    yield "another name", _call(f"{name}x", arguments)
    yield "an extra argument", _call(name, {**arguments, "x" * (1 + max(map(len, arguments), default=0)): 1})
    for key, value in arguments.items():
        if exact or not _may_miss(choices[key]):
            yield "a missing argument", _call(name, {k: v for k, v in arguments.items() if k != key})
        yield "every candidate", _call(name, {**arguments, key: [*choices[key], choices[key]]})
        for kind, other in near_misses(value, nested=exact):
            # a key of BFCL's dicts may be one that can be left out, which the value alone does not tell
            if _text(other) not in known[key] and (exact or kind != "a missing key"):
                yield f"value: {kind}", _call(name, {**arguments, key: other})
    for one, two in pairwise(arguments):
        if _text(arguments[one]) not in known[two] or _text(arguments[two]) not in known[one]:
            yield "swapped arguments", _call(name, {**arguments, one: arguments[two], two: arguments[one]})


def _text(value: Any) -> str:
    """Return one text for all values that BFCL's rules may take for one another."""
    return _plain(canonical(value)) if isinstance(value, str) else canonical(value)
