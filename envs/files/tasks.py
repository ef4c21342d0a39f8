"""FileTasks: the records of a file by number."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Literal

from ...tools.errors import DataError
from ..lazy import Lazy
from .detection import named_kind
from .kinds import read_records, record_or_raise
from .reading import is_json_lines, parse_line
from .records import Kind, Record


class FileTasks(Lazy[Record]):
    """The records of a file, in order.

    Of plain JSONL only the byte offset of each line is held, and a record is read, and checked, when it is asked for;
    any other file is read and checked at once and held in memory. Pickles, so that it may travel to another process.

    Args:
        path: As in `read_rows`.
        kind: What the file is; told by its first rows when `auto`.

    Raises:
        DataError: The file cannot be read or its kind not told; for files other than JSONL, a record is wrong.
    """

    def __init__(self, path: str | Path, kind: Kind | Literal["auto"] = "auto") -> None:
        self.path = str(path)
        self.kind: Kind = named_kind(path, kind)
        self._records: list[Record] | None = None
        self._lines, self._offsets = array("Q"), array("Q")
        if is_json_lines(self.path):
            self._index()
        else:
            self._records = list(read_records(path, self.kind))

    def _index(self) -> None:
        offset = 0
        with Path(self.path).open("rb") as file:
            for line, raw in enumerate(file, 1):
                if raw.strip():
                    self._lines.append(line)
                    self._offsets.append(offset)
                offset += len(raw)

    def __len__(self) -> int:
        return len(self._offsets) if self._records is None else len(self._records)

    def item(self, index: int) -> Record:
        """Return a record. Raises DataError when it is wrong."""
        if self._records is not None:
            return self._records[index]
        return record_or_raise(self.path, parse_line(self._lines[index], self._line(index)), self.kind)

    def _line(self, index: int) -> bytes:
        try:
            with Path(self.path).open("rb") as file:
                file.seek(self._offsets[index])
                return file.readline()
        except OSError as error:
            raise DataError(f"{self.path}: cannot read: {error.strerror or error}") from error
