"""What holds for every registered format: round trips, malformed calls, hostile text, outcomes through a toolbox."""

import json
import string
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtune.tools import ChatFormat, FunctionCall, Outcome, Tool, Toolbox, get_chat_format
from gymtune.tools.chat_format import MAX_CALLS, chat_formats
from gymtune.tools.errors import DataError

NAMES = ["deepseek", "hermes", "llama3_json", "mistral", "qwen3_coder"]
every_format = pytest.mark.parametrize("form", [get_chat_format(name) for name in NAMES], ids=NAMES)

#: A call to `put` whose argument `a` is the JSON that is given, as each family writes it.
WRITE = {
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>put<｜tool▁sep｜>{"
    '"a": VALUE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "hermes": '<tool_call>\n{"name": "put", "arguments": {"a": VALUE}}\n</tool_call>',
    "llama3_json": '{"name": "put", "parameters": {"a": VALUE}}',
    "mistral": '[TOOL_CALLS][{"name": "put", "arguments": {"a": VALUE}}]',
    "qwen3_coder": "<tool_call>\n<function=put>\n<parameter=a>\nVALUE\n</parameter>\n</function>\n</tool_call>",
}
TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<function=put>\n",
    "</function>",
    "<parameter=a>\n",
    "</parameter>",
]
MARKS = [*TAGS, *["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```json", "```", ";"], ", "]
MARKS += [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
]
VALUES = [
    '{"name": "put", ',
    '"arguments": {}}',
    '"parameters": {}}',
    "{}",
    "{",
    "[",
    "]",
    '"',
    "\\",
    "x",
    "\n",
    "put>",
]


def box(seen: list[Any] | None = None) -> Toolbox:
    """One tool that puts down what it is given: an object."""
    parameters = {"type": "object", "properties": {"a": {"type": "object"}}, "required": ["a"]}
    put = seen.append if seen is not None else lambda a: None
    return Toolbox([Tool("put", "Puts.", parameters, lambda a: put(a) or "done", in_memory=True)])


def good(form: ChatFormat, text: str) -> list[FunctionCall]:
    calls = form.parse(text, tools=box().schemas()).calls
    assert all((call.error is None) != (call.arguments is None) for call in calls)
    return [{"name": c.name, "arguments": c.arguments} for c in calls if c.arguments is not None]


def test_these_are_the_registered_formats() -> None:
    assert [form.name for form in chat_formats()] == NAMES


# -- round trips -------------------------------------------------------------------------------------------------

