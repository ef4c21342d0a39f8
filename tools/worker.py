"""The child of `processes.ProcessPool`: runs one function after the other and answers through pipes.

Run as a script, not as a module, so that it starts in milliseconds: it imports the standard library alone, and what a
function needs comes with the function. A message is 8 bytes of length, then that many bytes. A request is two of them,
`sys.path` and the pickled call; the answer is an empty message when the call is loaded, then one that holds
`("value", value)` or `("error", pickled exception or None, its text)`.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import select
import struct
import sys
from contextlib import suppress
from typing import BinaryIO

LENGTH = struct.Struct(">Q")


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    while (path := _read(requests)) is not None and (call := _read(requests)) is not None:
        _write(answers, _answer(path, call, answers))


def _answer(path: bytes, call: bytes, answers: BinaryIO) -> bytes:
    """Load the call, say so, run it, and return the answer."""
    try:
        sys.path[:] = pickle.loads(path)
        function, args, kwargs = pickle.loads(call)
        _write(answers, b"")
        return pickle.dumps(("value", function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001  the function is called here: what it raises is the answer
        return pickle.dumps(("error", *_describe(error)))


def _describe(error: BaseException) -> tuple[bytes | None, str]:
    """Return the exception pickled, if it can be and may be raised elsewhere, and its text."""
    text, pickled = type(error).__name__, None
    with suppress(Exception):  # classes of the function's own, which may break anywhere
        text = f"{text}: {error}".removesuffix(": ")
    if isinstance(error, Exception):  # SystemExit must not end the parent
        with suppress(Exception):
            pickled = pickle.dumps(error)
    return pickled, text


def _die_with_parent(life: int) -> None:
    """Have the kernel end this process as soon as the parent does, even while a C function holds the interpreter.

    When the other end of the pipe `life` is closed, the kernel sends SIGIO, which kills by default. A pipe of its own:
    on that of the requests a signal for the last request may come after it was read.
    """
    os.set_inheritable(life, False)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgid(0))  # the group: children of the function end as well
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # the parent ended before the kernel was asked to watch
        os._exit(0)


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def _write(stream: BinaryIO, body: bytes) -> None:
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def main(argv: list[str]) -> None:
    """Serve on what were stdin and stdout; `argv` is the pipe `life` and the limit of memory in MB, 0 for none."""
    _die_with_parent(int(argv[0]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the function prints goes to stderr and cannot break a message
    if limit := int(argv[1]) * 2**20:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    serve(requests, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
