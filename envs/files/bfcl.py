"""BFCL's dialect of JSON Schema, brought to draft 2020-12 without loss. Names keep their dots, as a `Tool` may."""

from __future__ import annotations

from typing import Any

#: `any` allows everything, which no `type` says. `str`, `int` and `bool` are API-Bank's.
_TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "list": "array",
    "any": None,
    "str": "string",
    "int": "integer",
    "bool": "boolean",
}


def mended(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with dict -> object, float -> number, tuple and list -> array, no `any`, and without `optional`.

    Only where a schema stands: a property may be called `type` or `optional`. What is unknown is left as it is.
    """
    made: dict[str, Any] = {}
    for key, value in schema.items():
        match key, value:
            case "type", str() if value in _TYPES:
                if _TYPES[value] is not None:
                    made[key] = _TYPES[value]
            case "optional", _:
                pass
            case "properties", dict():
                made[key] = {name: mended(part) if isinstance(part, dict) else part for name, part in value.items()}
            case (("items" | "additionalProperties"), dict()):
                made[key] = mended(value)
            case _:
                made[key] = value
    return made
