"""The `llama3_json` format: a turn that is a JSON object with `name` and `parameters`. Llama 3.1 to 3.3 write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..chat_format import ChatFormat, ParsedCall, register_chat_format
from ..messages import FunctionCall
from .call_json import Document, call_fault, decode, encode, parsed_call, skip_space

TAG = "<|python_tag|>"

_BEGINNING = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_BETWEEN = re.compile(r"\s*;?\s*")
_FORM = 'Write {"name": "...", "parameters": {...}} and nothing else; several calls are separated by ;'
_PROMPT = """Given the following functions, please respond with a JSON for a function call with its proper arguments \
that best answers the given prompt.

Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. \
Do not use variables.

{schemas}"""  # the words of the Llama 3 templates


class Llama3JsonFormat(ChatFormat):
    """Calls as bare JSON objects, `;` between them, alone in a turn or after content and `<|python_tag|>`.

    JSON without `name` and `parameters` (or `arguments`, as some write) is an answer like any other.
    """

    name = "llama3_json"
    after_content = TAG
    special_tokens = (TAG,)

    def scan(self, text: str, turn: int) -> tuple[str, tuple[ParsedCall, ...]]:
        """Split text into content and calls. What follows a broken call is part of it: nothing says where it ends."""
        document = Document(text)
        start = 0 if _is_call(document) else text.find(TAG)  # a string of a call may hold the tag
        if start < 0:
            return text, ()
        position = start + len(TAG) * text.startswith(TAG, start)
        content, more = text[:start], True
        calls: list[ParsedCall] = []
        while more:
            value, stop, fault = decode(document, skip_space(document, position))
            between = _BETWEEN.match(document, stop)
            end = between.end() if between else stop
            if fault is None and end < len(document) and document[end] != "{":
                fault = "there is text after the JSON object"
            end = len(document) if fault else end
            key = (isinstance(value, dict) and _key(value)) or "parameters"
            faults = [fault or call_fault(value, key)]
            raw = document[start:end]
            calls.append(parsed_call(self.call_id(turn, len(calls)), raw, value, faults, form=_FORM, key=key))
            start = position = end
            more = end < len(document)
        return content, tuple(calls)

    def render_calls(self, calls: Sequence[FunctionCall]) -> str:
        """Return the calls with `; ` between them."""
        return "; ".join(map(self.render_call, calls))

    def render_call(self, call: FunctionCall) -> str:
        """Return the call as JSON."""
        return encode({"name": call["name"], "parameters": call["arguments"]}, call["name"])

    def tools_prompt(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return the tools and how to call them, in the words of the Llama 3 templates."""
        if not schemas:
            return ""
        written = [json.dumps(schema, ensure_ascii=False, indent=4) for schema in schemas]
        return _PROMPT.format(schemas="\n\n".join(written))


def _is_call(document: Document) -> bool:
    """Whether a turn begins with a call and no tag, or with what was meant to be one."""
    begin = skip_space(document, 0)
    if not document.startswith("{", begin):
        return False
    value, _, fault = decode(document, begin)
    if fault is not None:
        return _BEGINNING.match(document) is not None
    return "name" in value and _key(value) is not None


def _key(value: dict[str, Any]) -> str | None:
    """Return under which key the arguments stand, or None."""
    return next((key for key in ("parameters", "arguments") if key in value), None)


register_chat_format(Llama3JsonFormat())
