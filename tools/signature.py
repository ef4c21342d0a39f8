"""Reads a tool's JSON Schema off a function: type hints and defaults through pydantic, texts from the docstring."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NotRequired, get_args

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError, with_config
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict

from .errors import ConfigError, ToolError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes):\s*")
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_MAPS = ("properties", "patternProperties", "$defs")  # their keys are names, not keywords
_DATA = ("default", "const", "enum", "examples")  # their values are data, not schemas


@dataclass(frozen=True)
class Signature:
    """What a function says about itself.

    Args:
        description: The docstring up to its first section.
        parameters: JSON Schema of the arguments, an object without additional properties.
        typed: The function, taking JSON values by keyword and turning them into the annotated types first.
    """

    description: str
    parameters: dict[str, Any]
    typed: Callable[..., Any]


def read_signature(function: Callable[..., Any], where: str) -> Signature:
    """Derive description, schema and a typed call from a function or bound method.

    Args:
        function: Every parameter annotated and callable by keyword; `Annotated[..., Field(...)]` is honoured.
        where: Name for the error text, such as `tool 'search'`.

    Raises:
        ConfigError: A parameter has no annotation, cannot be named in a call, or has a type without JSON Schema.
    """
    parameters = _parameters(function, where)
    # A TypedDict, not a BaseModel: any name is allowed, and what is left out keeps the function's own default.
    hints = {p.name: p.annotation if p.default is p.empty else NotRequired[p.annotation] for p in parameters}
    shape = TypedDict("Arguments", hints)  # type: ignore[misc]
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(with_config(ConfigDict(extra="forbid"))(shape))
        schema = _untitled(adapter.json_schema())
    except (PydanticUserError, NameError, TypeError) as error:
        raise ConfigError(f"{where}: no JSON Schema for its type hints: {str(error).splitlines()[0]}") from None
    description, texts = read_docstring(inspect.getdoc(function) or "")
    for parameter in parameters:
        _annotate(schema["properties"][parameter.name], parameter, texts.get(parameter.name))
    order = ("type", "properties", "required", "additionalProperties", "$defs")
    return Signature(description, {key: schema[key] for key in order if key in schema}, _typed(function, adapter))


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring (already dedented) into its description and the texts of its arguments."""
    description: list[str] = []
    texts: dict[str, str] = {}
    section, name, indent = "", "", 0
    for line in doc.splitlines():
        if heading := _SECTION.fullmatch(line):
            section, name, indent = heading[1], "", 0
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ENTRY.fullmatch(line.strip()) if depth == indent else None
            if entry:
                name, texts[entry[1]] = entry[1], entry[2]
            elif name:
                texts[name] = f"{texts[name]} {line.strip()}".strip()
    return "\n".join(description).strip(), texts


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: its annotations cannot be read ({error}). Import their types at run time, or give parameters=."
        ) from None
    for parameter in signature.parameters.values():
        name = f"{where}: parameter {parameter}"
        if parameter.kind not in _NAMED:
            raise ConfigError(f"{name} cannot be named in a call. Use named parameters only.")
        if parameter.annotation is parameter.empty:
            mend = "Decorate the bound method, tool(instance.method)." if parameter.name == "self" else "Add one."
            raise ConfigError(f"{name} has no annotation. {mend}")
        if isinstance(parameter.default, FieldInfo):
            raise ConfigError(f"{name} has a Field as default. Write Annotated[..., Field(...)] and a plain default.")
    return list(signature.parameters.values())


def _annotate(schema: dict[str, Any], parameter: inspect.Parameter, text: str | None) -> None:
    """Add the docstring's text (a Field's own text wins) and the default, where it has a JSON form."""
    if text and not any(isinstance(part, FieldInfo) and part.description for part in get_args(parameter.annotation)):
        schema["description"] = text
    if parameter.default is not parameter.empty:
        try:
            value = to_jsonable_python(parameter.default)
            json.dumps(value, allow_nan=False)
            schema["default"] = value
        except (PydanticSerializationError, ValueError):
            schema.pop("default", None)  # stays optional all the same


def _typed(function: Callable[..., Any], adapter: TypeAdapter[Any]) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        try:
            values = adapter.validate_python(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            raise ToolError(f"at ${path}: {first['msg']}") from None
        return function(**values)

    if not inspect.iscoroutinefunction(function):
        return call

    async def acall(**arguments: Any) -> Any:
        return await call(**arguments)

    return acall


def _untitled(schema: Any) -> Any:
    """Drop the titles that pydantic makes from names: tokens of the prompt that say nothing."""
    if isinstance(schema, list):
        return [_untitled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS:
            kept[key] = {name: _untitled(part) for name, part in value.items()}
        elif key != "title":
            kept[key] = value if key in _DATA else _untitled(value)
    return kept
