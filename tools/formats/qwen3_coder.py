"""The `qwen3_coder` format: tags instead of JSON, one a parameter. Qwen3-Coder and Qwen3.5 write it.

A value is text between tags and does not say of what type it is; the tool's schema does (`kinds`). The markup has no
way to escape its own tags, so a value holds none of them: a parameter that is not closed swallows no other call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jsonschema import Draft202012Validator

from ..chat_format import ParsedCall, register_chat_format
from ..errors import DataError
from ..messages import FunctionCall
from .call_json import Document, call_fault, decode_whole, encode, parsed_call, skip_space
from .kinds import kinds_of, property_schema
from .marked import MarkedFormat, find_end

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_END = "</function>"

_HEAD = re.compile(r"<tool_call>\s*<function=([^<>\n]*+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*+)>\n?")
_TAG = re.compile(r"</?tool_call>|<function=|</function>|<parameter=|</parameter>")
_NAME = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
_PYTHON = {"True": True, "False": False, "None": None}  # some templates write values by Python's `str`
_FORM = (
    f"Write {OPEN}\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n{CLOSE}, "
    "with <parameter> as often as there are arguments"
)
_PROMPT = """# Tools

You have access to the following functions:

<tools>
{schemas}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""  # the words on which Qwen3-Coder models were trained


class Qwen3CoderFormat(MarkedFormat):
    """Calls as `<function=name>` with a `<parameter=key>` for each argument, between `<tool_call>` tags."""

    name = "qwen3_coder"
    mark = OPEN

    def read(self, document: Document, start: int, ids: Iterator[str]) -> tuple[list[ParsedCall], int]:
        """Read the one call whose opening tag stands at `start`; its arguments are still texts."""
        value, stop, fault = _read_function(document, start)
        end, unclosed = find_end(document, stop, OPEN, CLOSE, whole=fault is None)
        faults = [fault or call_fault(value), unclosed]
        return [parsed_call(next(ids), document[start:end], value, faults, form=_FORM)], end

    def typed(self, call: ParsedCall, parameters: Mapping[str, Any]) -> ParsedCall:
        """Read each argument's text as the schema of its parameter means it; as JSON where there is none."""
        arguments: dict[str, Any] = {}
        for key, text in (call.arguments or {}).items():
            arguments[key], fault = _read_value(text, kinds_of(property_schema(parameters, key), parameters))
            if fault is not None:
                return replace(call, arguments=None, error=f"parameter {key[:64]!r}: {fault}. {_FORM}")
        return call if call.arguments is None else replace(call, arguments=arguments)

    def render_call(self, call: FunctionCall) -> str:
        """Return the call between its tags. Raises DataError for what the tags cannot hold."""
        name = call["name"]
        for word in (name, *call["arguments"]):
            if not _NAME.fullmatch(word):
                raise DataError(f"{self.name} cannot write the name {word[:64]!r} in a call to {name[:64]!r}")
        parts = [
            f"<parameter={key}>\n{_write_value(value, key, name)}\n</parameter>\n"
            for key, value in call["arguments"].items()
        ]
        return f"{OPEN}\n<function={name}>\n{''.join(parts)}</function>\n{CLOSE}"

    def tools_prompt(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return the tools and how to call them, in the words of the Qwen3-Coder templates."""
        if not schemas:
            return ""
        return _PROMPT.format(schemas="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))


def _read_function(document: Document, start: int) -> tuple[dict[str, Any] | None, int, str | None]:
    """Read from `<tool_call>` to `</function>`; return name and texts, the position after them, and what is wrong."""
    head = _HEAD.match(document, start)
    if head is None:
        return None, start + len(OPEN), "<function=NAME> must follow <tool_call>"
    texts: dict[str, str] = {}
    value = {"name": head[1].strip(), "arguments": texts}
    position = head.end()
    while opening := _PARAMETER.match(document, position):
        key = opening[1].strip()
        closing = _TAG.search(document, opening.end())
        if closing is None or closing[0] != "</parameter>":
            before = "" if closing is None else f" before {closing[0]}"
            return value, opening.end(), f"</parameter> of {key[:64]!r} is missing{before}"
        if not key or key in texts:
            fault = f"the parameter {key[:64]!r} stands twice" if key else "a parameter has no name"
            return value, closing.end(), fault
        texts[key] = document[opening.end() : closing.start()].removesuffix("\n")
        position = skip_space(document, closing.end())
    if not document.startswith(_FUNCTION_END, position):
        return value, position, f"<parameter=KEY> or {_FUNCTION_END} must follow <function=NAME> and its parameters"
    return value, position + len(_FUNCTION_END), None


def _read_value(text: str, kinds: set[str]) -> tuple[Any, str | None]:
    """Return the value that the text stands for, and what is wrong with it.

    A text is itself where a string is wanted and where it is no JSON. Only where nothing but an object or an array
    will do, broken JSON is a fault: the schema's own complaint would not say where it breaks.
    """
    value, fault = (_PYTHON[text], None) if kinds and text in _PYTHON else decode_whole(text)
    if fault is not None:
        structure = kinds and kinds <= {"object", "array", "null"} and text.lstrip()[:1] in ("{", "[")
        return text, fault if structure else None
    if isinstance(value, str) or ("string" in kinds and not any(_is_kind(value, kind) for kind in kinds)):
        return text, None
    return value, None


def _is_kind(value: Any, kind: str) -> bool:
    return bool(Draft202012Validator.TYPE_CHECKER.is_type(value, kind))


def _write_value(value: Any, key: str, name: str) -> str:
    """Write a string as it is, all else as JSON in which no tag stands."""
    if not isinstance(value, str):
        return encode(value, name).replace("<", "\\u003c")  # in JSON, `<` stands in strings only
    if tag := _TAG.search(value):
        raise DataError(f"argument {key!r} of the call to {name!r} holds {tag[0]}, which this format cannot write")
    return value


register_chat_format(Qwen3CoderFormat())
