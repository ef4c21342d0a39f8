import pytest

from gymtune.tools import HermesFormat, ParsedCall, ParsedTurn, get_chat_format, register_chat_format
from gymtune.tools import chat_format as module
from gymtune.tools.errors import ConfigError

GOOD = ParsedCall("call_0_0", "add", {"a": 1}, None, "<good>")
BROKEN = ParsedCall("call_0_1", "", None, "not JSON", "<broken>")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FORMATS", dict(module._FORMATS))


def test_message_of_a_turn() -> None:
    assert ParsedTurn("hi", None, ()).message() == {"role": "assistant", "content": "hi"}
    assert ParsedTurn("hi", "why", (GOOD, BROKEN)).message() == {
        "role": "assistant",
        "content": "hi\n<broken>",
        "reasoning_content": "why",
        "tool_calls": [{"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    assert "tool_calls" not in ParsedTurn("", None, (BROKEN,)).message()


@pytest.mark.usefixtures("registry")
def test_registry() -> None:
    class Mine(HermesFormat):
        name = "mine"
        think_open, think_close = "[T]", "[/T]"

    register_chat_format(Mine())
    assert get_chat_format("mine").parse("[T]a[/T]b") == ParsedTurn("b", "a", ())
    assert get_chat_format("mine").render("b", [], "a") == "[T]\na\n[/T]\n\nb"
    with pytest.raises(ConfigError, match="registered already"):
        register_chat_format(Mine())


def test_unknown_format() -> None:
    assert get_chat_format("hermes").name == "hermes"
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        get_chat_format("herms")
