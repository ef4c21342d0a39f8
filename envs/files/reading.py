"""Rows of a file: JSONL, JSON (both also in gzip), parquet, `datasets`. A bad row does not stop the rest."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...tools.errors import DataError
from .arrow import is_dataset, table_rows
from .records import Row, shown
from .strict_json import JsonError, decode_next, loads

MAX_LINE = 64 << 20  # bytes of one record; a longer one is an error, so that memory stays bounded
_CHUNK = 1 << 16
_BOM = b"\xef\xbb\xbf"
_LINES = (".jsonl", ".ndjson")
_SPACE = " \t\r\n"
_ENDS = "the rest of the array is not read"


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of a file in constant memory; blank lines are passed over, bad rows come with an error.

    JSONL under any name, one JSON array or object, either in gzip, `.parquet`, a folder that `datasets` saved, and
    `hf:NAME[:SPLIT]` or `hf:NAME:CONFIG:SPLIT` of the hub (extra `data`). An array is decoded one record at a time;
    where its syntax breaks, its reading ends. A null that Arrow put where a key was missing counts as missing.

    Raises:
        DataError: The file cannot be opened.
        ConfigError: The extra that reads it is not installed.
    """
    name = str(path)
    if name.startswith("hf:") or name.endswith(".parquet") or is_dataset(name):
        yield from table_rows(name)
        return
    line = 0
    with open_file(name) as file:
        try:
            for row in _rows(file, name.removesuffix(".gz")):
                line = row.line
                yield row
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield Row(line + 1, None, f"a gzip file that breaks here ({error})")


def open_file(name: str) -> BinaryIO:
    """Open a file, unpacking gzip. Raises DataError."""
    try:
        return cast(BinaryIO, gzip.open(name)) if _is_packed(name) else Path(name).open("rb")
    except OSError as error:
        raise DataError(f"{name}: cannot read: {error.strerror or error}") from error


def _is_packed(name: str) -> bool:
    with Path(name).open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def is_json_lines(name: str) -> bool:
    """Whether this is a file of plain JSONL: lines at byte offsets. Raises DataError when it cannot be opened."""
    if name.startswith("hf:") or name.endswith(".parquet") or is_dataset(name):
        return False
    with open_file(name) as file:
        return not _is_packed(name) and _form(file, name) == "lines"


def _rows(file: BinaryIO, name: str) -> Iterator[Row]:
    match _form(file, name):
        case "array":
            return _array(file)
        case "object":
            return iter([_whole(file)])
        case _:
            return _lines(file)


def _form(file: BinaryIO, name: str) -> str:
    """Tell an array and an object over several lines (only in `.json`) from JSONL by the first line."""
    if name.endswith(_LINES):
        return "lines"
    head = b""
    while not head and (line := file.readline(MAX_LINE)):
        head = line.removeprefix(_BOM).strip()
    file.seek(0)
    if head.startswith(b"["):
        return "array"
    return "object" if name.endswith(".json") and parse_line(1, head).value is None else "lines"


def _lines(file: BinaryIO) -> Iterator[Row]:
    line = 0
    while raw := file.readline(MAX_LINE):
        line += 1
        if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(_CHUNK)
            yield Row(line, None, f"a line of more than {MAX_LINE >> 20} MB")
        elif raw.strip():
            yield parse_line(line, raw)


def parse_line(line: int, raw: bytes) -> Row:
    """Return the row that the bytes of one line hold."""
    try:
        value = loads(raw.removeprefix(_BOM).decode())
    except UnicodeDecodeError as error:
        return Row(line, None, f"bytes that are not UTF-8, at byte {error.start + 1} of the line")
    except JsonError as error:
        torn = "" if raw.endswith(b"\n") else "; the file ends in this line"
        return Row(line, None, error.came + torn, error.path)
    return _row(line, value)


def _row(line: int, value: Any) -> Row:
    return Row(line, value) if isinstance(value, dict) else Row(line, None, shown(value))


def _whole(file: BinaryIO) -> Row:
    raw = file.read(MAX_LINE)
    if len(raw) == MAX_LINE:
        return Row(1, None, f"an object of more than {MAX_LINE >> 20} MB")
    return parse_line(1, raw)


def _array(file: BinaryIO) -> Iterator[Row]:
    """Yield the elements of an array, holding no more of it than the longest."""
    number = 0
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as reader:
        text = _Window(reader)
        text.skip("[")
        while text.peek() != "]" or number:
            number += 1
            try:
                value = text.decode()
            except json.JSONDecodeError as error:
                yield Row(number, None, f"what is no JSON ({error.msg}); {_ENDS}")
                return
            except RecursionError:
                yield Row(number, None, f"a bomb of nested lists or objects; {_ENDS}")
                return
            yield Row(number, None, value.came, value.path) if isinstance(value, JsonError) else _row(number, value)
            if text.peek() == "]":
                return
            if text.peek() != ",":
                yield Row(number + 1, None, f"no comma or bracket after a record; {_ENDS}")
                return
            text.skip(",")


class _Window:
    """The part of a text that has been read and not yet decoded."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file, self._text, self._place = file, "", 0

    def _grow(self) -> bool:
        """Double the window. False at the end of the file, or when one record fills the limit."""
        rest = self._text[self._place :]
        more = self._file.read(max(_CHUNK, len(rest))) if len(rest) < MAX_LINE else ""
        self._text, self._place = rest + more, 0
        return bool(more)

    def peek(self) -> str:
        """Return the next character that is no white space, and stand before it; "" at the end."""
        while True:
            while self._place < len(self._text) and self._text[self._place] in _SPACE:
                self._place += 1
            if self._place < len(self._text) or not self._grow():
                return self._text[self._place : self._place + 1]

    def skip(self, sign: str) -> None:
        """Pass over `sign`."""
        if self.peek() == sign:
            self._place += 1

    def decode(self) -> Any:
        """Return the next value, or the JsonError that speaks against it; raise JSONDecodeError where there is none."""
        self.peek()
        while True:
            try:
                value, end = decode_next(self._text, self._place)
            except json.JSONDecodeError:
                if not self._grow():
                    raise
                continue
            # A number may go on behind the window; an object, a list or a text may not.
            if end < len(self._text) or isinstance(value, dict | list | str) or not self._grow():
                self._place = end
                return value
