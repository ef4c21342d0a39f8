import pytest

from gymtune.tools import get_chat_format
from gymtune.tools.errors import DataError

DEEPSEEK = get_chat_format("deepseek")
OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3 = f'{CALL}function{SEP}add\n```json\n{{"a": 1}}\n```{END}'
V31 = f'{CALL}add{SEP}{{"a": 1}}{END}'


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (f"{OPEN}{V3}{CLOSE}", "", 1),
        (f"{OPEN}{V3}\n{V3}{CLOSE}", "", 2),
        (f"{OPEN}\n{V3}\n{CLOSE}\n", "", 1),
        (f"{OPEN}{V31}{CLOSE}", "", 1),
        (f"I add.{OPEN}{V31}{V31}{CLOSE}", "I add.", 2),
        (f"{OPEN}{V31}{V3}{CLOSE} and {OPEN}{V31}{CLOSE}.", "and .", 3),
        (f"{OPEN}{V3.replace('```json', '```')}{CLOSE}", "", 1),
        (f"</think>{OPEN}{V31}{CLOSE}", "</think>", 1),
    ],
)
def test_what_the_family_writes(text: str, content: str, count: int) -> None:
    parsed = DEEPSEEK.parse(text)
    assert parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.calls] == [("add", {"a": 1})] * count


def test_a_tool_may_be_named_function() -> None:
    (call,) = DEEPSEEK.parse(f"{OPEN}{CALL}function{SEP}{{}}{END}{CLOSE}").calls
    assert (call.name, call.arguments) == ("function", {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (OPEN, f"{CALL}NAME{SEP} is missing; {END} is missing"),
        (f"{OPEN}{CLOSE}", f"{CALL}NAME{SEP} is missing"),
        (f"{OPEN}text{CLOSE}", f"{CALL}NAME{SEP} is missing"),
        (f"{OPEN}{CALL}add{END}{CLOSE}", f"{CALL}NAME{SEP} is missing"),
        (f"{OPEN}{CALL}{SEP}{{}}{END}{CLOSE}", '"name" must be a non-empty string'),
        (f"{OPEN}{CALL}add{SEP}{END}{CLOSE}", "not valid JSON"),
        (f"{OPEN}{CALL}add{SEP}[1]{END}{CLOSE}", "not an array"),
        (f"{OPEN}{CALL}add{SEP}{{}}", f"{END} is missing"),
        (f"{OPEN}{CALL}add{SEP}{{}}{CLOSE}", f"{END} is missing before {CLOSE}"),
        (f"{OPEN}{CALL}add{SEP}{{}} so{END}{CLOSE}", "text between the arguments"),
        (f"{OPEN}{V31}", f"{CLOSE} is missing"),
        (f"{OPEN}{V3.replace('1}', '1')}{CLOSE}", "not valid JSON"),
        (f"{OPEN}{CALL}function{SEP}add\n```json\n{{}}{END}{CLOSE}", "``` is missing"),
    ],
)
def test_malformed_calls(text: str, says: str) -> None:
    (call,) = DEEPSEEK.parse(text).calls
    assert says in str(call.error)
    assert f"Write {OPEN}{CALL}NAME{SEP}{{...}}{END}{CLOSE}" in str(call.error)
    assert call.raw == text


def test_one_bad_call_leaves_the_others() -> None:
    calls = DEEPSEEK.parse(f"{OPEN}{V31}{CALL}add{SEP}{{{V3}{CLOSE}").calls
    assert [call.error is None for call in calls] == [True, False, True]
    calls = DEEPSEEK.parse(f"{OPEN}{CALL}add{SEP}{{{OPEN}{V31}{CLOSE}").calls
    assert [call.error is None for call in calls] == [False, True]


def test_render_writes_what_v31_writes() -> None:
    call = {"name": "add", "arguments": {"a": f"é{END}"}}
    once = f'{CALL}add{SEP}{{"a": "é{END}"}}{END}'
    assert DEEPSEEK.render("Hi.", [call, call]) == f"Hi.{OPEN}{once}{once}{CLOSE}"
    for name in ("", " add", "a<b"):
        with pytest.raises(DataError, match="cannot write"):
            DEEPSEEK.render("", [{"name": name, "arguments": {}}])
