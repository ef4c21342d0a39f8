import datetime
import json as json_module
import os
import pickle
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from gymtune.tools import ParsedCall, Tool, Toolbox, tool
from gymtune.tools.errors import ConfigError
from gymtune.tools.signature import read_docstring

EMPTY = {"type": "object", "properties": {}}


class Point(BaseModel):
    title: str
    x: int = 0


def call(made: Tool, /, **arguments: Any) -> str:
    return Toolbox([made]).call(ParsedCall("c", made.name, arguments, None, "")).content


def test_schema_from_hints_defaults_and_docstring() -> None:
    @tool
    def search(query: str, k: Annotated[int, Field(ge=1)] = 5, order: Literal["new", "old"] = "new") -> str:
        """Search the archive.

        Newest first.

        Args:
            query: What to look for,
                in words.
            k (int): How many.

        Returns:
            order: not an argument
        """
        return f"{query} {k} {order}"

    assert search.schema() == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive.\n\nNewest first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in words."},
                    "k": {"type": "integer", "minimum": 1, "default": 5, "description": "How many."},
                    "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
    assert call(search, query="a") == "a 5 new"
    assert call(search, query="a", k=3.0) == "a 3 new"  # 3.0 is an integer in JSON Schema; the function gets an int


def test_options_and_explicit_parameters() -> None:
    @tool(
        name="raw.tool-1", description="Raw.", parameters=EMPTY, time_limit=2.5, in_memory=True, on_violation="report"
    )
    def anything(*args, **kwargs):  # type: ignore[no-untyped-def]
        return sorted(kwargs)

    assert (anything.name, anything.description, anything.parameters) == ("raw.tool-1", "Raw.", EMPTY)
    assert (anything.time_limit, anything.in_memory, anything.on_violation) == (2.5, True, "report")
    assert call(anything, b=1, a=2) == '["a", "b"]'


def test_arguments_become_the_annotated_types() -> None:
    @tool
    def day(when: datetime.date, points: list[Point], json: bool = False, _n: int | None = None) -> str:
        return f"{when.year} {points[0].title} {points[0].x} {json} {_n}"

    properties = day.parameters["properties"]
    assert "title" not in properties["when"]
    assert day.parameters["$defs"]["Point"]["properties"]["title"] == {"type": "string"}  # a property, not a title
    assert call(day, when="2024-02-03", points=[{"title": "p"}], json=True) == "2024 p 0 True None"
    assert call(day, when="2024-02-33", points=[]).startswith("error (exception): at $.when: ")


def test_data_named_like_keywords_survives() -> None:
    class Options(BaseModel):
        default: dict[str, str] = {"title": "kept"}

    @tool
    def configure(options: Options, title: str = "t") -> str:
        return title

    assert configure.parameters["$defs"]["Options"]["properties"]["default"]["default"] == {"title": "kept"}
    assert configure.parameters["properties"]["title"] == {"type": "string", "default": "t"}


def test_field_description_wins_over_docstring() -> None:
    @tool
    def f(a: Annotated[int, Field(description="field")], b: int) -> int:
        """F.

        Args:
            a: doc
            b: doc
        """
        return a + b

    assert [f.parameters["properties"][key]["description"] for key in "ab"] == ["field", "doc"]


def test_bound_methods_keep_state() -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def add(self, n: int) -> int:
            """Add to the total."""
            self.total += n
            return self.total

    counter = Counter()
    add = tool(counter.add)
    assert list(add.parameters["properties"]) == ["n"]
    assert [call(add, n=2), call(add, n=3), counter.total] == ["2", "5", 5]


def test_defaults_without_json_form_stay_optional() -> None:
    @tool
    def f(
        a: object = object(),
        b: float = float("nan"),
        c: datetime.date = datetime.date(2024, 1, 2),
        d: str | None = None,
    ) -> str:
        return f"{b} {c} {d}"

    defaults = {name: part.get("default", "none") for name, part in f.parameters["properties"].items()}
    assert defaults == {"a": "none", "b": "none", "c": "2024-01-02", "d": None}
    assert "required" not in f.parameters
    assert call(f) == "nan 2024-01-02 None"


def test_no_parameters() -> None:
    @tool
    def now() -> str:
        return "noon"

    assert now.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert call(now) == "noon"
    assert "'x' was unexpected" in call(now, x=1)


