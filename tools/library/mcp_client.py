"""Any MCP server as tools (extra `mcp`): `McpServer(command)` over stdio, `McpServer(url=...)` over streamable HTTP."""

from __future__ import annotations

import re
import shlex
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from ..errors import ConfigError, ToolError, closest
from ..tool import Tool
from .mcp_connection import Connection, cause, is_loss, require_mcp

_NAME_CHARS = 64


class McpServer:
    """A connection to an MCP server, opened when first needed. Thread-safe, and a context manager.

    A server started by `command` inherits the environment; what it logs is kept out of the terminal. It ends with
    `close()`, or with this process. After a server has died, the next call starts or reaches it anew.

    Args:
        command: Command line of a server that speaks over stdio, such as `"python server.py"`, or its words.
        url: Address of a server that speaks streamable HTTP, such as `"http://127.0.0.1:8000/mcp"`.
        start_seconds: Time within which it must answer for the first time.

    Raises:
        ConfigError: Not one of `command` and `url`, or the extra `mcp` is not installed.
    """

    def __init__(
        self, command: str | Sequence[str] | None = None, *, url: str | None = None, start_seconds: float = 20.0
    ) -> None:
        require_mcp()
        if bool(command) == bool(url):
            raise ConfigError(f"McpServer takes a command or url=, got command={command!r} and url={url!r}")
        try:
            self._command = shlex.split(command) if isinstance(command, str) else list(command or ())
        except ValueError as error:
            raise ConfigError(f"MCP server {command!r}: {error}. Give the command as a list of words.") from None
        self._url = url
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._connection: Connection | None = None

    def __str__(self) -> str:
        return f"MCP server {self._url or shlex.join(self._command)!r}"

    def open(self) -> None:
        """Connect, if not connected.

        Raises:
            ConfigError: The server cannot be started or reached, or speaks no MCP.
        """
        with self._lock:
            self._closed = False
            self._connected()

    def close(self) -> None:
        """End the connection and the server that was started for it. Calls are refused until `open()`."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tools(self, time_limit: float = 10.0, only: Sequence[str] | None = None) -> list[Tool]:
        """Open the connection and return the server's tools, in its order.

        Args:
            time_limit: Seconds a call may take; then it is cancelled, and the connection goes on.
            only: Names of tools to keep, as the server gives them. None for all.

        Raises:
            ConfigError: As `open`; a schema is wrong; the server has no tool of a name in `only`.
        """
        offered = self._offered()
        for name in only or ():
            if all(tool.name != name for tool in offered):
                raise ConfigError(f"{self} has no tool {name!r}.{closest(name, (tool.name for tool in offered))}")
        made: dict[str, Tool] = {}
        for tool in offered:
            if only is None or tool.name in only:
                name, call = _legal(tool.name, made), partial(self._call, tool.name, time_limit)
                try:
                    made[name] = Tool(name, tool.description or "", tool.input_schema, call, time_limit)
                except ConfigError as error:
                    raise ConfigError(f"{self}: {error} Or leave the tool out: only=[...].") from None
        return list(made.values())

    def _offered(self) -> list[Any]:
        for last in (False, True):
            with self._lock:
                self._closed = False
                connection = self._connected()
            try:
                return list(connection.run(_list_tools, self._start_seconds))
            except Exception as error:  # noqa: BLE001  whatever another program's answer does to the client
                if last or not is_loss(error):
                    raise ConfigError(f"{self} does not list its tools: {cause(error)}") from None
                connection.cancel()  # it died since it was used
        raise AssertionError("unreachable")

    def _call(self, name: str, time_limit: float, /, **arguments: Any) -> Any:
        with self._lock:
            if self._closed:
                raise ToolError("the tool's server is closed")
            try:
                connection = self._connected()
            except ConfigError as error:
                raise ToolError(f"the tool's server cannot be started again: {error}") from None
        try:
            result = connection.run(lambda client: client.call_tool(name, arguments), time_limit)
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001  whatever another program's answer does to the client
            if not is_loss(error):
                raise ToolError(cause(error)) from None
            connection.cancel()
            raise ToolError("the tool's server ended during the call. The next call starts it again.") from None
        return _read(result)

    def _connected(self) -> Connection:
        """Return the connection, a new one where there is none that works. With the lock held."""
        if self._connection is None or not self._connection.works:
            self._connection = None
            connection = Connection(self._command, self._url)
            weakref.finalize(self, connection.cancel).atexit = False  # `_end_all` cancels, and waits
            try:
                connection.wait_until_ready(self._start_seconds)
            except Exception as error:  # noqa: BLE001  a missing command, a refused connection, junk instead of MCP
                words = f" Its last words: {connection.last_words!r}." if connection.last_words else ""
                mend = (
                    "Check that it is the address of an MCP server over streamable HTTP, often ending in /mcp."
                    if self._url
                    else "Check that the command, typed in a shell, starts an MCP server over stdio."
                )
                raise ConfigError(f"{self}: {cause(error)}.{words} {mend}") from None
            self._connection = connection
        return self._connection


async def _list_tools(client: Any) -> list[Any]:
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


def _legal(name: str, taken: dict[str, Tool]) -> str:
    """Return the name as tools are named, another than those taken."""
    base = re.sub(r"[^a-zA-Z0-9_.-]", "_", name)[:_NAME_CHARS] or "tool"
    legal, number = base, 1
    while legal in taken:
        number += 1
        legal = f"{base[: _NAME_CHARS - 1 - len(str(number))]}_{number}"
    return legal


def _read(result: Any) -> Any:
    """Return the text of a result, or its JSON where it has no text.

    Raises:
        ToolError: The server marks the result as an error.
    """
    text = "\n".join(_block_text(block) for block in result.content)
    if result.is_error:
        raise ToolError(text or "the tool failed and does not say why")
    if result.structured_content is not None and all(block.type != "text" for block in result.content):
        return result.structured_content
    return text


def _block_text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    text = getattr(getattr(block, "resource", None), "text", None)  # a file within the result
    return f"[{block.type} omitted]" if text is None else str(text)
