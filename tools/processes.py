"""ProcessPool: functions run in worker processes, which can be killed where a thread cannot.

Workers are fresh interpreters started by `subprocess`: `multiprocessing` would fork (unsafe beside torch's threads) or
run the user's `__main__` again. Calls and answers are pickled. That is safe here: each worker is our own child at the
other end of an anonymous pipe and runs functions that the program chose; what models and files say is plain data in it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from math import ceil
from pathlib import Path
from time import monotonic
from types import FunctionType
from typing import Any

from .errors import ConfigError
from .worker import LENGTH

_WORKER = Path(__file__).with_name("worker.py")
_LOAD_SECONDS = 60.0  # start of an interpreter and import of the function's module, on a busy machine
_LONGEST_SECONDS = 1e6  # `poll` counts milliseconds in 32 bits


class CallTimeoutError(TimeoutError):
    """The function did not end in time, and its process was killed. (A `TimeoutError` of its own stays one.)"""


class WorkerDied(RuntimeError):  # noqa: N818  says what happened, as `BrokenPipe` does
    """The process ended while it ran the function: a crash in C, the kernel's memory killer, `os._exit`.

    Args:
        exit_code: Of the process; negative the number of the signal that ended it, None where it is not known.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        if self.exit_code is not None and self.exit_code < 0:
            return f"the worker process was ended by signal {-self.exit_code} ({signal.strsignal(-self.exit_code)})"
        return f"the worker process ended with exit code {self.exit_code}"


class ProcessPool:
    """At most `size` worker processes, started when needed, used again, and replaced when killed. Thread-safe.

    Workers end with this process, however it ends, and when the pool is closed or collected.

    Args:
        size: Calls that run at once; more wait for a free worker.
        max_memory_mb: Address space of a worker (`RLIMIT_AS`, not what is resident); beyond it the function gets a
            `MemoryError` or dies. None for no limit.

    Raises:
        ConfigError: A number below 1.
    """

    def __init__(self, size: int = 1, *, max_memory_mb: int | None = None) -> None:
        if size < 1 or (max_memory_mb is not None and max_memory_mb < 1):
            raise ConfigError(f"ProcessPool: size {size!r} and max_memory_mb {max_memory_mb!r} must be at least 1")
        self.size = size
        self.max_memory_mb = max_memory_mb
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._free = threading.Semaphore(size)
        self._finalizer = weakref.finalize(self, _end, self._workers, self._idle)
        _POOLS.add(self)

    def call(self, function: Callable[..., Any], /, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, called in a worker process.

        The function is named, not sent: it must be importable. What it prints goes to stderr.

        Args:
            function: A function or class of a module, a `partial` of one, or a method of an object that pickles.
            timeout: Seconds for the function alone, without the wait for a free worker and its imports.

        Raises:
            ConfigError: Function or arguments cannot be sent.
            CallTimeoutError: Not done within `timeout`. The process is killed.
            WorkerDied: The process ended.
            RuntimeError: The function raised what cannot be raised here; holds type and text.
            Exception: Whatever else the function raised.
        """
        request = pickle_call(function, args, kwargs)
        with self._free:
            worker = self._take()
            try:
                answer = worker.ask(request, timeout)
            except BaseException:  # interrupted as well: what it answers later would be taken for the next answer
                self._drop(worker)
                raise
            self._idle.append(worker)
        return _open(answer)

    def close(self) -> None:
        """Kill the workers. A call under way ends in `WorkerDied`; a later call starts a worker again."""
        _end(self._workers, self._idle)

    def _take(self) -> _Worker:
        """Return a worker that is alive, the one used last where there are several."""
        with suppress(IndexError):  # no check before: another thread would come between
            while True:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                self._drop(worker)
        worker = _Worker(self.max_memory_mb)
        self._workers.add(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        worker.release()
        self._workers.discard(worker)

    def _disown(self) -> None:
        """Forget the workers without killing them: after a fork they are the parent's, and so is a lock it held."""
        for worker in self._workers:
            worker.process.returncode = 0  # no child of this process: nothing to wait for
            worker.release()  # with a copy of the pipes here, the worker would not see the parent's end
        self._workers.clear()
        self._idle.clear()
        self._free = threading.Semaphore(self.size)


class _Worker:
    """One process and the pipes to it. Used by one thread at a time."""

    def __init__(self, max_memory_mb: int | None) -> None:
        life, held = os.pipe()  # what is held is closed with this process, whatever ends it
        alive = os.fdopen(held, "wb")
        command = [sys.executable, "-P", str(_WORKER), str(life), str(max_memory_mb or 0)]
        # A session of its own: Ctrl-C in the terminal is the parent's to handle, and the whole group can be killed.
        try:
            self.process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[life],
                start_new_session=True,
            )
        finally:
            os.close(life)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._pipes = (self.process.stdin, self.process.stdout, alive)
        for pipe in self._pipes[:2]:
            os.set_blocking(pipe.fileno(), False)

    def ask(self, request: bytes, timeout: float) -> bytes:
        """Send a request and return the answer. See `ProcessPool.call` for the errors."""
        path = pickle.dumps([os.path.abspath(entry) for entry in sys.path])
        limit = _LOAD_SECONDS
        deadline = monotonic() + limit
        try:
            for message in (path, request):
                self._write(LENGTH.pack(len(message)) + message, deadline)
            answer = self._read(deadline)
            if not answer:
                limit = timeout
                answer = self._read(monotonic() + limit)
            return answer
        except _NotInTimeError:
            raise CallTimeoutError(f"not done within {limit:g} seconds") from None
        except (EOFError, BrokenPipeError):
            with suppress(subprocess.TimeoutExpired):  # it closed its pipe and lives on: no exit code
                self.process.wait(timeout=1.0)
            raise WorkerDied(self.process.returncode) from None

    def kill(self) -> None:
        """Kill the process and the children it has, and wait for its end."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def release(self) -> None:
        """Close the pipes. For the thread that uses the worker: another would close them under its hands."""
        for pipe in self._pipes:
            pipe.close()

    def _write(self, data: bytes, deadline: float) -> None:
        fd, rest = self._pipes[0].fileno(), memoryview(data)
        while rest:
            _wait(fd, select.POLLOUT, deadline)
            rest = rest[os.write(fd, rest) :]

    def _read(self, deadline: float) -> bytes:
        (size,) = LENGTH.unpack(self._read_exactly(LENGTH.size, deadline))
        return self._read_exactly(size, deadline)

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        fd, parts = self._pipes[1].fileno(), []
        while size:
            _wait(fd, select.POLLIN, deadline)
            part = os.read(fd, min(size, 2**20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class _NotInTimeError(Exception):
    """The pipe was not ready by the deadline."""


def _wait(fd: int, event: int, deadline: float) -> None:
    poller = select.poll()  # not select.select, which ends at file descriptor 1023
    poller.register(fd, event)
    left = min(deadline - monotonic(), _LONGEST_SECONDS)
    if not poller.poll(max(0, ceil(left * 1000))):
        raise _NotInTimeError


class _Pickler(pickle.Pickler):
    """Refuses what pickles here but cannot be found by a worker, and says what to do."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type):
            check_importable(obj)
        return NotImplemented


