"""The `hermes` format: one JSON object between `<tool_call>` tags. Hermes, Qwen2.5, Qwen3 and MiniMind write it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..chat_format import ParsedCall, register_chat_format
from ..messages import FunctionCall
from .call_json import Document, call_fault, decode, encode, parsed_call, skip_space
from .marked import MarkedFormat, find_end

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_FORM = f'Write {OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}'
_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # the words on which Hermes and Qwen models were trained


class HermesFormat(MarkedFormat):
    """Calls as `<tool_call>` JSON `</tool_call>`; a lone closing tag is content."""

    name = "hermes"
    mark = OPEN

    def read(self, document: Document, start: int, ids: Iterator[str]) -> tuple[list[ParsedCall], int]:
        """Read the one call whose opening tag stands at `start`."""
        value, stop, fault = decode(document, skip_space(document, start + len(OPEN)))
        end, unclosed = find_end(document, stop, OPEN, CLOSE, whole=fault is None)
        faults = [fault or call_fault(value), unclosed]
        return [parsed_call(next(ids), document[start:end], value, faults, form=_FORM)], end

    def render_call(self, call: FunctionCall) -> str:
        """Return the call between its tags."""
        body = encode({"name": call["name"], "arguments": call["arguments"]}, call["name"])
        return f"{OPEN}\n{body}\n{CLOSE}"

    def tools_prompt(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return the tools and how to call them, in the words of the Hermes and Qwen templates."""
        if not schemas:
            return ""
        return _PROMPT.format(schemas="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))


register_chat_format(HermesFormat())
