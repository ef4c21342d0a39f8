"""Which kinds of JSON value a tool's schema lets a parameter have, for markup that does not carry types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {"null", "boolean", "integer", "number", "string", "array", "object"}


def property_schema(parameters: Mapping[str, Any], key: str) -> Any:
    """Return the schema of one argument; where it is not named, that of additional ones (or None)."""
    properties = parameters.get("properties")
    named = properties.get(key) if isinstance(properties, Mapping) else None
    return parameters.get("additionalProperties") if named is None else named


def kinds_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the kinds a schema speaks of, its alternatives and references within `root` included.

    Empty when it speaks of none. Each part is looked at once, so that references in a circle end.
    """
    kinds: set[str] = set()
    seen: set[int] = set()
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        said = part.get("type", [])
        kinds.update([said] if isinstance(said, str) else said)
        kinds.update(map(_kind, part.get("enum", [])))
        kinds.update([_kind(part["const"])] if "const" in part else [])
        for key in ("anyOf", "oneOf", "allOf"):
            todo += part.get(key, [])
        if "$ref" in part:
            todo.append(_follow(part["$ref"], root))
    return kinds & _KINDS


def _kind(value: Any) -> str:
    names = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference such as `#/$defs/name` names, or None."""
    part: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
