"""ChatFormat: how a model family writes thinking and tool calls. One parser serves rollout and scoring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import ConfigError, closest
from .messages import FunctionCall, Message

#: Calls that are read in one turn; those beyond it become one malformed call.
MAX_CALLS = 64


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as the model wrote it.

    Args:
        id: Names the call within the episode; its result bears it.
        name: Name of the tool; empty when the markup gave none.
        arguments: The arguments, or None when they could not be read.
        error: What is wrong with the markup, for the model to mend it; such a call ends in `parse_error`.
        raw: The markup itself.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    error: str | None
    raw: str


@dataclass(frozen=True)
class ParsedTurn:
    """What a turn's text says.

    Args:
        content: Text outside of thinking and calls, stripped.
        reasoning: Text of the thinking span, stripped; None when there was no span.
        calls: Calls in the order written, malformed ones among them.
    """

    content: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]

    def message(self) -> Message:
        """Return the assistant message. The markup of a malformed call stays in `content`, so that nothing is lost."""
        broken = [call.raw for call in self.calls if call.arguments is None or call.error is not None]
        message: Message = {"role": "assistant", "content": "\n".join([self.content, *broken]).strip()}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if len(broken) < len(self.calls):
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
                if call.arguments is not None and call.error is None
            ]
        return message


class ChatFormat(ABC):
    """The markup of a model family. A family is a subclass with its calls; thinking is read and written here."""

    name: ClassVar[str]
    think_open: ClassVar[str] = "<think>"
    think_close: ClassVar[str] = "</think>"
    #: What stands between a turn's content and its calls.
    after_content: ClassVar[str] = "\n"
    #: Markup of calls that is special tokens in the tokenizers of this family and of no other.
    special_tokens: ClassVar[tuple[str, ...]] = ()

    def parse(
        self, text: str, *, thinking_open: bool = False, turn: int = 0, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ParsedTurn:
        """Read one turn.

        A thinking span stands only at the start of a turn, and what is inside it is never a call; an unclosed span
        swallows the rest.

        Args:
            text: What the model wrote, without its stop token.
            thinking_open: The generation prompt itself opened the span.
            turn: Index of the turn, of which the calls' ids are made.
            tools: Tools in the OpenAI form. Markup that does not carry types is read by their schemas.
        """
        reasoning, rest = self._split_thinking(text, thinking_open)
        content, calls = self.scan(rest, turn)
        if len(calls) > MAX_CALLS:
            calls = (*calls[:MAX_CALLS], self._beyond(calls[MAX_CALLS:], turn))
        functions = [tool["function"] for tool in tools] if calls else []
        schemas = {function["name"]: function.get("parameters", {}) for function in functions}
        return ParsedTurn(content.strip(), reasoning, tuple(self.typed(c, schemas.get(c.name, {})) for c in calls))

    def render(self, content: str, calls: Sequence[FunctionCall], reasoning: str | None = None) -> str:
        """Return what the model would write; `parse` gives back stripped content and reasoning free of markup.

        Raises:
            DataError: Arguments without a JSON form, or what the markup has no way to write.
        """
        thinking = "" if reasoning is None else f"{self.think_open}\n{reasoning}\n{self.think_close}\n\n"
        written = self.render_calls(calls) if calls else ""
        return thinking + self.after_content.join(filter(None, [content, written]))

    def call_id(self, turn: int, index: int) -> str:
        """Return the id of a call: none other of the episode has it, and the family's chat template takes it."""
        return f"call_{turn}_{index}"

    def typed(self, call: ParsedCall, parameters: Mapping[str, Any]) -> ParsedCall:
        """Return the call with the arguments meant by the tool's schema (`{}`: unknown). JSON says it by itself."""
        return call

    def _beyond(self, calls: Sequence[ParsedCall], turn: int) -> ParsedCall:
        """Make one malformed call of those beyond the limit."""
        fault = f"more than {MAX_CALLS} calls in one turn: the {len(calls)} beyond were not run. Make fewer at once."
        return ParsedCall(self.call_id(turn, MAX_CALLS), "", None, fault, "\n".join(call.raw for call in calls))

    def _split_thinking(self, text: str, thinking_open: bool) -> tuple[str | None, str]:
        start = text.lstrip()
        if not thinking_open and not start.startswith(self.think_open):
            return None, text
        reasoning, _, rest = start.removeprefix(self.think_open).partition(self.think_close)
        return reasoning.strip(), rest

    @abstractmethod
    def scan(self, text: str, turn: int) -> tuple[str, tuple[ParsedCall, ...]]:
        """Split text without thinking into the content and the calls. Linear in its length; never raises."""

    def render_calls(self, calls: Sequence[FunctionCall]) -> str:
        """Return the markup of a turn's calls, one at least."""
        return "\n".join(map(self.render_call, calls))

    @abstractmethod
    def render_call(self, call: FunctionCall) -> str:
        """Return the markup of one call, as `render_calls` puts it among the others."""

    @abstractmethod
    def tools_prompt(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return text for the system message that tells of tools where the chat template does not; "" for no tools."""


_FORMATS: dict[str, ChatFormat] = {}


def register_chat_format(chat_format: ChatFormat) -> None:
    """Make a format known by its name.

    Raises:
        ConfigError: The name is taken.
    """
    if chat_format.name in _FORMATS:
        raise ConfigError(f"chat format {chat_format.name!r} is registered already. Give yours another name.")
    _FORMATS[chat_format.name] = chat_format


def get_chat_format(name: str) -> ChatFormat:
    """Return the format of that name.

    Raises:
        ConfigError: There is none; names the closest.
    """
    if name not in _FORMATS:
        raise ConfigError(f"no chat format is named {name!r}.{closest(name, _FORMATS)}")
    return _FORMATS[name]


def chat_formats() -> list[ChatFormat]:
    """Return every registered format, in the order of registration."""
    return list(_FORMATS.values())
