import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymtune.tools import ConfigError, Outcome, ParsedCall, Toolbox, ToolResult
from gymtune.tools.library import KeyValueStore

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def call(store: KeyValueStore, name: str, **arguments: object) -> ToolResult:
    return Toolbox(store.tools()).call(ParsedCall("call_0_0", name, arguments, None, ""))


def test_an_episode() -> None:
    store = KeyValueStore({"a": 1})
    assert call(store, "set", key="b", value={"x": [1, None]}).content == '{"set": "b"}'
    assert call(store, "get", key="b").content == '{"x": [1, null]}'
    assert call(store, "list_keys").content == '["a", "b"]'
    assert call(store, "list_keys", prefix="b").content == '["b"]'
    assert call(store, "delete", key="a").content == '{"deleted": "a"}'
    assert call(store, "set", key="b", value="new").outcome is Outcome.ok
    assert store.state() == {"b": "new"}
    for name in ("get", "delete"):
        missing = call(store, name, key="a")
        assert missing.outcome is Outcome.exception
        assert "no key 'a'" in missing.content


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=20), JSON, max_size=5))
def test_every_json_value_comes_back(items: dict[str, object]) -> None:
    store = KeyValueStore()
    box = Toolbox(store.tools())
    for key, value in items.items():
        assert box.call(ParsedCall("c", "set", {"key": key, "value": value}, None, "")).outcome is Outcome.ok
    assert store.state() == items
    for key, value in items.items():
        content = box.call(ParsedCall("c", "get", {"key": key}, None, "")).content
        assert (content if isinstance(value, str) else json.loads(content)) == value


def test_nobody_changes_a_stored_value_from_outside() -> None:
    given_value = {"n": [1]}
    store = KeyValueStore({"a": given_value})
    given_value["n"].append(2)
    store.state()["a"]["n"].append(3)
    assert store.state() == {"a": {"n": [1]}}


def test_limits_are_told_and_change_nothing() -> None:
    store = KeyValueStore({"a": 1}, max_items=2, max_bytes=20, max_key_chars=3)
    assert "at most 3" in call(store, "set", key="long", value=1).content
    assert "full: 23 bytes" in call(store, "set", key="a", value="x" * 21).content
    assert call(store, "set", key="b", value="x" * 16).outcome is Outcome.ok  # 1 + 18 bytes
    assert "full: 21 bytes" in call(store, "set", key="a", value=123).content
    assert "at most 2" in call(store, "set", key="c", value=1).content
    assert store.state() == {"a": 1, "b": "x" * 16}
    assert call(store, "set", key="b", value=0).outcome is Outcome.ok


def test_hostile_values() -> None:
    store = KeyValueStore()
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (float("nan"), float("inf"), deep):
        assert "error (exception): the value has no JSON form" in call(store, "set", key="a", value=value).content
    assert call(store, "set", key="a", value="x" * 2_000_000).outcome is Outcome.exception
    assert len(call(store, "get", key="x" * 1_000_000).content) < 400
    assert store.state() == {}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get", {}),
        ("get", {"key": 1}),
        ("set", {"key": "a"}),
        ("set", {"key": "a", "value": 1, "ttl": 2}),
        ("delete", {"key": None}),
    ],
)
def test_wrong_arguments_are_schema_violations(name: str, arguments: dict[str, object]) -> None:
    assert call(KeyValueStore(), name, **arguments).outcome is Outcome.schema_violation


def test_bad_items_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="no JSON form"):
        KeyValueStore({"a": {1, 2}})
    with pytest.raises(ConfigError, match="strings as keys"):
        KeyValueStore({1: 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="at most 1"):
        KeyValueStore({"a": 1, "b": 2}, max_items=1)
