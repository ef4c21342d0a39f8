"""Servers that outlived their owner: each one is written down while it lives, so that the next start can tell of it.

A record stands in the user's cache folder, one file a server: its process, when that started, and the same of the
process that owns it. A process number is used again by others; together with the time it started it is not. The folder
may be seen from several machines, so a record also says on which one it is true.
"""

from __future__ import annotations

import json
import os
import platform
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from time import monotonic, sleep

_GRACE_SECONDS = 10.0  # between the request to end and the kill


@dataclass(frozen=True, slots=True)
class Record:
    """A server of ours: `pid` leads its group of processes, `started` is when, in ticks since `machine` started."""

    machine: str
    pid: int
    started: int
    owner: int
    owner_started: int
    url: str
    model: str
    log: str

    def __str__(self) -> str:
        return f"process {self.pid} at {self.url}, serving {self.model}, started by process {self.owner} (gone)"


def folder() -> Path:
    """Return where records stand."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gymtune" / "servers"


def write_down(pid: int, url: str, model: Path, log: Path) -> None:
    """Write a server down; a place that cannot be written to is let be: the server runs all the same."""
    me = os.getpid()
    record = Record(_machine(), pid, _started(pid), me, _started(me), url, str(model.absolute()), str(log.absolute()))
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        aside = folder() / f".{_machine()}-{pid}.tmp"
        aside.write_text(json.dumps(asdict(record)), encoding="utf-8")
        aside.rename(_file(pid))


def forget(pid: int) -> None:
    """Strike a server off: it has ended."""
    with suppress(OSError):
        _file(pid).unlink()


def leftovers() -> list[Record]:
    """Return the servers of this machine that live while their owner does not; dead ones are struck off."""
    found = []
    for file in sorted(folder().glob(f"{_machine()}-*.json")):
        try:
            record = Record(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if not _is(record.pid, record.started):
            forget(record.pid)
        elif not _is(record.owner, record.owner_started):
            found.append(record)
    return found


def end_leftovers() -> list[Record]:
    """End the servers that `leftovers` names, and return them."""
    found = leftovers()
    for record in found:
        end_group(record.pid, partial(_is_gone, record))
        forget(record.pid)
    return found


def end_group(pid: int, gone: Callable[[], bool]) -> None:
    """End the processes of the group `pid`: ask first, and kill what is left after a while."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
        until = monotonic() + _GRACE_SECONDS
        while not gone() and monotonic() < until:
            sleep(0.1)
    finally:  # a second Ctrl-C ends the waiting, and must not spare the server
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also those of its processes that outlived it


def _file(pid: int) -> Path:
    return folder() / f"{_machine()}-{pid}.json"


@cache
def _machine() -> str:
    """Return a name of this start of this machine, and of the container in it: within it, process numbers mean one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node() or "here"


def _is_gone(record: Record) -> bool:
    return not _is(record.pid, record.started)


def _is(pid: int, started: int) -> bool:
    """Whether the process of that number is the one that started then; never so where the time is not known."""
    return started > 0 and _started(pid) == started


def _started(pid: int) -> int:
    """Return when a process started, in ticks since the machine did; 0 where there is none, or nobody tells."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return 0 if fields[0] == "Z" else int(fields[19])
