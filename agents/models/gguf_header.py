"""The header of a GGUF file, read without trusting it: no length is followed beyond the end of the file.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...tools.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_FLOAT32 = 0


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: shape (fastest axis first, as in the file), ggml type, first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def count(self) -> int:
        """How many numbers it holds, however few bits each takes."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself: `fields` (single values; an array is given by its length) and `tensors`."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The family: `llama`, `qwen3`, ..."""
        return str(self.fields["general.architecture"])

    def floats(self, name: str) -> tuple[float, ...]:
        """Return the numbers of a tensor stored in float32. Raises ModelError when it is stored otherwise."""
        tensor = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            data = file.read(4 * min(tensor.count, os.path.getsize(self.path)))
        if tensor.kind != _FLOAT32 or len(data) != 4 * tensor.count:
            raise ModelError(f"{self.path}: {name} is not {tensor.count} numbers in float32.")
        return struct.unpack(f"<{tensor.count}f", data)


def read_header(path: Path) -> GgufHeader:
    """Read fields and tensors of a GGUF file. Raises ModelError when it is none, or breaks off in its header."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise ModelError(f"{path}: cannot read: {error.strerror or error}.") from error


class _Reader:
    """Takes values from the front of the file, one after another."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size

    def header(self) -> GgufHeader:
        """Read all of it."""
        magic = self.file.read(len(_MAGIC))
        if magic != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file: it begins with {magic!r}, wanted {_MAGIC!r}.")
        version = self.number("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version}, wanted one of {_VERSIONS}, little-endian.")
        tensor_count, field_count = self.number("Q"), self.number("Q")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            self.put(fields, self.string(), self.value(self.number("I")))
        if not isinstance(fields.get("general.architecture"), str):
            raise ModelError(f"{self.path}: the GGUF header does not name its general.architecture.")
        places: dict[str, GgufTensor] = {}
        for _ in range(tensor_count):
            self.put(places, self.string(), self.tensor())
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}, wanted a positive integer.")
        data = -(-self.file.tell() // alignment) * alignment
        tensors = {name: GgufTensor(t.shape, t.kind, data + t.start) for name, t in places.items()}
        return GgufHeader(self.path, fields, tensors)

    def tensor(self) -> GgufTensor:
        """Read the place of a tensor, its start counted from the end of the header."""
        dimensions = self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ModelError(f"{self.path}: a tensor of {dimensions} dimensions, at most {_MOST_DIMENSIONS} exist.")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return GgufTensor(shape, self.number("I"), self.number("Q"))

    def value(self, kind: int) -> Any:
        """Read a value; an array is skipped and gives its length."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self.scalar(kind))
        inner, length = self.number("I"), self.number("Q")
        if inner == _STRING:
            for _ in range(length):
                self.skip(self.number("Q"))
        else:
            self.skip(length * struct.calcsize(self.scalar(inner)))
        return length

    def string(self) -> str:
        """Read a length and as many bytes of UTF-8."""
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def number(self, code: str) -> Any:
        """Read one number of the kind that `struct` calls `code`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def scalar(self, kind: int) -> str:
        """Return the `struct` code of a type of values."""
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: the GGUF header holds a value of type {kind}, which does not exist.")
        return _SCALARS[kind]

    def take(self, count: int) -> bytes:
        """Read `count` bytes."""
        self.check(count)
        return self.file.read(count)

    def skip(self, count: int) -> None:
        """Leave `count` bytes unread."""
        self.check(count)
        self.file.seek(count, os.SEEK_CUR)

    def check(self, count: int) -> None:
        """Raise ModelError when fewer than `count` bytes are left."""
        left = self.size - self.file.tell()
        if count > left:
            raise ModelError(f"{self.path}: the GGUF header breaks off: it wants {count} more bytes, {left} are left.")

    def put(self, table: dict[str, Any], name: str, value: Any) -> None:
        """Store a named value. Raises ModelError for a name that comes twice."""
        if name in table:
            raise ModelError(f"{self.path}: the GGUF header names {name!r} twice.")
        table[name] = value
