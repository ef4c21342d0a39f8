"""Tool schemas of a record: JSON text or a list, in OpenAI form or bare; each checked, once for a distinct text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ...tools.errors import ConfigError
from ...tools.schema import compile_schema
from .bfcl import mended
from .records import Fault, Faults, shown
from .shapes import TOOL, checked
from .strict_json import JsonError, loads

_CACHED = 20_000  # characters of a text that is remembered; longer ones would cost memory

Tools = tuple[dict[str, Any], ...]


def read_tools(value: Any, path: str, faults: Faults, *, bfcl: bool = False) -> Tools:
    """Return the tools in OpenAI form: name, description ("" where there is none), parameters (none: no arguments).

    `value` is JSON text or a list; null and "" mean no tools. What is wrong is noted below `path`. With `bfcl` the
    dialect is mended first. Equal texts give the same objects: they are not to be changed.
    """
    if value is None or value == "":
        return ()
    if not isinstance(value, str | list):
        faults.add(path, "a list of tools or JSON text of one", shown(value), "tools")
        return ()
    text = value if isinstance(value, str) else json.dumps(value)
    tools, found = (_remembered if len(text) <= _CACHED else _tools)(text, bfcl)
    faults += [replace(fault, line=faults.line, path=path + fault.path) for fault in found]
    return tools


def _tools(text: str, bfcl: bool) -> tuple[Tools, tuple[Fault, ...]]:
    faults = Faults(0)
    try:
        items = loads(text)
    except JsonError as error:
        return (), (Fault(0, "", "JSON text of a list of tools", error.came, "tools"),)
    if not isinstance(items, list):
        return (), (Fault(0, "", "a list of tools", shown(items), "tools"),)
    tools: list[dict[str, Any]] = []
    names: set[str] = set()
    for index, item in enumerate(items):
        part = json.dumps(item)
        tool, found = (_remembered_tool if len(part) <= _CACHED else _tool)(part, bfcl)
        faults += [replace(fault, path=f"[{index}]{fault.path}") for fault in found]
        if tool is not None and (name := tool["function"]["name"]) in names:
            faults.add(f"[{index}]", "a tool with a name of its own", shown(name), "tools")
        elif tool is not None:
            names.add(name)
            tools.append(tool)
    return tuple(tools), tuple(faults)


def _tool(text: str, bfcl: bool) -> tuple[dict[str, Any] | None, tuple[Fault, ...]]:
    faults = Faults(0)
    item = json.loads(text)
    checked(TOOL, item, "", faults, "tools")
    if faults:
        return None, tuple(replace(fault, path=f".{fault.path}" if fault.path else "") for fault in faults)
    where, function = (".function", item["function"]) if "function" in item else ("", item)
    parameters = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    if bfcl:
        parameters = mended(parameters)
    if wrong := _schema_fault(parameters):
        return None, (Fault(0, f"{where}.parameters", "a JSON Schema of an object", wrong, "tools"),)
    made = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": made}, ()


_remembered = lru_cache(maxsize=512)(_tools)
_remembered_tool = lru_cache(maxsize=2048)(_tool)


def _schema_fault(parameters: dict[str, Any]) -> str | None:
    if parameters["type"] != "object":
        return f"the type {shown(parameters['type'])}"
    if is_plain(parameters):
        return None
    try:
        compile_schema(parameters, "")
    except ConfigError as error:
        return str(error).removeprefix(": ").removesuffix(" Mend it there.")
    return None


_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}


def is_plain(schema: Any) -> bool:
    """Whether this is a schema of nothing but everyday keywords, rightly used: valid without asking the metaschema.

    Most are, and it takes a hundredth of the time. False says nothing.
    """
    return isinstance(schema, dict) and all(_PLAIN.get(key, _never)(value) for key, value in schema.items())


def _never(_: Any) -> bool:
    return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_PLAIN: dict[str, Callable[[Any], bool]] = {
    "type": lambda value: isinstance(value, str) and value in _TYPES,
    "title": _is_text,
    "description": _is_text,
    "properties": lambda value: isinstance(value, dict) and all(map(is_plain, value.values())),
    "required": lambda value: isinstance(value, list) and all(map(_is_text, value)) and len(set(value)) == len(value),
    "items": is_plain,
    "additionalProperties": lambda value: isinstance(value, bool) or is_plain(value),
    "enum": lambda value: isinstance(value, list),
    "default": lambda _: True,
}