def check_importable(function: Callable[..., Any]) -> None:
    """Check by its name that a function or class can be imported in another process.

    Raises:
        ConfigError: It is of `__main__`, a lambda, or defined inside a function.
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        why = "belongs to the script that was started" if module == "__main__" else "is defined inside a function"
        raise ConfigError(
            f"{module}.{name} cannot run in a worker process: it {why}. Define it with `def` at the top of a module "
            "that can be imported."
        )


def pickle_call(
    function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> bytes:
    """Return a call as a worker takes it.

    Raises:
        ConfigError: Function or arguments cannot be sent.
    """
    buffer = BytesIO()
    try:
        _Pickler(buffer).dump((function, args, kwargs or {}))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"a call of {function!r} cannot be sent to a worker process: {error}. Give a function that can be imported "
            "and arguments that pickle."
        ) from None
    return buffer.getvalue()


def _open(answer: bytes) -> Any:
    kind, *content = pickle.loads(answer)
    if kind == "value":
        return content[0]
    pickled, text = content
    error = RuntimeError(text)
    if pickled is not None:
        with suppress(Exception):  # a class that is not there in this process, or cannot be read back
            error = pickle.loads(pickled)
    raise error


def _end(workers: set[_Worker], idle: list[_Worker]) -> None:
    for worker in list(workers):
        worker.kill()
    workers.clear()
    with suppress(IndexError):
        while True:
            idle.pop().release()  # the others are released by the threads that use them


def _disown_all() -> None:
    for pool in _POOLS:
        pool._disown()


_POOLS: weakref.WeakSet[ProcessPool] = weakref.WeakSet()
os.register_at_fork(after_in_child=_disown_all)
_DEFAULT = ProcessPool(max(8, os.cpu_count() or 1))  # no process before the first call


def default_pool() -> ProcessPool:
    """Return the pool that tools and checkers share. Its workers have no limit of memory."""
    return _DEFAULT
