"""Message: the OpenAI chat dict that env, renderer and trajectory pass from door to door."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

Role = Literal["system", "user", "assistant", "tool"]


@with_config(ConfigDict(extra="forbid"))
class FunctionCall(TypedDict):
    """Name and arguments of a call. Arguments are an object, as chat templates want them, not JSON text."""

    name: str
    arguments: dict[str, Any]


@with_config(ConfigDict(extra="forbid"))
class ToolCall(TypedDict):
    """One call of an assistant message; its result names it by `id`."""

    id: str
    type: Literal["function"]
    function: FunctionCall


@with_config(ConfigDict(extra="forbid"))
class Message(TypedDict):
    """One chat message. Where one is checked, a key that is not named here is an error, never dropped.

    `tool_call_id` and `name` stand on tool messages, `tool_calls` and `reasoning_content` on assistant messages.
    """

    role: Role
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


def system(content: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def call(name: str, **arguments: Any) -> FunctionCall:
    """Return a call of a tool."""
    return {"name": name, "arguments": arguments}


def assistant(content: str = "", *calls: FunctionCall) -> Message:
    """Return an assistant message that says `content` and makes these calls."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": c} for i, c in enumerate(calls)]
    return message
