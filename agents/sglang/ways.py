"""What the ways of bringing weights to servers have in common: their protocol, the pause, the session, the buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, ClassVar, Final

from .errors import Refused, ServerError
from .servers import Servers

if TYPE_CHECKING:
    from torch import Tensor

PUSH_SECONDS: Final = 600.0
"""How long a server may take to load what it was sent."""

BUCKET_BYTES: Final = 256 * 2**20
"""Weights that travel at once: on both sides a few times this is held on top of the model."""

Bucket = list[tuple[str, "Tensor"]]
"""Weights that travel together, by Hugging Face's names."""

_FLUSH_SECONDS = 30.0  # a server that was paused gives its cache up at once
_CONTINUES = 3  # tries to wake a server that was paused
_CONTINUE_SECONDS = 20.0


class Way(ABC):
    """One way of bringing weights to servers.

    Attributes:
        pauses: whether a server must stand still meanwhile, for its weights change under the requests that run.
        keeps: whether `send` needs no weights after `prepare`, so that a server that was started anew can have them
            again at any time.
    """

    pauses: ClassVar[bool] = True
    keeps: ClassVar[bool] = False

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def prepare(self, version: int, weights: Mapping[str, Tensor]) -> None:  # noqa: B027 - most need nothing
        """Do what can be done while the servers sample on. Raises RunError, and then no server has changed."""

    @abstractmethod
    def send(self, url: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """Bring weights of a version to one server, which calls itself by that version from then on.

        Called from a thread for each server. Raises ServerError; the server may then hold a part of them.
        """

    def fields(self, version: int) -> dict[str, Any]:
        """Return what a request must carry to be sampled by the weights of a version."""
        return {}

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what is held."""


@contextmanager
def paused(servers: Servers, url: str) -> Iterator[None]:
    """Let a server stand still within the block; it is told to go on however the block ends.

    Requests that run are retracted: their tokens stay, and the server computes their cache anew when it goes on. To
    pause in place would be cheaper, but would sample with the old weights' cache under the new weights, so that the
    log-probs were those of neither version; and a cache in use cannot be flushed. New requests wait at the server.
    """
    try:
        _pause(servers, url)
        yield
    except BaseException:
        with suppress(ServerError):  # what happened before is what matters
            _go_on(servers, url)
        raise
    _go_on(servers, url)


def flush(servers: Servers, url: str) -> None:
    """Empty a server's cache of prefixes, which the old weights made. Raises Refused when it keeps refusing."""
    until = monotonic() + _FLUSH_SECONDS
    while True:
        try:
            servers.post(url, "/flush_cache", {})
            return
        except Refused as error:
            if monotonic() > until:
                told = f"it does not flush its cache, so it would sample from that of older weights: {error.told}"
                raise Refused(url, "/flush_cache", told, error.status) from error
        sleep(0.1)


@contextmanager
def update_session(servers: Servers, url: str) -> Iterator[None]:
    """Bracket updates that come in parts: servers from 0.5.21 on want begin and end, older ones know neither (404)."""
    if not _begin(servers, url):
        yield
        return
    try:
        yield
    except BaseException:
        with suppress(ServerError):
            servers.post(url, "/end_weight_update", {})
        raise
    servers.post(url, "/end_weight_update", {}, seconds=PUSH_SECONDS)


def buckets(weights: Mapping[str, Tensor], version: int, limit: int = BUCKET_BYTES) -> Iterator[tuple[Bucket, str]]:
    """Yield the weights in parts of at most `limit` bytes (a larger tensor is one alone), each with its version's name.

    All but the last are named `N-partial`: a server that got only these must not pass for one of version N, nor of the
    one before.
    """
    part: Bucket = []
    size = 0
    for name, tensor in weights.items():
        if part and size + tensor.nbytes > limit:
            yield part, f"{version}-partial"
            part, size = [], 0
        part.append((name, tensor.detach()))
        size += tensor.nbytes
    yield part, str(version)


def _pause(servers: Servers, url: str) -> None:
    path = "/pause_generation"
    try:
        servers.post(url, path, {"mode": "retract"})
    except Refused as error:
        if error.status != 404:
            raise
        told = "it takes no weights: is this a router? It passes none on, so give the addresses of its workers"
        raise Refused(url, path, told, error.status) from error


def _go_on(servers: Servers, url: str) -> None:
    """Wake a server; one that was left paused would let every request wait for ever."""
    for left in reversed(range(_CONTINUES)):
        try:
            servers.post(url, "/continue_generation", {}, seconds=_CONTINUE_SECONDS)
            return
        except ServerError:
            if not left:
                raise
        sleep(0.2)


def _begin(servers: Servers, url: str) -> bool:
    """Open a session. Returns False where the server knows none; one left open by a trainer that died is closed."""
    for again in (True, False):
        try:
            servers.post(url, "/begin_weight_update", {})
            return True
        except Refused as error:
            if error.status == 404:
                return False
            if not again or "already open" not in error.told:
                raise
        servers.post(url, "/end_weight_update", {})
    return True
