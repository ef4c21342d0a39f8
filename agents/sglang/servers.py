"""The servers behind one client: which one gets a request, and what happens when one is gone.

All traffic runs on one event loop in a thread of its own, so that connections outlive the `asyncio.run` of a rollout
and a trainer's thread may speak to the servers at the same time. A request goes to the server with the fewest under
way. Sampling has no side effect, so a request whose server died or ended it is sent again, under a new id; the old one
is aborted first, wherever it may still run. A server that does not answer gets no requests until it answers again, and
while none answers, requests wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus
from random import uniform
from typing import Any, TypeVar
from uuid import uuid4

from ...tools.errors import ConfigError, RunError
from .connections import Connections, address
from .errors import Aborted, Busy, Refused, ServerError, Unreachable, WrongVersion
from .facts import ServerFacts, read_facts
from .wire import GENERATE, Answer, read_answer

T = TypeVar("T")

_ABORT, _MODEL, _OLD_MODEL, _SERVER = "/abort_request", "/model_info", "/get_model_info", "/server_info"
_PROBE_SECONDS = 10.0
_SILENT_SECONDS = 30.0  # a request that runs so long is no fault, but is its server still there?
_PROBES = 3  # in a row without an answer, and it is not
_MOST_TRIES = 12  # of one request, in which servers died, ended it, or were busy
_LONGEST_PAUSE = 5.0  # seconds between two looks at a server that is down
_ABORTS = 5  # a second apart, until the server lets go


class _Server:
    """One address: how many requests are under way, and whether it answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.sent = 0
        self.fault: ServerError | None = None  # why it gets no requests
        self.nurse: asyncio.Task[None] | None = None  # looks after it meanwhile


