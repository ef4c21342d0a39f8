import pytest

from gymtune.tools import ParsedTurn, get_chat_format

LLAMA = get_chat_format("llama3_json")
ADD = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (ADD, "", ["add"]),
        (f" \n{ADD}\n", "", ["add"]),
        (f"<|python_tag|>{ADD}", "", ["add"]),
        (f"I add.<|python_tag|>{ADD}", "I add.", ["add"]),
        (f"{ADD}; {ADD}", "", ["add", "add"]),
        (f"{ADD};{ADD};", "", ["add", "add"]),
        (f"{ADD}\n{ADD}", "", ["add", "add"]),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', "", ["add"]),
        ('{"name": "add", "arguments": {"a": 1}}', "", ["add"]),
    ],
)
def test_what_the_family_writes(text: str, content: str, names: list[str]) -> None:
    parsed = LLAMA.parse(text)
    assert parsed.content == content
    assert [call.name for call in parsed.calls] == names
    assert all(call.arguments == {"a": 1} for call in parsed.calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 5}',
        '{"name": "Bob"}',
        '{"parameters": {}}',
        '{"answer":',
        "{x}",
        "{",
        "[1, 2]",
        f"[{ADD}]",
        f"Say {ADD}",
        "5",
        "",
    ],
)
def test_json_without_name_and_parameters_is_an_answer(text: str) -> None:
    assert LLAMA.parse(text) == ParsedTurn(text, None, ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<|python_tag|>", "not valid JSON"),
        ('<|python_tag|>brave_search.call(query="x")', "not valid JSON"),
        ('<|python_tag|>{"parameters": {}}', '"name" is missing'),
        ('<|python_tag|>{"name": "add"}', '"parameters" is missing'),
        ('<|python_tag|>["add"]', "not an array"),
        ('{"name": "add", "parameters": [1]}', '"parameters" must be a JSON object, not an array'),
        ('{"name": "add", "arguments": "{}"}', '"arguments" must be a JSON object, not a string'),
        ('{"name": "", "parameters": {}}', "non-empty"),
        ('{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
        (f"{ADD} I hope so.", "text after the JSON object"),
        ('{"type": "function", "name": "add",', "not valid JSON"),
    ],
)
def test_malformed_calls(text: str, says: str) -> None:
    (call,) = LLAMA.parse(text).calls
    assert says in str(call.error)
    assert 'Write {"name": "...", "parameters": {...}}' in str(call.error)
    assert call.raw == text


def test_a_good_call_before_a_broken_one_stands() -> None:
    first, second = LLAMA.parse(f"{ADD}; {{").calls
    assert (first.error, second.arguments) == (None, None)


def test_render() -> None:
    call = {"name": "add", "arguments": {"a": "é"}}
    assert LLAMA.render("", [call]) == '{"name": "add", "parameters": {"a": "é"}}'
    assert LLAMA.render("Hi.", [call, call]).startswith('Hi.<|python_tag|>{"name": "add", ')
    assert LLAMA.render("Hi.", []) == "Hi."
