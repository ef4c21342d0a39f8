"""One HTTP call to a server: pooled connections, the key, every fault as a typed error."""

from __future__ import annotations

import os
import socket
from typing import Any, Final

import httpx

from ...tools.errors import ConfigError
from .errors import Unreachable
from .wire import read_error

API_KEY: Final = "GYMTUNE_SGLANG_API_KEY"
"""Environment variable of the key that servers ask for. It is written nowhere."""

_CONNECT_SECONDS = 10.0
_WRITE_SECONDS = 60.0
_IDLE_SECONDS = 4.0  # of a connection; the server closes it after five, and a request must not meet that


class Connections:
    """Connections to any number of servers, to be used on one event loop.

    A client of httpx for each request that is under way, kept for later ones: in one client for all of them, each
    request would look at every connection, for each connection once more.

    Args:
        api_key: the key that the servers ask for; None reads the environment variable GYMTUNE_SGLANG_API_KEY.
    """

    def __init__(self, api_key: str | None = None) -> None:
        key = api_key or os.environ.get(API_KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._trust = httpx.create_ssl_context(trust_env=False)
        self._idle: dict[str, list[httpx.AsyncClient]] = {}  # by address; the one used last is taken first
        self._all: list[httpx.AsyncClient] = []

    async def call(self, url: str, method: str, path: str, body: Any, seconds: float | None) -> Any:
        """Return what an answer says; `seconds` bound each silence of the server. Raises the typed errors."""
        timeout = httpx.Timeout(connect=_CONNECT_SECONDS, read=seconds, write=_WRITE_SECONDS, pool=None)
        idle = self._idle.setdefault(url, [])
        client = idle.pop() if idle else self._open()
        try:
            response = await client.request(method, url + path, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise Unreachable(url, path, f"no answer within {seconds or _CONNECT_SECONDS:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(url, path, f"no server can be reached: {error or type(error).__name__}") from error
        finally:
            idle.append(client)
        if response.status_code >= 300:
            raise read_error(url, path, response.status_code, response.text)
        if not response.content:
            return None
        try:
            answer = response.json()
        except ValueError:
            return response.text
        if isinstance(answer, dict) and answer.get("success") is False:
            raise read_error(url, path, 400, response.text)
        return answer

    async def close(self) -> None:
        """Close them all."""
        for client in self._all:
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS)
        transport = httpx.AsyncHTTPTransport(
            verify=self._trust, trust_env=False, limits=limits, socket_options=_keep_alive()
        )
        self._all.append(httpx.AsyncClient(headers=self._headers, transport=transport, trust_env=False))
        return self._all[-1]


def address(url: str) -> str:
    """Return an address without its last slash. Raises ConfigError for one that is no http or https address."""
    base = url.rstrip("/")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"the address of a server such as http://127.0.0.1:30000 was wanted, got {url!r}")
    return base


def _keep_alive() -> list[tuple[int, int, int]]:
    """Return the socket options by which a machine that is gone is noticed within a minute, without any traffic."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
