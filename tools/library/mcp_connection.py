"""One session with an MCP server, held open on an event loop that a daemon thread runs for the whole process.

The protocol is asynchronous, tools are not: a call waits in its own thread for its coroutine on the loop.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from logging import NullHandler, getLogger
from typing import Any, TextIO

from ..errors import ConfigError

_STOP_SECONDS = 10.0  # a server gets 2 s to leave by itself, 2 s after SIGTERM, then SIGKILL
_LOG_BYTES = 2**20
_TEXT_CHARS = 300


class Connection:
    """One session: a task on the event loop, since the client must be entered and left in one task."""

    def __init__(self, command: list[str], url: str | None) -> None:
        self.last_words = ""
        self._pid = os.getpid()
        self._client: Future[Any] = Future()
        self._calls: set[asyncio.Task[Any]] = set()
        self._ended = threading.Event()
        self._loop = _event_loop()
        _CONNECTIONS.add(self)
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(command, url), self._loop)

    @property
    def works(self) -> bool:
        """Whether calls may be tried: not after its end, and not in a fork of the process that made it."""
        return not self._serving.done() and self._pid == os.getpid()

    def wait_until_ready(self, seconds: float) -> None:
        """Wait for the server's first answer.

        Raises:
            TimeoutError: No answer in time. The server has been ended.
            Exception: Whatever was wrong.
        """
        try:
            self._client.result(seconds)
        except BaseException as error:  # Ctrl-C too
            self.end()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no answer within {seconds:g} seconds") from None
            raise

    def run(self, request: Callable[[Any], Coroutine[Any, Any, Any]], seconds: float) -> Any:
        """Return what `request(client)` comes to on the loop.

        Raises:
            TimeoutError: Not in time. The request is cancelled, others go on.
            CancelledError: The connection ended.
        """
        future = asyncio.run_coroutine_threadsafe(self._request(request), self._loop)
        try:
            return future.result(seconds)
        finally:
            future.cancel()

    def cancel(self) -> None:
        """Begin the end of connection and server."""
        if self._pid == os.getpid():
            self._serving.cancel()

    def end(self) -> None:
        """End connection and server, and wait for that."""
        self.cancel()
        if self._pid == os.getpid():
            self._ended.wait(_STOP_SECONDS)

    async def _serve(self, command: list[str], url: str | None) -> None:
        from mcp import Client

        with tempfile.TemporaryFile("a+", errors="replace") as log:
            try:
                async with Client(url or _stdio(command, log)) as client:
                    self._log = log
                    self._client.set_result(client)
                    await asyncio.Event().wait()  # for the cancel
            except BaseException as error:  # noqa: BLE001  cancelled, or whatever another program did to the client
                if not self._client.done():
                    log.seek(0)
                    self.last_words = log.read().strip().rpartition("\n")[2][:_TEXT_CHARS]
                    self._client.set_exception(error)
            finally:
                for call in list(self._calls):
                    call.cancel()
                _CONNECTIONS.discard(self)
                self._ended.set()

    async def _request(self, request: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        if not self.works:
            raise ConnectionError
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            if os.fstat(self._log.fileno()).st_size > _LOG_BYTES:  # a server that logs every call fills no disk
                os.ftruncate(self._log.fileno(), 0)
            return await request(self._client.result())
        finally:
            self._calls.discard(task)


_QUIET = NullHandler()
_CONNECTIONS: set[Connection] = set()
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}  # by process id: a fork gets its own, and leaves its parent's alone
_LOOPS_LOCK = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    with _LOOPS_LOCK:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="gymtune-mcp", daemon=True).start()
        return loop


@atexit.register
def _end_all() -> None:
    connections = list(_CONNECTIONS)
    for connection in connections:
        connection.cancel()
    for connection in connections:
        connection.end()


def require_mcp() -> None:
    """Check that the package `mcp` is installed, and keep what it logs out of the terminal.

    Raises:
        ConfigError: It is not.
    """
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise ConfigError("MCP servers need the extra mcp. Run: pip install 'gymtune[mcp]'") from None
    getLogger("mcp").addHandler(_QUIET)  # without any handler, Python would print warnings


def _stdio(command: list[str], log: TextIO) -> Any:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    return stdio_client(StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ)), log)


def is_loss(error: Exception) -> bool:
    """Return whether the connection is lost, and not just the call."""
    from mcp.shared.exceptions import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):  # servers use the code for errors of their own, too
        return bool(error.code == CONNECTION_CLOSED and error.message == "Connection closed")
    return isinstance(error, CancelledError | ConnectionError)


def cause(error: BaseException) -> str:
    """Return the text of an error, or of the first in a group of errors, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:_TEXT_CHARS].rstrip(".") or type(error).__name__
