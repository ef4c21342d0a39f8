from typing import Any

import pytest

from gymtune.tools import compile_schema
from gymtune.tools.errors import ConfigError

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "expression": {"type": "string", "pattern": "^[0-9]"},
        "count": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["expression"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"expression": "1"}, None),
        ({"expression": "1", "maybe": None, "tags": ["a"], "count": 2}, None),
        ({"expression": 5}, "at $.expression: 5 is not of type 'string'"),
        ({"expression": "x"}, "at $.expression: 'x' does not match '^[0-9]'"),
        ({"expression": "1", "count": 0}, "at $.count: 0 is less than the minimum of 1"),
        ({"expression": "1", "count": True}, "at $.count: True is not of type 'integer'"),
        ({"expression": "1", "tags": ["a", "c"]}, "at $.tags[1]: 'c' is not one of ['a', 'b']"),
        ({}, "at $: 'expression' missing"),
        (
            {"expresion": "1"},
            "at $: 'expresion' is unexpected. Did you mean 'expression'?; at $: 'expression' missing",
        ),
        (
            {"expression": "1", "maybe": "x"},
            "at $.maybe: 'x' is not valid under any of the given schemas "
            "('x' is not of type 'integer'; 'x' is not of type 'null')",
        ),
    ],
)
def test_violations_name_path_and_rule(arguments: dict[str, Any], text: str | None) -> None:
    assert compile_schema(OBJECT, "tool 'x'").violations(arguments) == text


def test_at_most_three_in_a_fixed_order() -> None:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in "edcba"}}
    text = compile_schema(schema, "x").violations(dict.fromkeys("bdace", 1))
    assert text == "; ".join(f"at $.{key}: 1 is not of type 'string'" for key in "abc") + "; and 2 more"


def test_several_missing_and_unexpected_keys_are_told_once() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False}
    text = compile_schema(schema, "x").violations(dict.fromkeys("pqrstu", 1))
    assert text is not None
    assert text.count("missing") == 1
    assert "'a', 'b' missing" in text
    assert text.count("is unexpected") == 3
    assert "And 3 more" in text


def test_a_long_value_is_cut_and_the_rule_stays() -> None:
    text = compile_schema(OBJECT, "x").violations({"expression": ["y" * 10_000]})
    assert text is not None
    assert len(text) < 350
    assert text.endswith("is not of type 'string'")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "dict"}, ["$.type", "'dict'", "tool 'x'"]),
        ({"type": "object", "properties": {"a": {"type": "float"}}}, ["$.properties.a.type", "'float'"]),
        ({"type": "object", "required": "a"}, ["$.required", "not of type 'array'"]),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, ["$.properties.a.pattern"]),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, ["#/$defs/none", "leads nowhere"]),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}, ["leads nowhere"]),
        ({"type": "object", "items": [{"$ref": "#"}]}, ["$.items"]),
        ({"type": "object", "allOf": [{"$dynamicRef": "https://example.com/a.json"}]}, ["leads nowhere"]),
    ],
)
def test_a_bad_schema_is_refused(schema: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_schema(schema, "tool 'x'")
    assert all(part in str(caught.value) for part in says)


def test_references_inside_the_schema_work_and_are_copied() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}, "$ref": {"type": "string"}},
        "$defs": {"n": {"type": "integer"}},
    }
    compiled = compile_schema(schema, "x")
    schema["$defs"] = {"n": {"type": "string"}}  # later edits of the caller's dict change nothing
    assert compiled.violations({"a": 1, "$ref": "b"}) is None
    assert compiled.violations({"a": "1"}) == "at $.a: '1' is not of type 'integer'"


def test_endless_recursion_is_a_violation() -> None:
    loop = compile_schema({"type": "object", "$ref": "#"}, "x")
    assert loop.violations({}) == "at $: nested too deeply to be checked"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (deep(40), "nested more than 64 levels"),
        (deep(5000), "nested more than 64 levels"),
        ({"type": ["object", *([1, "a"] * 20_000)]}, "a list of 40001 items that are not all text"),
        ({"type": "object", "required": [{}, 1] * 20_000}, "a list of 40000 items"),
    ],
)
def test_what_the_check_would_choke_on_is_refused_at_once(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compile_schema(schema, "tool 'x'")
    compile_schema(deep(20), "tool 'x'")
    compile_schema({"type": "object", "properties": {"city": {"enum": [f"c{i}" for i in range(5000)]}}}, "tool 'x'")
