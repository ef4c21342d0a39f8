"""Runs a tool's function under a time limit, from any thread, without signals in this process.

A function that hangs cannot be killed inside a process; it is abandoned in a daemon thread, which does not keep the
interpreter alive (the workers of a `ThreadPoolExecutor` do: they are joined at exit). An isolated one runs in a process
of its own and is killed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

Wait = Callable[[], "Ending"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a function ended: with a value, with an error, or not within its time."""

    seconds: float
    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


def run_inline(function: Callable[..., Any], arguments: Mapping[str, Any], time_limit: float) -> Ending:
    """Call the function here and now. Only an awaitable is held to `time_limit` (seconds).

    Raises:
        KeyboardInterrupt: Passed through; every other exception is part of the ending.
    """
    return _passing_interrupts(_run(function, arguments, time_limit, monotonic()))


def start_thread(function: Callable[..., Any], arguments: Mapping[str, Any], time_limit: float) -> Wait:
    """Start the function in a daemon thread of its own and return what waits for its ending.

    The time counts from this call and not from the wait, so that whoever waits for several in turn adds nothing to it.
    """
    began = monotonic()
    endings: SimpleQueue[Ending] = SimpleQueue()
    Thread(target=lambda: endings.put(_run(function, arguments, time_limit, began)), daemon=True).start()

    def wait() -> Ending:
        try:
            ending = endings.get(timeout=max(0.0, began + time_limit - monotonic()))
        except Empty:
            return Ending(seconds=monotonic() - began, timed_out=True)
        if ending.seconds >= time_limit:  # done late, while another was waited for
            return Ending(seconds=ending.seconds, timed_out=True)
        return _passing_interrupts(ending)

    return wait


def start_isolated(function: Callable[..., Any], arguments: Mapping[str, Any], time_limit: float) -> Wait:
    """Start the function in a worker process, which is killed at the limit, and return what waits for its ending.

    The time counts from where a worker is free and has imported what the function needs.
    """
    from .processes import CallTimeoutError, default_pool

    call = partial(default_pool().call, run_isolated, function, dict(arguments), timeout=time_limit)
    began = monotonic()
    endings: SimpleQueue[Ending] = SimpleQueue()
    Thread(target=lambda: endings.put(_run(call, {}, time_limit, began)), daemon=True).start()

    def wait() -> Ending:
        ending = endings.get()
        if isinstance(ending.error, CallTimeoutError):
            return Ending(seconds=ending.seconds, timed_out=True)
        return ending

    return wait


def run_isolated(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a sync or async function; what a worker process runs."""
    value = function(**arguments)
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


def _run(function: Callable[..., Any], arguments: Mapping[str, Any], time_limit: float, began: float) -> Ending:
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_within(value, time_limit))
    except BaseException as error:  # noqa: BLE001  a tool is called here: whatever it raises, sys.exit() too, is data
        return Ending(seconds=monotonic() - began, error=error)
    return Ending(seconds=monotonic() - began, value=value)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _within(awaitable: Awaitable[Any], time_limit: float) -> Any:
    """Cancel at the limit, so that a well-behaved coroutine frees what it holds instead of being abandoned."""
    return await asyncio.wait_for(awaitable, time_limit)


def _passing_interrupts(ending: Ending) -> Ending:
    if isinstance(ending.error, KeyboardInterrupt):
        raise ending.error
    return ending
