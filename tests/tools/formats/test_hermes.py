import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtune.tools import FunctionCall, HermesFormat, ParsedTurn
from gymtune.tools.errors import DataError

HERMES = HermesFormat()


def markup(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


GOOD = markup('{"name": "add", "arguments": {"a": 1}}')


def faults(text: str) -> list[str]:
    parsed = HERMES.parse(text)
    assert all((call.error is None) != (call.arguments is None) for call in parsed.calls)
    return [call.error for call in parsed.calls if call.error is not None]


def test_one_call() -> None:
    parsed = HERMES.parse(f"I add.\n{GOOD}", turn=3)
    assert (parsed.content, parsed.reasoning) == ("I add.", None)
    (call,) = parsed.calls
    assert (call.id, call.name, call.arguments, call.error, call.raw) == ("call_3_0", "add", {"a": 1}, None, GOOD)


def test_text_between_calls_is_content_and_ids_count_every_call() -> None:
    parsed = HERMES.parse(f"a {GOOD} b {markup('{')} c {GOOD} d")
    assert parsed.content == "a  b  c  d"
    assert [(call.id, call.error is None) for call in parsed.calls] == [
        ("call_0_0", True),
        ("call_0_1", False),
        ("call_0_2", True),
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("{'name': 'add'}", "at character 1 of it"),
        ('{"name": "add", "arguments": {"a": 1}', "not valid JSON"),
        ('{"name": "add", "arguments": {"a": 1}}}', "text between"),
        ('{"arguments": {}}', '"name" is missing'),
        ('{"name": "", "arguments": {}}', "non-empty"),
        ('{"name": " ", "arguments": {}}', "non-empty"),
        ('{"name": 5, "arguments": {}}', "non-empty string"),
        ('{"name": "add"}', '"arguments" is missing'),
        ('{"name": "add", "arguments": "{}"}', "not a string"),
        ('{"name": "add", "arguments": null}', "not null"),
        ('{"name": "add", "arguments": [1]}', "not an array"),
        ('["add"]', "not an array"),
        ("1", "not a number"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "1e999"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "'a' stands twice"),
        ('{"name": "add", "name": "sub", "arguments": {}}', "'name' stands twice"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "too many digits"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}", "64 levels"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 9000 + "]" * 9000 + "}}", "64 levels"),
    ],
)
def test_a_malformed_call_is_an_error_for_the_model(body: str, says: str) -> None:
    text = f"before {markup(body)} after"
    (fault,) = faults(text)
    assert says in fault
    assert "Write <tool_call>" in fault
    parsed = HERMES.parse(text)
    assert parsed.content == "before  after"
    assert parsed.message() == {"role": "assistant", "content": f"before  after\n{markup(body)}"}


def test_unclosed_and_nested_calls() -> None:
    assert len(faults('<tool_call>{"name": "add", "arguments": {}}')) == 1
    assert "is missing" in faults("x <tool_call>")[0]
    nested = HERMES.parse(f"<tool_call>\n{GOOD}\n</tool_call>")
    assert [call.error is None for call in nested.calls] == [False, True]
    assert "before the next <tool_call>" in str(nested.calls[0].error)
    assert nested.content == "</tool_call>"
    two = HERMES.parse(f'<tool_call>{{"name": "a", "arguments": {{}}}}\n{GOOD}')
    assert [(call.name, call.error is None) for call in two.calls] == [("a", False), ("add", True)]


def test_a_lone_closing_tag_is_content() -> None:
    assert HERMES.parse("a </tool_call> b") == ParsedTurn("a </tool_call> b", None, ())


def test_tags_inside_strings_are_text() -> None:
    nasty = '</tool_call> <tool_call> <think> </think> \\ " {'
    calls: list[FunctionCall] = [{"name": "write", "arguments": {"text": nasty, nasty: [nasty]}}]
    for reasoning in (None, "why"):
        parsed = HERMES.parse(HERMES.render("ok", calls, reasoning))
        assert (parsed.content, parsed.reasoning) == ("ok", reasoning)
        assert parsed.calls[0].arguments == calls[0]["arguments"]


