"""Source: one record while it is read; hands out columns, remembers which were read and what was wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...tools.messages import Role
from .conversation import Talk, is_empty, pair_calls, read_talk
from .records import Faults, Kind, Label, Record, Reply, shown
from .toolsets import read_tools


@dataclass(slots=True)
class Source:
    """One record of a file. What its readers do not take becomes metadata."""

    kind: Kind
    line: int
    value: dict[str, Any]
    faults: Faults
    tools: tuple[dict[str, Any], ...] = ()
    _taken: set[str] = field(default_factory=set)

    def key(self, *names: str) -> str | None:
        """Return the first of `names` that is there; null is as good as missing."""
        return next((name for name in names if self.value.get(name) is not None), None)

    def take(self, name: str) -> Any:
        """Return the value of a key, None where it is missing, and count it as read."""
        self._taken.add(name)
        return self.value.get(name)

    def talk(self, name: str, role: Role) -> Talk:
        """Return the conversation of a column; text in it is what `role` says."""
        return read_talk(self.take(name), name, self.faults, role)

    def opening(self, *names: str) -> Talk:
        """Return the conversation of the first of `names` that is there, with the columns `system` and `tools`."""
        name = self.key(*names)
        talk = Talk() if name is None else self.talk(name, "user")
        if name is None:
            self.faults.add("", f"one of the keys {', '.join(names)}", shown(self.value))
        self.open_with_columns(talk)
        return talk

    def open_with_columns(self, talk: Talk) -> None:
        """Take the columns `tools` and, where `talk` has no system message, `system`."""
        self.tools += read_tools(self.take("tools"), "tools", self.faults)
        text = self.value.get("system")
        if isinstance(text, str) and text and not any(message["role"] == "system" for message in talk.messages):
            self._taken.add("system")
            talk.messages.insert(0, {"role": "system", "content": text})
            talk.paths.insert(0, "system")

    def reply(self, label: Label, talk: Talk) -> Reply:
        """Return a reply; an assistant message that says nothing is a fault."""
        for message, path in zip(talk.messages, talk.paths, strict=True):
            if message["role"] == "assistant" and is_empty(message):
                self.faults.add(path, "an answer", "an empty one", "empty answer")
        return Reply(label, tuple(talk.messages))

    def pair(self, talk: Talk) -> None:
        """Give calls and results their ids; note results without a call, and the tools that `talk` carried."""
        pair_calls(talk, self.faults)
        known = {tool["function"]["name"]: tool for tool in self.tools}
        for tool in talk.tools:
            if known.setdefault(tool["function"]["name"], tool) != tool:
                self.faults.add("tools", "one schema a tool", f"two of {tool['function']['name']!r}", "tools")
        self.tools = tuple(known.values())

    def record(self, prompt: Talk, replies: tuple[Reply, ...] = (), gt: Any = None) -> Record:
        """Return the record; a prompt that does not open as one, or that nobody could answer, is a fault."""
        if not self.faults:
            self._check(prompt)
        rest = {key: item for key, item in self.value.items() if key not in self._taken and item is not None}
        return Record(self.kind, self.line, tuple(prompt.messages), replies, gt, self.tools, rest)

    def _check(self, prompt: Talk) -> None:
        roles = [message["role"] for message in prompt.messages]
        if not roles:
            self.faults.add("", "a user message before the answer", "none", "roles")
        elif roles[0] not in ("system", "user"):
            self.faults.add(prompt.paths[0], "a system or user message first", f"one of the {roles[0]}", "roles")
        elif roles[-1] not in ("user", "tool"):
            wanted = "a user or tool message before the answer"
            self.faults.add(prompt.paths[-1], wanted, f"one of the {roles[-1]}", "roles")