WORDS = st.text() | st.sampled_from(MARKS) | st.sampled_from(["5", "true", "null", "None", '"x"', "[1]", " x\n", "\n"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(WORDS, part, max_size=3),
    max_leaves=8,
)
WORD = st.text(string.ascii_letters + "_.-", min_size=1)
CALL = st.fixed_dictionaries({"name": WORD, "arguments": st.dictionaries(WORD, JSON, max_size=3)})
PLAIN = st.text().map(str.strip).filter(lambda text: not set("<[{") & set(text))
KINDS = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


def tools_for(calls: list[FunctionCall]) -> list[dict[str, Any]]:
    """Tools whose schemas say of what kind each argument is; a later call to the same tool may have another kind."""
    kinds: dict[str, dict[str, set[str]]] = {}
    for call in calls:
        for key, value in call["arguments"].items():
            kinds.setdefault(call["name"], {}).setdefault(key, set()).add(KINDS.get(type(value), "number"))
    return [
        {"function": {"name": name, "parameters": {"properties": {k: {"type": [*t]} for k, t in keys.items()}}}}
        for name, keys in kinds.items()
    ]


@every_format
@given(PLAIN, st.lists(CALL, max_size=3, unique_by=lambda call: call["name"]), st.none() | PLAIN, st.booleans())
def test_parse_undoes_render(
    form: ChatFormat, content: str, calls: list[FunctionCall], reasoning: str | None, opened: bool
) -> None:
    try:
        text = form.render(content, calls, reasoning)
    except DataError:
        values = [value for call in calls for value in call["arguments"].values() if isinstance(value, str)]
        assert form.name == "qwen3_coder"
        assert any(mark in value for value in values for mark in TAGS)
        return
    parsed = form.parse(text, thinking_open=opened and reasoning is not None, tools=tools_for(calls))
    assert (parsed.content, parsed.reasoning) == (content, reasoning)
    assert [{"name": call.name, "arguments": call.arguments} for call in parsed.calls] == calls
    assert parsed.message().get("reasoning_content") == reasoning


@every_format
def test_calls_inside_thinking_are_not_calls(form: ChatFormat) -> None:
    call = form.render("", [{"name": "put", "arguments": {"a": {}}}])
    parsed = form.parse(f"<think>{call}</think>Done.")
    assert (parsed.content, parsed.reasoning, parsed.calls) == ("Done.", call, ())
    parsed = form.parse(f"{call}</think>{call}", thinking_open=True)
    assert (parsed.content, parsed.reasoning, len(parsed.calls)) == ("", call, 1)


@every_format
def test_ids_differ_and_count_turn_and_call(form: ChatFormat) -> None:
    text = form.render("", [{"name": "put", "arguments": {"a": {}}}] * 3)
    ids = [call.id for turn in range(30) for call in form.parse(text, turn=turn).calls]
    assert len(set(ids)) == 90


# -- outcomes ----------------------------------------------------------------------------------------------------


@every_format
def test_outcomes(form: ChatFormat) -> None:
    seen: list[Any] = []
    tools = box(seen)
    for text, outcome in [
        (form.render("", [{"name": "put", "arguments": {"a": {"b": [1, "2", None]}}}]), Outcome.ok),
        (WRITE[form.name].replace("VALUE", '{"b": [1, "2", null]}'), Outcome.ok),
        (form.render("", [{"name": "putt", "arguments": {"a": {}}}]), Outcome.unknown_tool),
        (form.render("", [{"name": "put", "arguments": {}}]), Outcome.schema_violation),
        (WRITE[form.name].replace("VALUE", "1"), Outcome.schema_violation),
        (WRITE[form.name].replace("VALUE", '{"b": '), Outcome.parse_error),
    ]:
        results = tools.call_all(form.parse(text, tools=tools.schemas()).calls)
        assert [result.outcome for result in results] == [outcome]
    assert seen == [{"b": [1, "2", None]}] * 2


@every_format
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{'x': 1}", "not valid JSON"),
        ('{"x": 1', "not valid JSON"),
        ('{"x": NaN}', "NaN"),
        ('{"x": -Infinity}', "-Infinity"),
        ('{"x": 1e999}', "1e999"),
        ('{"x": 1, "x": 2}', "'x' stands twice"),
        ('{"x": "\\ud800"}', "surrogate"),
        ('{"x": "\ud800"}', "surrogate"),
        ('{"x": ' + "9" * 5000 + "}", "too many digits"),
        ('{"x": ' + "[" * 70 + "]" * 70 + "}", "64 levels"),
        ('{"x": ' + "[" * 9000 + "]" * 9000 + "}", "64 levels"),
    ],
)
def test_a_malformed_call_is_an_error_for_the_model(form: ChatFormat, value: str, says: str) -> None:
    text = WRITE[form.name].replace("VALUE", value)
    seen: list[Any] = []
    parsed = form.parse(text, tools=box().schemas())
    (call,) = parsed.calls
    assert call.arguments is None
    assert says in str(call.error)
    assert "Write " in str(call.error)
    assert box(seen).call(call).outcome is Outcome.parse_error
    assert seen == []
    assert parsed.message() == {"role": "assistant", "content": text}


@every_format
def test_no_beginning_of_a_call_is_a_call(form: ChatFormat) -> None:
    text = form.render("", [{"name": "put", "arguments": {"a": {"b": [1, {}]}}}])
    assert len(good(form, text)) == 1
    assert [good(form, text[:end]) for end in range(len(text))] == [[]] * len(text)


# -- hostile text ------------------------------------------------------------------------------------------------