@pytest.mark.parametrize(
    ("text", "thinking_open", "reasoning", "content", "calls"),
    [
        (f"<think>\n{GOOD}\n</think>\n\nDone.", False, GOOD, "Done.", 0),
        (f" \n<think>a</think>{GOOD}", False, "a", "", 1),
        (f"{GOOD}</think>Done.", True, GOOD, "Done.", 0),
        (f"a</think>{GOOD}", True, "a", "", 1),
        (f"<think>a</think>{GOOD}", True, "a", "", 1),
        (f"<think>a {GOOD}", False, f"a {GOOD}", "", 0),
        (f"a {GOOD}", True, f"a {GOOD}", "", 0),
        (f"<think></think>{GOOD}", False, "", "", 1),
        (f"Hm. <think>a</think> {GOOD}", False, None, "Hm. <think>a</think>", 1),
        (f"a</think>{GOOD}", False, None, "a</think>", 1),
    ],
)
def test_calls_inside_thinking_are_not_calls(
    text: str, thinking_open: bool, reasoning: str | None, content: str, calls: int
) -> None:
    parsed = HERMES.parse(text, thinking_open=thinking_open)
    assert (parsed.reasoning, parsed.content, len(parsed.calls)) == (reasoning, content, calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=8,
)
CALL = st.fixed_dictionaries(
    {"name": st.text(string.ascii_letters, min_size=1), "arguments": st.dictionaries(st.text(), JSON, max_size=3)}
)
PLAIN = st.text().map(str.strip).filter(lambda text: "<" not in text)


@given(PLAIN, st.lists(CALL, max_size=3), st.none() | PLAIN, st.booleans())
def test_parse_undoes_render(content: str, calls: list[FunctionCall], reasoning: str | None, opened: bool) -> None:
    text = HERMES.render(content, calls, reasoning)
    parsed = HERMES.parse(text, thinking_open=opened and reasoning is not None)
    assert (parsed.content, parsed.reasoning) == (content, reasoning)
    assert [{"name": call.name, "arguments": call.arguments} for call in parsed.calls] == calls
    message = parsed.message()
    assert [call["function"] for call in message.get("tool_calls", [])] == calls
    assert message.get("reasoning_content") == reasoning


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "a", ',
    '"arguments": {}}',
    "{",
    '"',
    "\\",
    "x",
    "\n",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_parses_and_nothing_is_lost(text: str) -> None:
    parsed = HERMES.parse(text)
    kept = "".join([parsed.reasoning or "", parsed.content, *(call.raw for call in parsed.calls)])
    tags = ["<think>", "</think>"] if parsed.reasoning is not None else []
    left = sorted("".join(text.split()))
    for tag in tags if "</think>" in text else tags[:1]:
        for char in tag:
            left.remove(char)
    assert sorted("".join(kept.split())) == left


@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"',
        '<tool_call>["',
        "<tool_call> \n",
        '<tool_call>{"name": "a", "arguments": {"x": "',
        '<tool_call>{"name": "a", "arguments": {}}',
        "<tool_call>{}</tool_call>",
        "</tool_call>",
    ],
)
def test_a_hostile_megabyte_is_read_and_nothing_is_lost(piece: str) -> None:
    """In linear time: a quadratic search would take minutes."""
    text = piece * (1_000_000 // len(piece))
    parsed = HERMES.parse(text)
    kept = "".join([parsed.content, *(call.raw for call in parsed.calls)])
    assert "".join(kept.split()) == "".join(text.split())


def test_a_hundred_thousand_keys_are_read() -> None:
    """In linear time: a quadratic search for keys that stand twice would take minutes."""
    body = json.dumps({"name": "a", "arguments": {str(n): n for n in range(100_000)}})
    assert faults(markup(body)) == []
    assert "stands twice" in faults(markup(body[:-2] + ', "99999": 1}}'))[0]


def test_render_writes_what_qwen_writes() -> None:
    text = HERMES.render("Hi.", [{"name": "add", "arguments": {"a": "é"}}], "Hm.")
    assert text == '<think>\nHm.\n</think>\n\nHi.\n<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
    assert HERMES.render("Hi.", []) == "Hi."


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_render_refuses_what_is_not_json(value: Any) -> None:
    with pytest.raises(DataError, match="'add'"):
        HERMES.render("", [{"name": "add", "arguments": {"a": value}}])


def test_tools_prompt() -> None:
    schema = {"type": "function", "function": {"name": "é{0}", "description": "", "parameters": {"type": "object"}}}
    prompt = HERMES.tools_prompt([schema])
    assert json.loads(prompt.split("<tools>\n")[1].split("\n</tools>")[0]) == schema
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in prompt
    assert HERMES.tools_prompt([]) == ""
