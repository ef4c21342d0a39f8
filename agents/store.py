"""The JSONL store of trajectories: one a line, appended durably, read lazily, whole again after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from ..tools.errors import DataError
from .trajectory import Trajectory

_SYNC_SECONDS = 1.0  # what a power cut may cost; a killed process loses nothing
_ERRORS_SHOWN = 5


class TrajectoryWriter:
    """Appends trajectories to a file. What an earlier, killed writer left half-written at the end is cut off first."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                cut_torn_line(self.path)
            self._file = self.path.open("ab", buffering=0)  # nothing waits in a buffer for a disk that has no room
        except OSError as error:
            raise DataError(f"{self.path}: cannot write: {error.strerror or error}") from error
        self._synced = monotonic()

    def append(self, trajectory: Trajectory) -> None:
        """Write one line.

        Raises DataError (nothing half-written stays) when the disk refuses it or the trajectory has no JSON form.
        """
        try:
            rest = memoryview(trajectory.to_json().encode() + b"\n")
        except ValueError as error:
            raise DataError(f"trajectory {trajectory.trajectory_id} cannot be written as JSON: {error}") from error
        before = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            if monotonic() - self._synced > _SYNC_SECONDS:
                self._sync()
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            raise DataError(
                f"{self.path}: cannot write: {error.strerror or error}; what was finished before is kept, "
                "make room and go on with --resume"
            ) from error

    def close(self) -> None:
        """Bring everything to the disk and close. Raises DataError when the disk refuses."""
        if self._file.closed:
            return
        try:
            self._sync()
        except OSError as error:
            raise DataError(f"{self.path}: cannot write: {error.strerror or error}") from error
        finally:
            self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(DataError):  # the first error is the one to tell of
            self.close()


def cut_torn_line(path: Path) -> int:
    """Cut a last line that a killed writer left half-written; return the bytes cut.

    A JSON object that lacks nothing but its newline gets it.
    """
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end == size:
            return 0
        file.seek(end)
        if _is_object(file.read()):
            file.write(b"\n")
            return 0
        file.truncate(end)
        return size - end


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file, one at a time.

    Raises DataError naming file, line, path in the record, what was wanted and what came; for a last line that was
    cut it says how to mend it.
    """
    for number, found in numbered_trajectories(path):
        if isinstance(found, str):
            raise DataError(f"{path}, line {number}: {found}")
        yield found


def numbered_trajectories(path: str | Path) -> Iterator[tuple[int, Trajectory | str]]:
    """Yield each line's number and its trajectory, or what is wrong with it. Raises DataError: no file to read."""
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error
    with file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _trajectory(line)


def _trajectory(line: bytes) -> Trajectory | str:
    try:
        return Trajectory.model_validate_json(line)
    except ValidationError as error:
        if line.endswith(b"\n"):
            return describe(error)
    return "the line is cut in the middle; `gymtune rollout ... --resume` cuts it off and goes on, or delete the line"


def describe(error: ValidationError) -> str:
    """Return the first errors of a record in one line: path, what was wrong, what came."""
    found = error.errors(include_url=False)
    parts = [
        f"{'.'.join(map(str, e['loc'])) or 'record'}: {e['msg']} (got {str(e.get('input'))[:60]!r})"
        for e in found[:_ERRORS_SHOWN]
    ]
    more = f"; and {len(found) - _ERRORS_SHOWN} more" if len(found) > _ERRORS_SHOWN else ""
    return "; ".join(parts) + more