def _bare(a):  # type: ignore[no-untyped-def]
    return a


def _args(*args: int) -> None: ...
def _kwargs(**kwargs: int) -> None: ...
def _positional(a: int, /) -> None: ...
def _field(a: int = Field(1)) -> None: ...
def _untypable(a: pytest.MonkeyPatch) -> None: ...
def _unknown(a: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821


class _Class:
    def method(self, a: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_bare, "parameter a has no annotation"),
        (_args, "*args"),
        (_kwargs, "**kwargs"),
        (_positional, "parameter a"),
        (_field, "Annotated"),
        (_untypable, "MonkeyPatch"),
        (_unknown, "Missing"),
        (_Class.method, "tool(instance.method)"),
        (lambda: 1, "<lambda>"),
    ],
)
def test_what_cannot_be_a_tool(function: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tool(function)
    assert says in str(caught.value)


async def _coroutine() -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": ""}, "''"),
        ({"name": "a b"}, "'a b'"),
        ({"name": "a\n"}, "tool name"),
        ({"name": "a" * 65}, "64"),
        ({"parameters": {"type": "array"}}, "object"),
        ({"parameters": {}}, "object"),
        ({"parameters": {"type": "object", "properties": {"a": {"type": "float"}}}}, "$.properties.a.type"),
        ({"time_limit": 0}, "time_limit"),
        ({"time_limit": float("nan")}, "time_limit"),
        ({"on_violation": "ignore"}, "on_violation"),
        ({"in_memory": True, "function": _coroutine}, "async"),
        ({"in_memory": True, "isolate": True}, "Choose one"),
        ({"isolate": True, "function": lambda: 1}, "tool 't': isolate=True: "),
    ],
)
def test_fields_are_checked(options: dict[str, Any], says: str) -> None:
    fields: dict[str, Any] = {"name": "t", "description": "", "parameters": EMPTY, "function": len} | options
    with pytest.raises(ConfigError) as caught:
        Tool(**fields)
    assert says in str(caught.value)


def test_read_docstring_keeps_colons_and_skips_other_sections() -> None:
    text = "Do it: now.\n\nArgs:\n    a: one: two\n        b: part of a\n    c (str): three\n\nRaises:\n    d: no"
    assert read_docstring(text) == ("Do it: now.", {"a": "one: two b: part of a", "c": "three"})


def test_a_tool_travels_to_another_process() -> None:
    made = Tool("dumps", "", {"type": "object", "properties": {"obj": {"type": "string"}}}, json_module.dumps)
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert call(again, obj="x") == '"x"'
    assert "not of type 'string'" in call(again, obj=1)


ISOLATED = """
import datetime, os, time
from gymtune.tools import tool

class Shop:
    def __init__(self, rate): self.rate = rate
    def price(self, n: int) -> int: return n * self.rate

@tool(isolate=True)
def year(when: datetime.date, n: int = 1) -> list[int]:
    return [when.year + n, os.getpid()]

@tool(isolate=True)
async def later(n: int) -> int:
    return n + 1

@tool(isolate=True, parameters={"type": "object"})
def raw(**arguments): return [arguments, os.getpid()]

def plain(when: datetime.date) -> int: return when.year
typed = tool(isolate=True)(plain)
priced = tool(isolate=True)(Shop(3).price)
"""


def test_isolated_tools_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "isolated_tools.py").write_text(ISOLATED, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = __import__("isolated_tools")
    year, pid = json_module.loads(call(made.year, when="2024-02-03", n=2))
    assert year == 2026
    assert pid != os.getpid()
    arguments, pid = json_module.loads(call(made.raw, a=1, timeout=2, function=3, self=4))
    assert arguments == {"a": 1, "timeout": 2, "function": 3, "self": 4}
    assert pid != os.getpid()
    assert call(made.later, n=1) == "2"
    assert call(made.typed, when="2024-02-03") == "2024"
    assert call(made.priced, n=2) == "6"
    assert call(made.year, when="2024-02-33").startswith("error (exception): at $.when: ")  # a ToolError comes through
    assert call(pickle.loads(pickle.dumps(made.year)), when="2024-02-03").startswith("[2025, ")


def test_what_cannot_be_isolated() -> None:
    with pytest.raises(ConfigError, match=r"tool 'inner': isolate=True: .*inner.* is defined inside a function"):

        @tool(isolate=True)
        def inner() -> None: ...
