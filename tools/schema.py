"""JSON Schema (draft 2020-12) at the tool boundary: checked and compiled once, violations told in the model's terms."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from .errors import ConfigError, closest

_REPORTED = 3  # violations told at once; a model mends a few at a time
_HEAD, _TAIL = 200, 80  # characters kept of a long violation: the value stands at the head, the rule at the tail
_KEY_CHARS = 64
_DEPTH = 64  # levels of a schema
_LONG_LIST = 1000  # items from which on a list in a schema must be all text
_NESTED = (Mapping, list)


class ArgumentSchema:
    """A compiled schema that says what is wrong with the arguments of a call."""

    def __init__(self, schema: Mapping[str, Any], where: str) -> None:
        _check_size(schema, where)
        self._schema, self._where = deepcopy(dict(schema)), where
        try:
            Draft202012Validator.check_schema(self._schema)
        except RecursionError:
            raise ConfigError(f"{where}: not a JSON Schema: nested too deeply") from None
        except SchemaError as error:
            raise ConfigError(
                f"{where}: not a JSON Schema (draft 2020-12): {_text(error)} (rule: {error.validator}). Mend it there."
            ) from None
        # An own registry, so that a reference is never fetched over the network.
        self._validator = Draft202012Validator(self._schema, registry=Registry())
        _check_references(self._schema, where)

    def __reduce__(self) -> tuple[type[ArgumentSchema], tuple[dict[str, Any], str]]:
        """Pickle the schema alone (the compiled form cannot be), so that a tool may travel to another process."""
        return ArgumentSchema, (self._schema, self._where)

    def violations(self, arguments: Mapping[str, Any]) -> str | None:
        """Return what breaks the schema, by path and rule (at most three, in a fixed order), or None."""
        try:
            errors = sorted(
                self._validator.iter_errors(arguments), key=lambda e: (e.json_path, str(e.validator), e.message)
            )
        except RecursionError:
            return "at $: nested too deeply to be checked"
        texts = list(dict.fromkeys(map(_text, errors)))
        if not texts:
            return None
        more = len(texts) - _REPORTED
        return "; ".join(texts[:_REPORTED]) + (f"; and {more} more" if more > 0 else "")


def compile_schema(schema: Mapping[str, Any], where: str) -> ArgumentSchema:
    """Check and compile a schema of arguments.

    Args:
        schema: JSON Schema, draft 2020-12. A copy is kept.
        where: Owner of the schema, for the error text, such as `tool 'search'`.

    Raises:
        ConfigError: The schema breaks the draft (names path and rule) or refers to what is not there.
    """
    return ArgumentSchema(schema, where)


def _check_size(schema: Any, where: str) -> None:
    """Refuse what the check itself would choke on: endless nesting, and long lists, which it compares pair by pair."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > _DEPTH:
            raise ConfigError(f"{where}: not a JSON Schema: nested more than {_DEPTH} levels deep")
        for node in level:
            if isinstance(node, list) and len(node) > _LONG_LIST and not all(isinstance(item, str) for item in node):
                raise ConfigError(f"{where}: not a JSON Schema: a list of {len(node)} items that are not all text")
        parts = (node.values() if isinstance(node, Mapping) else node for node in level if isinstance(node, _NESTED))
        level = [item for part in parts for item in part]


def _check_references(schema: dict[str, Any], where: str) -> None:
    """Resolve every reference now: a dangling one would otherwise raise in the middle of a rollout."""
    root: Resource[Any] = DRAFT202012.create_resource(schema)
    base = root.id() or ""
    registry = Registry[Any]().with_resource(base, root)
    todo = [(root, registry.resolver(base_uri=base))]
    while todo:
        resource, resolver = todo.pop()
        contents = resource.contents if isinstance(resource.contents, dict) else {}
        for reference in (contents[key] for key in ("$ref", "$dynamicRef") if key in contents):
            try:
                resolver.lookup(reference)
            except Unresolvable:
                raise ConfigError(
                    f"{where}: the reference {reference!r} leads nowhere. Refer within the schema, as '#/$defs/name'."
                ) from None
        todo += [(part, resolver.in_subresource(part)) for part in resource.subresources()]


def _text(error: ValidationError | SchemaError) -> str:
    """Return `at PATH: RULE` for one error, cut in the middle when the offending value is long."""
    text = _explanation(error)
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]} ... {text[-_TAIL:]}"
    return f"at {error.json_path}: {text}"


def _explanation(error: ValidationError | SchemaError) -> str:
    instance: Any = error.instance
    if error.validator == "required":
        required: Any = error.validator_value
        missing = [key for key in required if key not in instance]
        return f"{', '.join(map(repr, missing))} missing"
    if error.validator == "additionalProperties" and error.validator_value is False:
        return _unexpected(instance, error.schema) or error.message
    if error.validator in ("anyOf", "oneOf") and error.context:
        return f"{error.message} ({'; '.join(dict.fromkeys(part.message for part in error.context))})"
    return error.message


def _unexpected(instance: dict[str, Any], schema: Any) -> str:
    """Name the unexpected keys and what each may have meant; empty where the schema has no plain list of keys."""
    known = schema.get("properties", {})
    if not known or schema.get("patternProperties"):
        return ""
    extra = [key for key in instance if key not in known]
    told = [f"{key[:_KEY_CHARS]!r} is unexpected.{closest(key[:_KEY_CHARS], known)}" for key in extra[:_REPORTED]]
    return " ".join(told) + (f" And {len(extra) - _REPORTED} more." if len(extra) > _REPORTED else "")
