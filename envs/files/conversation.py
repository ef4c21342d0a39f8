"""Conversations as files have them -- OpenAI's, MiniMind's, ShareGPT's, HH-RLHF's -- as messages of one form."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, cast

from ...tools.messages import Message, Role, ToolCall
from .records import Faults, shown
from .shapes import CALLS, SIDE, checked
from .strict_json import JsonError, loads
from .toolsets import read_tools

_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
HH_START = "\n\nHuman:"
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
#: Keys that say something on messages of one role only; elsewhere they must be empty.
_MEANT_FOR = {"tools": "system", "tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}


@dataclass(slots=True)
class Talk:
    """Messages, the path in the record of each, and the tools that system messages carried."""

    messages: list[Message] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def __add__(self, other: Talk) -> Talk:
        return Talk(self.messages + other.messages, self.paths + other.paths, self.tools + other.tools)

    def __getitem__(self, span: slice) -> Talk:
        return Talk(self.messages[span], self.paths[span], self.tools)

    def answer_place(self) -> int:
        """Return where the last answer begins: at the first assistant message after the last user message."""
        roles = [message["role"] for message in self.messages]
        last_user = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else 0
        return roles.index("assistant", last_user) if "assistant" in roles[last_user:] else len(roles)

    def append(self, message: Message, path: str) -> None:
        """Append one message."""
        self.messages.append(message)
        self.paths.append(path)


def read_talk(value: Any, path: str, faults: Faults, role: Role) -> Talk:
    """Return what stands at `path`: a list of messages, one message, or text.

    Text is what `role` says, unless it begins as HH-RLHF's does ("\\n\\nHuman: ...\\n\\nAssistant: ..."). What is
    wrong is noted in `faults`; the talk is then what could be read.
    """
    talk = Talk()
    if checked(SIDE, value, path, faults) is None:
        return talk
    if isinstance(value, str):
        for said in _transcript(value, role) if value.startswith(HH_START) else [_text(role, value)]:
            talk.append(said, path)
    elif isinstance(value, dict):
        _append(talk, value, path, faults)
    else:
        for index, raw in enumerate(value):
            _append(talk, raw, f"{path}[{index}]", faults)
    return talk


def _text(role: Role, content: str) -> Message:
    return {"role": role, "content": content}


def _transcript(text: str, role: Role) -> list[Message]:
    """Return the messages of HH-RLHF's text; a prompt may end where the assistant is to speak."""
    parts = _SPEAKER.split(text)[1:]
    speakers: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}
    said = [_text(speakers[who], words.strip()) for who, words in zip(parts[::2], parts[1::2], strict=True)]
    return said[:-1] if role == "user" and said[-1] == _text("assistant", "") else said


def is_empty(message: Message) -> bool:
    """Whether an assistant message neither says nor calls anything."""
    return not message["content"].strip() and "tool_calls" not in message


def _append(talk: Talk, raw: dict[str, Any], path: str, faults: Faults) -> None:
    """Append the message that `raw` holds, and the tools it carries."""
    sharegpt = "from" in raw and "role" not in raw
    role = _ROLES[raw["from"]] if sharegpt else cast(Role, raw["role"])
    content, calls, calls_path = raw.get("content"), raw.get("tool_calls"), f"{path}.tool_calls"
    if sharegpt:
        is_call = raw["from"] == "function_call"
        content, calls, calls_path = ("", raw["value"], f"{path}.value") if is_call else (raw["value"], None, path)
    else:
        for key, meant in _MEANT_FOR.items():
            if raw.get(key) and role != meant:
                faults.add(f"{path}.{key}", f"no {key} on a message of the role {role!r}", shown(raw[key]))
    message = _text(role, content or "")
    if calls and role == "assistant":
        known = len(faults)
        made = _calls(calls, calls_path, faults)
        if made or len(faults) > known:  # calls that could not be read are no reason to complain of silence as well
            message["tool_calls"] = made
    if content is None and role != "assistant":  # an assistant that says nothing is judged where its answer is read
        faults.add(f"{path}.content", "text", "null" if "content" in raw else "no such key")
    if role == "assistant" and raw.get("reasoning_content"):
        message["reasoning_content"] = raw["reasoning_content"]
    if role == "tool":
        message["tool_call_id"] = raw.get("tool_call_id") or ""
        if raw.get("name"):
            message["name"] = raw["name"]
    talk.append(message, path)
    if role == "system":
        talk.tools += read_tools(raw.get("tools"), f"{path}.tools", faults)


def _calls(value: Any, path: str, faults: Faults) -> list[ToolCall]:
    """Return the calls that JSON text, a list or a single object holds; ids that are missing are left empty."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except JsonError as error:
            faults.add(path, "JSON text of a list of calls", error.came, "tool calls")
            return []
    items = [value] if isinstance(value, dict) else value
    if checked(CALLS, items, path, faults, "tool calls") is None:
        return []
    made: list[ToolCall] = []
    for index, item in enumerate(items):
        function = item.get("function", item)
        where = f"{path}[{index}]" + (".function" if "function" in item else "") + ".arguments"
        arguments = _arguments(function["arguments"])
        if isinstance(arguments, str):
            faults.add(where, "an object or JSON text of one", arguments, "tool calls")
            continue
        call_id = item.get("id") or ""
        made.append({"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return made


def _arguments(value: Any) -> dict[str, Any] | str:
    """Return the arguments, or what came in place of them."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except JsonError as error:
            return error.came
    return value if isinstance(value, dict) else shown(value)


def pair_calls(talk: Talk, faults: Faults) -> None:
    """Give calls without an id the one a rollout would (`call_{turn}_{i}`), and each tool message that of its call.

    A tool message without an id answers the first call that is still open.
    """
    turn, pending = 0, dict[str, None]()
    for message, path in zip(talk.messages, talk.paths, strict=True):
        if message["role"] == "assistant":
            calls = message.get("tool_calls", [])
            for index, call in enumerate(calls):
                call["id"] = call["id"] or f"call_{turn}_{index}"
            ids = [call["id"] for call in calls]
            if len(set(ids)) < len(ids):
                faults.add(f"{path}.tool_calls", "calls with ids of their own", shown(ids), "tool calls")
            pending.update(dict.fromkeys(ids))
            turn += 1
        elif message["role"] == "tool":
            wanted = message["tool_call_id"] or next(iter(pending), "")
            if wanted in pending:
                del pending[wanted]
                message["tool_call_id"] = wanted
            elif message["tool_call_id"]:
                faults.add(f"{path}.tool_call_id", "the id of an open call", shown(wanted), "roles")
            else:
                faults.add(path, "a call before a tool message", "none that is open", "roles")
