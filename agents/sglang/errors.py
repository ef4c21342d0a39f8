"""What can go wrong with a server, as one tree under RunError.

::

    RunError
    +-- ServerError        a server did not do what was asked; names address, path and HTTP status
        +-- Unreachable    nobody answers, or the connection broke
        +-- Refused        the server says that the request is wrong (4xx), in its own words
        +-- Busy           the server cannot take the request now (queue full, no worker)
        +-- Aborted        generation was ended by the server, and not by us
        +-- BadAnswer      the answer is not what the request asked for (lengths, ids, missing fields)
        +-- WrongVersion   the server has other weights than those that were pushed
        +-- Drifted        the server's log-probs are not the trainer's
        +-- LaunchFailed   a server of our own did not start, or died too often
"""

# ruff: noqa: N818 - the names say what happened; the base says that it is an error

from __future__ import annotations

from ...tools.errors import RunError


class ServerError(RunError):
    """A server did not do what was asked.

    Args:
        url: address of the server.
        path: of the request, such as `/generate`; empty where there was none.
        told: what was wanted, what came, and the mend.
        status: of the HTTP answer; None where none came.
    """

    def __init__(self, url: str, path: str, told: str, status: int | None = None) -> None:
        super().__init__(f"{url}{path}{'' if status is None else f' answered {status}'}: {told}")
        self.url, self.path, self.told, self.status = url, path, told, status


class Unreachable(ServerError):
    """Nobody answers at this address, in this time, or the connection broke on the way."""


class Refused(ServerError):
    """The server refused the request: it says why, and would refuse it again."""


class Busy(ServerError):
    """The server cannot take the request now: its queue is full, or a router has no worker."""


class Aborted(ServerError):
    """The server ended a generation that nobody here had ended."""


class BadAnswer(ServerError):
    """The answer has other lengths, ids or fields than the request asked for; nothing of it is used."""


class WrongVersion(ServerError):
    """The server has other weights than those that were pushed."""


class Drifted(ServerError):
    """The server's log-probs of a fixed prompt are not the trainer's."""


class LaunchFailed(ServerError):
    """A server of our own did not start, or died too often."""