class Servers:
    """Clients of SGLang servers that hold the same model.

    Args:
        urls: addresses, such as `http://10.0.0.5:30000`. A router is one address as well, for sampling; weights are
            pushed to workers, so where they change, name the workers.
        api_key: the key that the servers ask for; None reads the environment variable GYMTUNE_SGLANG_API_KEY.
        patience_seconds: how long requests wait while no server answers.

    Attributes:
        on_stale: called with an address, in a thread, when a server came back with other weights than those expected:
            push them again. Until it has them it gets no requests.

    Raises ConfigError for addresses that are none.
    """

    def __init__(self, urls: Sequence[str], *, api_key: str | None = None, patience_seconds: float = 180.0) -> None:
        self.urls = [address(url) for url in urls]
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ConfigError(f"at least one address of a server was wanted, each once, got {list(urls)}")
        self.patience_seconds = patience_seconds
        self.on_stale: Callable[[str], None] | None = None
        self._servers = {url: _Server(url) for url in self.urls}
        self._expected: list[str] = []  # versions of the weights, the newest last; none: any will do
        self._running: set[asyncio.Task[Any]] = set()  # what other threads wait for
        self._aborting: set[asyncio.Task[None]] = set()
        self._connections = Connections(api_key)
        self._loop = asyncio.new_event_loop()
        self._up = asyncio.Event()
        self._up.set()
        self._dark_since = 0.0  # on the loop's clock; read while no server is up
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="gymtune-sglang")
        self._thread.start()

    async def generate(self, body: dict[str, Any]) -> Answer:
        """Return the answer to `POST /generate` with this body, of whichever server.

        Its `rid` is made here, a new one each try. Cancelling the call aborts the request on its server, without
        waiting for that. Raises Unreachable or WrongVersion when no server could be used for `patience_seconds`;
        Refused for a request that is wrong, BadAnswer for an answer that is; and Unreachable, WrongVersion, Aborted or
        Busy when one request met with too many of them.
        """
        return await asyncio.wrap_future(self._submit(lambda: self._generate(body)))

    def post(self, url: str, path: str, body: Any = None, *, seconds: float = 60.0) -> Any:
        """Return what a server answers to a POST: what its JSON says, its text, or None where it is empty.

        Nothing is tried again. Raises the typed errors; Refused too where an answer says `"success": false`.
        """
        base, sent = address(url), {} if body is None else body
        return self._wait(lambda: self._connections.call(base, "POST", path, sent, seconds))

    def get(self, url: str, path: str, *, seconds: float = 60.0) -> Any:
        """Return what a server answers to a GET, as `post` does."""
        base = address(url)
        return self._wait(lambda: self._connections.call(base, "GET", path, None, seconds))

    def facts(self, url: str) -> ServerFacts:
        """Return what a server says of itself. Raises BadAnswer for what is no SGLang server."""
        model, server = self._page(url, _MODEL, _OLD_MODEL), self._page(url, _SERVER)
        return read_facts(address(url), model, server)

    def down(self) -> list[str]:
        """Return the addresses that get no requests now: they do not answer, or have other weights."""
        return [server.url for server in self._servers.values() if server.fault is not None]

    def fail(self, url: str, error: ServerError) -> None:
        """Give a server no more requests until it answers and has the weights that are expected."""

        async def work() -> None:
            self._fails(self._servers[address(url)], error)

        self._wait(work)

    def expect(self, version: str) -> None:
        """Take answers of weights of this version from now on, and of those expected before.

        A server that comes back from the dead must have the newest one before it gets requests.
        """
        self._expected.append(version)

    def close(self) -> None:
        """Abort what is under way, close the connections and end the thread. Nothing happens the second time."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- from here on, on the loop of the thread -----------------------------------------------------------------

    async def _generate(self, body: dict[str, Any]) -> Answer:
        tries = 0
        while True:
            server, own = await self._free(), {"rid": uuid4().hex, **body}
            try:
                answer = read_answer(server.url, own, await self._ask(server, own))
                self._check(server, answer)
                return answer
            except (Unreachable, WrongVersion) as error:
                self._fails(server, error)
                fault: ServerError = error
            except (Aborted, Busy) as error:
                await asyncio.sleep(min(0.1 * 2**tries, 20.0) * uniform(0.5, 1.0))
                fault = error
            tries += 1
            if tries == _MOST_TRIES:
                raise type(fault)(fault.url, fault.path, f"{fault.told} (the last of {tries} tries)", fault.status)

    async def _free(self) -> _Server:
        """Return the server with the fewest requests under way, once there is one."""
        while True:
            up = [server for server in self._servers.values() if server.fault is None]
            if up:
                server = min(up, key=lambda server: (server.in_flight, server.sent))
                server.sent += 1
                return server
            left = self._dark_since + self.patience_seconds - self._loop.time()
            try:
                await asyncio.wait_for(self._up.wait(), max(left, 0.0))
            except TimeoutError:
                raise self._nobody() from None

    def _nobody(self) -> ServerError:
        """Return the error for requests that waited in vain: the first server's own fault, for how long, the mend."""
        fault = next(server.fault for server in self._servers.values() if server.fault is not None)
        others = len(self._servers) - 1
        told = (
            f"{fault.told}; no server could be used for {self.patience_seconds:g} s"
            f"{f' ({others} more were tried)' if others else ''}: see their logs, start them again"
        )
        return type(fault)(fault.url, fault.path, told, fault.status)

    async def _ask(self, server: _Server, body: dict[str, Any]) -> Any:
        """Send a request and wait for its answer; ask now and then whether the server is there at all.

        However this ends but by an answer, the request is aborted in the background.
        """
        sent = self._loop.create_task(self._connections.call(server.url, "POST", GENERATE, body, None))
        server.in_flight += 1
        answered = False
        try:
            while not (await asyncio.wait({sent}, timeout=_SILENT_SECONDS))[0]:
                await self._still_there(server)
            answered = True
            return sent.result()
        except Unreachable:
            answered = False
            raise
        finally:
            server.in_flight -= 1
            if not answered:
                work = self._loop.create_task(self._let_go(server, body["rid"], sent))
                self._aborting.add(work)
                work.add_done_callback(self._aborting.discard)

    async def _let_go(self, server: _Server, rid: str, sent: asyncio.Task[Any]) -> None:
        """Abort a request until the server answers it, then drop it: a closed connection alone stops nothing soon."""
        try:
            for _ in range(_ABORTS):
                await self._connections.call(server.url, "POST", _ABORT, {"rid": rid}, _PROBE_SECONDS)
                if (await asyncio.wait({sent}, timeout=1.0))[0]:
                    break
        except ServerError:
            pass  # it is gone, or a router, which passes no aborts on
        finally:
            sent.cancel()
            sent.add_done_callback(_hear)

    async def _still_there(self, server: _Server) -> None:
        """Raise Unreachable when a server answers nothing at all; what it answers does not matter."""
        for left in reversed(range(_PROBES)):
            try:
                await self._connections.call(server.url, "GET", _MODEL, None, _PROBE_SECONDS)
            except Unreachable:
                if not left:
                    raise
            except ServerError:
                return
            else:
                return

    def _check(self, server: _Server, answer: Answer) -> None:
        """Raise WrongVersion when any of an answer was sampled by weights that nobody pushed."""
        others = {version for version, _, _ in answer.spans} - set(self._expected)
        if self._expected and others:
            raise self._wrong(server, ", ".join(sorted(others)))

    def _wrong(self, server: _Server, got: str) -> WrongVersion:
        told = (
            f"it has weights of version {got!r}, wanted {self._expected[-1]!r}: it was started anew, or somebody else "
            "changes its weights"
        )
        return WrongVersion(server.url, GENERATE, told)

    def _fails(self, server: _Server, error: ServerError) -> None:
        """Give a server no more requests, and look after it until it is well."""
        if server.fault is not None:
            return
        server.fault = error
        if all(other.fault is not None for other in self._servers.values()) and self._up.is_set():
            self._up.clear()
            self._dark_since = self._loop.time()
        server.nurse = self._loop.create_task(self._revive(server))

    async def _revive(self, server: _Server) -> None:
        """Look at a server that is down, ever less often, until it answers and has the right weights."""
        pause = 0.1
        while server.fault is not None:
            try:
                info = await self._connections.call(server.url, "GET", _MODEL, None, _PROBE_SECONDS)
                got = info.get("weight_version") if isinstance(info, dict) else None
                if self._expected and got is not None and str(got) != self._expected[-1]:
                    raise self._wrong(server, str(got))
                server.fault = None
            except Refused:  # a router has no such page
                server.fault = None
            except WrongVersion as error:
                server.fault = error
                if self.on_stale is not None:
                    with suppress(RunError):  # it may have died again; the next look says
                        await asyncio.to_thread(self.on_stale, server.url)
            except ServerError as error:
                server.fault = error
            await asyncio.sleep(0 if server.fault is None else pause * uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._up.set()

    async def _shut(self) -> None:
        """End everything; what is under way is aborted first, within two seconds."""
        nurses = {server.nurse for server in self._servers.values() if server.nurse is not None}
        await _end((self._running | nurses) - {asyncio.current_task()}, 0.0)
        await _end(self._aborting, 2.0)
        await _end(asyncio.all_tasks() - {asyncio.current_task()}, 0.0)
        await self._connections.close()

    # -- between the threads ---------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        if self._loop.is_closed():
            raise RunError("the client of the servers is closed")
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)

    async def _tracked(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work()
        finally:
            self._running.discard(task)

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # after an interrupt nobody waits for it

    def _page(self, url: str, *paths: str) -> Any:
        """Return the first of these pages that is there, else None."""
        for path in paths:
            try:
                return self.get(url, path, seconds=15.0)
            except Refused as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
        return None


def check_server(url: str, *, api_key: str | None = None) -> ServerFacts:
    """Ask a server what it is; nothing is generated, nothing changed. Raises the typed errors."""
    servers = Servers([url], api_key=api_key)
    try:
        return servers.facts(url)
    finally:
        servers.close()


async def _end(tasks: set[asyncio.Task[Any]], seconds: float) -> None:
    """Give tasks this long, then cancel them and wait until they have ended."""
    if tasks and seconds:
        await asyncio.wait(tasks, timeout=seconds)
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=2.0)


def _hear(task: asyncio.Task[Any]) -> None:
    """Take note of how a task ended, for nobody waits for it."""
    if not task.cancelled():
        task.exception()
