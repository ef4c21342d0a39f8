import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtune.rewards import check
from gymtune.rewards.json_equal import JsonEqual, canonical, check_json, differences, near_misses, read_json, summary
from gymtune.rewards.trial import try_checker

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def shuffled(value: Any) -> Any:
    """The same value with keys turned round and whole numbers of the other type."""
    if isinstance(value, dict):
        return {key: shuffled(part) for key, part in reversed(value.items())}
    if isinstance(value, list):
        return [shuffled(part) for part in value]
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return value


@given(VALUES)
def test_a_value_equals_itself_in_any_spelling(value: Any) -> None:
    gt = [value]  # in a list, so that a text is never read as a spelt value
    for text in (json.dumps(gt), json.dumps(gt, indent=3, ensure_ascii=False), json.dumps(shuffled(gt))):
        assert check(JsonEqual(), text, gt).kind == "right"
        assert check(JsonEqual(), f"```json\n{text}\n```", gt).kind == "right"
    assert canonical(gt) == canonical(shuffled(gt))


@given(VALUES)
def test_near_misses_are_refused(value: Any) -> None:
    gt = [value]
    for checker in (JsonEqual(), JsonEqual(unordered_lists=True)):
        for kind, answer in checker.attacks(gt):
            assert check(checker, answer, gt).success is False, kind
        for kind, other in near_misses(gt):
            assert canonical(other) != canonical(gt), kind


@given(VALUES, VALUES)
def test_equality_agrees_with_canonical_texts(one: Any, two: Any) -> None:
    assert (not any(differences(one, two))) is (canonical(one) == canonical(two))


@pytest.mark.parametrize(
    ("answer", "gt", "right"),
    [
        ("1", 1.0, True),
        ("1.0", True, False),
        ("true", 1, False),
        ("0", False, False),
        ("null", False, False),
        ("0", None, False),
        ("-0.0", 0, True),
        ("1e2", 100, True),
        ("9007199254740993", 9007199254740992.0, False),  # 2**53 + 1 is no float
        ("0.30000000000000004", 0.3, False),  # no tolerance
        ('"1"', 1, False),
        ('{"a": {"b": 1}}', {"a": {"b": 1, "c": 2}}, False),
        ('{"a": {"b": 1, "c": 2}}', {"a": {"b": 1}}, False),
        ("[1, 2]", [2, 1], False),
        ("[1, 1, 2]", [1, 2], False),
        ("[]", {}, False),
        ('"{no object"', "{no object", True),
        ('"{\\"a\\": 1}"', '{"a": 1}', False),  # the spelt object, not its spelling
        ('"\\u00e9"', "é", True),
        ('"\\ud800"', "?", False),
    ],
)
def test_equality(answer: str, gt: Any, right: bool) -> None:
    assert check(JsonEqual(), answer, gt).success is right


def test_lists_without_order_are_multisets_at_every_level() -> None:
    gt = {"a": [1, [2.0, 3], {"b": [True, "x"]}]}
    free = JsonEqual(unordered_lists=True)
    answer = '{"a": [{"b": ["x", true]}, [3, 2], 1.0]}'
    assert check(free, answer, gt).success is True
    assert check(JsonEqual(), answer, gt).success is False
    assert check(free, "[1, 1, 2]", [1, 2, 2]).success is False
    assert check(free, "[1, 1]", [True, 1]).success is False
    assert [r.accepted for r in try_checker(free, [gt, [1, 2]]).values() if r.accepted] == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "a key stands twice"),
        ("[NaN]", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("[1e400]", "must be JSON, got inf"),
        ("9" * 5000, "Exceeds the limit"),
        ("```python\n1\n```", "does not say json"),
        ("```json\n1\n``` and more", "Expecting value"),
        ("The value is:\n```json\n1\n```", "Expecting value"),
        ("[" * 65 + "]" * 65, "at most 64 levels"),
        ("[" * 1_000_000, "nested too deeply"),
        ('{"a":' * 300_000, "nested too deeply"),
    ],
)
def test_what_is_not_one_value_is_unparsed(answer: str, why: str) -> None:
    verdict = check(JsonEqual(), answer, [1])
    assert verdict.kind == "unparsed"
    assert why in verdict.detail
    assert len(verdict.detail) < 300


def test_64_levels_are_read() -> None:
    assert read_json("[" * 64 + "]" * 64)


@pytest.mark.parametrize("gt", [object(), (1, 2), {1: 2}, float("nan"), [float("inf")], {"a": {1, 2}}])
def test_a_gt_that_is_not_json_breaks_the_checker(gt: Any) -> None:
    verdict = check(JsonEqual(), "1", gt)
    assert (verdict.kind, verdict.score) == ("broken", None)
    assert "gt must be JSON" in verdict.detail
    with pytest.raises(ValueError, match="this must be JSON"):
        check_json(gt, "this")


def test_the_detail_names_paths() -> None:
    gt = {"user": {"name": "Ann", "tags": ["a", "b"]}, "n": 1}
    detail = check(JsonEqual(), '{"user": {"name": "Bob", "tags": ["a", "c"], "new": 1}}', gt).detail
    assert detail == "$.user.name differs; $.user.tags[1] differs; $.user.new is extra; and more"
    assert summary(differences({}, {"k" * 10_000: 1})) == f"$.{'k' * 40} is missing"
    assert summary(differences({"\ud800": 1}, {})) == "$.\\ud800 is extra"


@pytest.mark.parametrize("piece", ["[", '{"a":', "1,", '"x" ', "\\", "```", "\n"])
def test_a_megabyte_of_junk_is_refused(piece: str) -> None:
    """In linear time: a quadratic search would take minutes."""
    text = piece * (1_000_000 // len(piece))
    for answer in (text, f"[{text}]", f"```json\n{text}\n```"):
        assert check(JsonEqual(unordered_lists=True), answer, [1]).success is False