@every_format
@given(text=st.lists(st.sampled_from(MARKS + VALUES), max_size=14).map("".join))
def test_any_text_parses_and_nothing_is_lost(form: ChatFormat, text: str) -> None:
    parsed = form.parse(text, tools=box().schemas())
    kept = "".join([parsed.content, *(call.raw for call in parsed.calls)])
    assert sorted("".join(kept.split())) == sorted("".join(text.split()))
    good(form, text)


HOSTILE = {
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{",
        "<｜tool▁call▁begin｜>a<｜tool▁sep｜>b\n```json\n{}```",
        '<｜tool▁call▁begin｜>a<｜tool▁sep｜>{"',
        "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ],
    "hermes": ["<tool_call>", '<tool_call>{"', "<tool_call>{}</tool_call>"],
    "llama3_json": ['{"name": "a", "parameters": {}};', '{"name": ', "<|python_tag|>", "{} ", "["],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][{",
        "[TOOL_CALLS]a[ARGS]{",
        "[TOOL_CALLS]a",
        "{},",
        '[TOOL_CALLS]["',
        "[CALL_ID]",
    ],
    "qwen3_coder": [
        "<tool_call>",
        "<tool_call><function=a>",
        "<tool_call><function=a><parameter=b>",
        "<parameter=b>",
        "<parameter=b>x</parameter>",
        "<function=",
    ],
}
FIRST = {
    "deepseek": "<｜tool▁calls▁begin｜>",
    "hermes": "",
    "llama3_json": "",
    "mistral": "[TOOL_CALLS][",
    "qwen3_coder": "<tool_call><function=a>",
}


@pytest.mark.parametrize(("name", "piece"), [(name, piece) for name in NAMES for piece in [*HOSTILE[name], "a", " \n"]])
def test_a_hostile_megabyte_is_read_and_nothing_is_lost(name: str, piece: str) -> None:
    """In linear time: a quadratic search would take minutes."""
    text = FIRST[name] + piece * (1_000_000 // len(piece))
    parsed = get_chat_format(name).parse(text)
    assert len(parsed.calls) <= MAX_CALLS + 1
    kept = "".join([parsed.content, *(call.raw for call in parsed.calls)])
    assert Counter("".join(kept.split())) == Counter("".join(text.split()))


@every_format
def test_calls_beyond_the_limit_are_one_malformed_call(form: ChatFormat) -> None:
    call: FunctionCall = {"name": "put", "arguments": {"a": {}}}
    tools = box()
    parsed = form.parse(form.render("", [call] * MAX_CALLS), tools=tools.schemas())
    assert [result.outcome for result in tools.call_all(parsed.calls)] == [Outcome.ok] * MAX_CALLS
    text = form.render("", [call] * (MAX_CALLS + 5))
    parsed = form.parse(text, tools=tools.schemas())
    outcomes = [result.outcome for result in tools.call_all(parsed.calls)]
    assert outcomes == [Outcome.ok] * MAX_CALLS + [Outcome.parse_error]
    assert "more than 64 calls in one turn: the 5 beyond were not run" in str(parsed.calls[-1].error)
    assert len({call.id for call in parsed.calls}) == MAX_CALLS + 1
    assert "".join("".join(c.raw for c in parsed.calls).split()) == "".join(text.split())


# -- prompts -----------------------------------------------------------------------------------------------------


@every_format
def test_the_tools_prompt_holds_each_schema_and_no_schemas_no_prompt(form: ChatFormat) -> None:
    parameters = {"type": "object", "properties": {"é{0}": {"type": "string"}}}
    schemas = [
        {"type": "function", "function": {"name": name, "description": "SCHEMAS {x}", "parameters": parameters}}
        for name in ("one", "two")
    ]
    prompt = form.tools_prompt(schemas)
    indent = 4 if form.name == "llama3_json" else None
    shown = parameters if form.name == "deepseek" else schemas[0]
    assert json.dumps(shown, ensure_ascii=False, indent=indent) in prompt
    assert prompt.index("one") < prompt.index("two")
    assert "TOOLS\n" not in prompt
    assert form.tools_prompt([]) == ""


@every_format
@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_render_refuses_what_is_not_json(form: ChatFormat, value: Any) -> None:
    with pytest.raises(DataError, match="'add'"):
        form.render("", [{"name": "add", "arguments": {"a": value}}])
