"""gymtune/ToolUse-v0: agentic files. A record brings its tools and its `gt`; calls are run, the end is scored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..rewards.components import failed_calls, gt_component, unfinished
from ..rewards.registry import get_checker, load_object
from ..rewards.tool_calls_match import ToolCallsMatch
from ..tools.errors import ConfigError, DataError, closest
from ..tools.library.everyday import everyday_tools
from ..tools.library.mcp_client import McpServer
from ..tools.messages import assistant
from ..tools.tool import Tool
from ..tools.toolbox import Toolbox
from .chat_env import ChatEnv
from .files import FileTasks, Record, example_path, kind_for
from .tasks import MadeTasks, Task

_WEIGHTS = {"gt": 1.0, "unfinished": 0.5}
_TOOLBOXES = 256  # toolboxes kept, by the text of their schemas: compiling a schema takes longer than a call


def make_task(record: Record, name: str) -> Task:
    """Make the task of a record. Its gold is the answer on file; where calls are judged, the first acceptable ones.

    Raises DataError for calls to be judged without a `ground_truth`.
    """
    task = Task(f"{name}/{record.line}", record.prompt, record.gt, None, record.metadata, tools=record.tools)
    if record.kind == "bfcl":
        if record.gt is None:
            raise DataError(
                f"{name}, line {record.line}: wanted ground_truth beside the question, came none; BFCL keeps it in "
                "the file of the same name below possible_answer: join the two by id"
            )
        calls = ToolCallsMatch().gold(record.gt)
        return replace(task, gold=(*([assistant("", *calls)] if calls else []), assistant("Done.")))
    if not record.replies:
        return task
    return replace(task, gold=tuple(m for m in record.replies[0].messages if m["role"] == "assistant"))


def load_tools(source: str) -> list[Tool]:
    """Return the tools of `module:name`: a list of `Tool`, a `Toolbox`, or a function that returns one of these.

    Raises ConfigError when there is nothing of that name, or something else.
    """
    found = load_object(source, "tools")
    if callable(found) and not isinstance(found, Tool):
        found = found()
    found = found.tools if isinstance(found, Toolbox) else [found] if isinstance(found, Tool) else found
    if not isinstance(found, Sequence) or not all(isinstance(tool, Tool) for tool in found):
        raise ConfigError(f"tools {source!r} must be `module:name` of tools or a Toolbox, got {found!r:.80}")
    return list(found)


@cache
def _server(address: str) -> McpServer:
    """One connection for all envs of the process; it ends with the process."""
    return McpServer(url=address) if address.startswith(("http://", "https://")) else McpServer(address)


class ToolUseEnv(ChatEnv):
    """Tasks from an agentic file: tools by record, several calls a turn, the answer scored at the end.

    Records say how a tool is called (its schema); what it does comes from the library (MiniMind's six) or from you. A
    file of acceptable calls (BFCL) is judged by its calls, which are noted and not run.

    Args:
        data: an agentic file (MiniMind's `conversations` + `gt`) or one in BFCL's form; a small one that ships is the
            default.
        tools: `module:name` of your own tools, for names that the library lacks (they come first).
        mcp: command or URL of an MCP server, whose tools take the place of those in the file. All envs of a process
            share one connection: a server that keeps a state keeps it across episodes.
        checker: `contains_gt` for answers (default), `tool_calls_match` for calls (default in BFCL's form), ...
        rewards: default 1 for `gt`, 0.5 for `unfinished` (-1 where the episode was cut); `failed_calls` is seen, not
            paid; `minimind_agent` is MiniMind's whole reward.
        max_turns: actions an episode may take; MiniMind's number.
    """

    def __init__(
        self,
        data: str | None = None,
        tools: str | None = None,
        mcp: str | None = None,
        checker: str | None = None,
        rewards: Mapping[str, float] | str | None = None,
        max_turns: int = 3,
        **options: Any,
    ) -> None:
        path = Path(data) if data is not None else example_path("agentic")
        kind = kind_for(path, "agentic", "bfcl", reader="gymtune/ToolUse-v0")
        self._only_noted = kind == "bfcl"
        judge = get_checker(checker or ("tool_calls_match" if self._only_noted else "contains_gt"))
        self._known = {tool.name: tool for tool in [*everyday_tools(), *(load_tools(tools) if tools else [])]}
        self._toolboxes: dict[str, Toolbox] = {}
        self._served = Toolbox(_server(mcp).tools()) if mcp is not None else None
        super().__init__(
            MadeTasks(FileTasks(path, kind=kind), partial(make_task, name=path.stem)),
            [gt_component(judge), failed_calls, unfinished],
            rewards=_WEIGHTS if rewards is None else rewards,
            max_turns=max_turns,
            **options,
        )
        self.toolbox = self.make_toolbox(self.tasks[0])

    def make_toolbox(self, task: Task) -> Toolbox:
        """Return the tools that the record names; those of the server where there is one.

        Raises ConfigError for a tool that nobody has implemented.
        """
        if self._served is not None:
            return self._served
        key = json.dumps(task.tools)
        if key not in self._toolboxes:
            if len(self._toolboxes) >= _TOOLBOXES:
                self._toolboxes.clear()
            self._toolboxes[key] = Toolbox([self._tool(schema["function"], task) for schema in task.tools])
        return self._toolboxes[key]

    def _tool(self, schema: Mapping[str, Any], task: Task) -> Tool:
        name, text = schema["name"], schema.get("description", "")
        parameters = dict(schema.get("parameters") or {"type": "object", "properties": {}})
        if self._only_noted:
            return Tool(name, text, parameters, lambda **_: "noted", in_memory=True, on_violation="report")
        if name not in self._known:
            raise ConfigError(
                f"task {task.task_id}: nobody has implemented its tool {name!r}.{closest(name, self._known)} "
                "Give your own with tools=module:name, or a server with mcp=..."
            )
        return replace(self._known[name], description=text, parameters=parameters)
