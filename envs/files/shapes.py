"""The shapes that messages, calls and tools have in files, as pydantic models, and pydantic's errors as faults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from ...tools.messages import Role
from .records import Faults, shown

T = TypeVar("T")
_STRICT = ConfigDict(strict=True, extra="ignore")


@with_config(_STRICT)
class ChatMessage(TypedDict):
    """A message as OpenAI and MiniMind write it. Null is as good as missing; keys not named here are not read."""

    role: Role
    content: NotRequired[str | None]
    name: NotRequired[str | None]
    tools: NotRequired[Any]
    tool_calls: NotRequired[Any]
    tool_call_id: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]


#: A message as ShareGPT writes it; `from` is no name that a field of a class could have.
ShareGPTMessage = TypedDict(
    "ShareGPTMessage",
    {
        "from": Literal["system", "human", "user", "gpt", "assistant", "function_call", "observation", "tool"],
        "value": str,
        "tools": NotRequired[Any],
    },
)
with_config(_STRICT)(ShareGPTMessage)


def _writer(message: Any) -> str:
    return "<sharegpt>" if isinstance(message, dict) and "from" in message and "role" not in message else "<chat>"


RawMessage = Annotated[
    Annotated[ChatMessage, Tag("<chat>")] | Annotated[ShareGPTMessage, Tag("<sharegpt>")],
    Discriminator(_writer),
]


def _form(side: Any) -> str | None:
    forms: dict[type, str] = {str: "<text>", list: "<messages>", dict: "<message>"}
    return forms.get(type(side))


#: What stands for (a part of) a conversation: text, messages, or one message.
Side = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[RawMessage], Tag("<messages>")]
    | Annotated[RawMessage, Tag("<message>")],
    Discriminator(
        _form, custom_error_type="side", custom_error_message="text or a list of messages", custom_error_context={}
    ),
]


@with_config(_STRICT)
class Function(TypedDict):
    """Name and arguments of a call; the arguments are an object, or JSON text of one, read later."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Any


@with_config(_STRICT)
class Call(TypedDict):
    """A call as OpenAI writes it."""

    id: NotRequired[str | None]
    function: Function


@with_config(_STRICT)
class BareCall(Function):
    """A call that is nothing but name and arguments."""

    id: NotRequired[str | None]


@with_config(_STRICT)
class ToolFunction(TypedDict):
    """A tool without OpenAI's wrapping."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]


@with_config(_STRICT)
class WrappedTool(TypedDict):
    """A tool as OpenAI writes it."""

    function: ToolFunction


def _wrapping(item: Any) -> str:
    return "<wrapped>" if isinstance(item, dict) and "function" in item else "<bare>"


SIDE: TypeAdapter[Any] = TypeAdapter(Side)
CALLS: TypeAdapter[list[Call | BareCall]] = TypeAdapter(
    list[Annotated[Annotated[Call, Tag("<wrapped>")] | Annotated[BareCall, Tag("<bare>")], Discriminator(_wrapping)]]
)
TOOL: TypeAdapter[WrappedTool | ToolFunction] = TypeAdapter(
    Annotated[
        Annotated[WrappedTool, Tag("<wrapped>")] | Annotated[ToolFunction, Tag("<bare>")], Discriminator(_wrapping)
    ]
)

_MOST = 100  # faults told of one value
_WANTED = {
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "1 to 64 of letters, digits, '_', '.', '-'",
}


def checked(adapter: TypeAdapter[T], value: Any, path: str, faults: Faults, rule: str = "shape") -> T | None:
    """Return `value` when it has the adapter's shape; else note what is wrong, by path, and return None."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        for found in error.errors(include_url=False)[:_MOST]:
            # names in brackets are the models tried, not keys
            steps = [step for step in found["loc"] if not (isinstance(step, str) and step.startswith("<"))]
            if found["type"] == "missing":
                where, wanted = _path(path, steps[:-1]), f"the key {steps[-1]!r}"
            else:
                wanted = _WANTED.get(found["type"]) or str(found.get("ctx", {}).get("expected", found["msg"]))
                where = _path(path, steps)
            faults.add(where, wanted, shown(found["input"]), rule)
        return None


def _path(path: str, steps: list[Any]) -> str:
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")
