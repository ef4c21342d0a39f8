from typing import Any

import pytest
from pydantic import BaseModel

from gymtune.tools import ParsedCall, Toolbox, get_chat_format, tool
from gymtune.tools.errors import DataError

QWEN = get_chat_format("qwen3_coder")

TWO = """I look.
<tool_call>
<function=search>
<parameter=query>
two
lines
</parameter>
<parameter=limit>
5
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"""


def calls(text: str, **properties: Any) -> tuple[ParsedCall, ...]:
    tools = [{"type": "function", "function": {"name": "put", "parameters": {"properties": properties}}}]
    return QWEN.parse(text, tools=tools).calls


def put(value: str) -> str:
    return f"<tool_call>\n<function=put>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


def read(value: str, schema: Any = None) -> Any:
    (call,) = calls(put(value), **({} if schema is None else {"a": schema}))
    assert call.arguments is not None, call.error
    return call.arguments["a"]


def test_what_the_family_writes() -> None:
    parsed = QWEN.parse(TWO)
    assert parsed.content == "I look."
    assert [(c.name, c.arguments) for c in parsed.calls] == [
        ("search", {"query": "two\nlines", "limit": 5}),
        ("now", {}),
    ]
    functions = [call["function"] for call in parsed.message()["tool_calls"]]
    assert QWEN.render("I look.", functions) == TWO


@pytest.mark.parametrize(
    ("value", "schema", "meant"),
    [
        ("5", None, 5),
        ("true", None, True),
        ("[1, 2]", None, [1, 2]),
        ("five", None, "five"),
        ('"five"', None, '"five"'),
        ("True", None, "True"),
        ("{broken", None, "{broken"),
        ("5", {}, 5),
        ("5", True, 5),
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("NaN", {"type": "number"}, "NaN"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": ["integer", "string"]}, 5.0),
        ("5.5", {"type": ["integer", "string"]}, "5.5"),
        ("five", {"type": "integer"}, "five"),
        ("1", {"type": "boolean"}, 1),
        ("True", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("{}", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "{}"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, 6]}, 5),
        ("5", {"const": "5"}, "5"),
    ],
)
def test_the_schema_says_what_a_text_means(value: str, schema: Any, meant: Any) -> None:
    got = read(value, schema)
    assert (got, type(got)) == (meant, type(meant))


def test_a_tool_made_of_a_function_gets_its_types() -> None:
    class Place(BaseModel):
        zip_code: str

    @tool
    def put(code: str, place: Place, count: int | None = None) -> str:
        """Puts."""
        return repr((code, place.zip_code, count))

    toolbox = Toolbox([put])
    text = """<tool_call><function=put><parameter=code>007</parameter><parameter=count>None</parameter>
<parameter=place>{"zip_code": "01"}</parameter></function></tool_call>"""
    (call,) = QWEN.parse(text, tools=toolbox.schemas()).calls
    assert toolbox.call(call).content == "('007', '01', None)"


def test_references_are_followed_and_circles_end() -> None:
    root = {
        "properties": {"a": {"$ref": "#/$defs/Code"}, "b": {"$ref": "#/$defs/Loop"}, "c": {"$ref": "#/$defs/None"}},
        "additionalProperties": {"type": "string"},
        "$defs": {"Code": {"type": "string"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]}},
    }
    tools = [{"type": "function", "function": {"name": "put", "parameters": root}}]
    text = put("1").replace("</function>", "".join(f"<parameter={k}>2</parameter>" for k in "bcd") + "</function>")
    (call,) = QWEN.parse(text, tools=tools).calls
    assert call.arguments == {"a": "1", "b": "2", "c": 2, "d": "2"}


def test_one_line_break_at_each_end_is_markup_and_the_rest_is_the_value() -> None:
    assert [read("\n x \n"), read(""), read("\n")] == ["\n x \n", "", "\n"]
    (call,) = calls("<tool_call><function=put><parameter=a> 5 </parameter></function></tool_call>")
    assert call.arguments == {"a": 5}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>", "<function=NAME> must follow <tool_call>; </tool_call> is missing"),
        ('<tool_call>{"name": "put"}</tool_call>', "<function=NAME> must follow"),
        ("<tool_call><function=></function></tool_call>", '"name" must be a non-empty string'),
        ("<tool_call><function=put></tool_call>", "</function> must follow"),
        ("<tool_call><function=put>text</function></tool_call>", "</function> must follow"),
        ("<tool_call><function=put></function>", "</tool_call> is missing"),
        ("<tool_call><function=put></function>text</tool_call>", "text between"),
        (put("1").replace("=a>", "=>"), "a parameter has no name"),
        (put("1</parameter><parameter=a>2"), "'a' stands twice"),
        (put("1").replace("</parameter>", ""), "</parameter> of 'a' is missing before </function>"),
        (put("<parameter=b>"), "</parameter> of 'a' is missing before <parameter="),
        (put("\ud800"), "surrogate"),
    ],
)
def test_malformed_calls(text: str, says: str) -> None:
    (call,) = calls(text)
    assert says in str(call.error)
    assert "Write <tool_call>\n<function=NAME>" in str(call.error)


def test_a_parameter_that_is_not_closed_swallows_no_other_call() -> None:
    first, second = calls(put("1").split("\n</parameter>")[0] + put("2"))
    assert "before <tool_call>" in str(first.error)
    assert second.arguments == {"a": 2}


def test_only_an_object_or_array_must_be_good_json() -> None:
    (call,) = calls(put('{"x": 1, "x": 2}'), a={"type": "object"})
    assert "parameter 'a': the key 'x' stands twice" in str(call.error)
    assert read('{"x": 1, "x": 2}', {"type": ["object", "string"]}) == '{"x": 1, "x": 2}'
    assert read("x", {"type": "object"}) == "x"  # the schema will say that this is no object


@pytest.mark.parametrize("arguments", [{"a": "x </parameter> y"}, {"a": "<tool_call>"}, {"a>": 1}, {"": 1}, {" a": 1}])
def test_what_the_tags_cannot_hold_is_not_written(arguments: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="cannot write"):
        QWEN.render("", [{"name": "put", "arguments": arguments}])


def test_tags_inside_json_are_escaped() -> None:
    arguments = {"a": ["</parameter>", {"<tool_call>": "\\<"}]}
    text = QWEN.render("", [{"name": "put", "arguments": arguments}])
    assert text.count("</parameter>") == 1
    assert calls(text)[0].arguments == arguments
