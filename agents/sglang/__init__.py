"""SGLang servers: the client and the backend, weights on their way to them, servers of one's own.

Bottom-up: `errors`, `wire` (bodies and answers), `facts` (what a server says of itself), `connections` (one HTTP call),
`servers` (which one gets a request), `engine` (the backend).
"""

from .engine import SGLangEngine, Sync
from .errors import (
    Aborted,
    BadAnswer,
    Busy,
    Drifted,
    LaunchFailed,
    Refused,
    ServerError,
    Unreachable,
    WrongVersion,
)
from .facts import ServerFacts
from .servers import Servers, check_server

__all__ = [
    "Aborted",
    "BadAnswer",
    "Busy",
    "Drifted",
    "LaunchFailed",
    "Refused",
    "SGLangEngine",
    "ServerError",
    "ServerFacts",
    "Servers",
    "Sync",
    "Unreachable",
    "WrongVersion",
    "check_server",
]
