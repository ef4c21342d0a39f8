import pytest

from gymtune.tools import get_chat_format

MISTRAL = get_chat_format("mistral")
ADD = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (f"[TOOL_CALLS][{ADD}]", "", 1),
        (f"[TOOL_CALLS] [{ADD}, {ADD}]", "", 2),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "VvvODy9mT"}]', "", 1),
        (f"I add.[TOOL_CALLS][{ADD}]", "I add.", 1),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}', "", 1),
        ('I add.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', "I add.", 2),
        ('[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": 1}', "", 1),
        ('[TOOL_CALLS]add{"a": 1}', "", 1),
    ],
)
def test_what_the_family_writes(text: str, content: str, count: int) -> None:
    parsed = MISTRAL.parse(text, turn=12)
    assert parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.calls] == [("add", {"a": 1})] * count
    assert [call.id for call in parsed.calls] == ["call01200", "call01201"][:count]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[TOOL_CALLS]", "must be followed by a JSON array"),
        ("[TOOL_CALLS] add", "must be followed by a JSON array"),
        ("[TOOL_CALLS][]", "not valid JSON"),
        ("[TOOL_CALLS][", "not valid JSON"),
        (f"[TOOL_CALLS]{ADD}", '"name" must be a non-empty string'),
        (f"[TOOL_CALLS][{ADD}", "there must be , or ]"),
        (f"[TOOL_CALLS][{ADD} {ADD}]", "there must be , or ]"),
        ('[TOOL_CALLS][{"arguments": {}}]', '"name" is missing'),
        ('[TOOL_CALLS][{"name": "add"}]', '"arguments" is missing'),
        ('[TOOL_CALLS][{"name": "add", "arguments": "{}"}]', "not a string"),
        ('[TOOL_CALLS]["add"]', "must be a JSON object, not a string"),
        ("[TOOL_CALLS][ARGS]{}", "non-empty string"),
        ("[TOOL_CALLS]add[ARGS]", "not valid JSON"),
        ("[TOOL_CALLS]add[ARGS][1]", "not an array"),
        ('[TOOL_CALLS]add[ARGS]{"a":', "not valid JSON"),
    ],
)
def test_malformed_calls(text: str, says: str) -> None:
    (call,) = MISTRAL.parse(text).calls
    assert says in str(call.error)
    assert 'Write [TOOL_CALLS][{"name": "...", "arguments": {...}}, ...]' in str(call.error)
    assert call.raw == text


def test_one_bad_call_leaves_the_others() -> None:
    calls = MISTRAL.parse(f'[TOOL_CALLS][{ADD}, {{"name": 5}}, {ADD}]').calls
    assert [call.error is None for call in calls] == [True, False, True]
    calls = MISTRAL.parse(f"[TOOL_CALLS][{{ [TOOL_CALLS]add[ARGS]{{}}[TOOL_CALLS][{ADD}] Done.").calls
    assert [call.error is None for call in calls] == [False, True, True]


def test_render() -> None:
    call = {"name": "add", "arguments": {"a": "é]"}}
    once = '{"name": "add", "arguments": {"a": "é]"}}'
    assert MISTRAL.render("Hi.", [call, call]) == f"Hi.[TOOL_CALLS][{once}, {once}]"
