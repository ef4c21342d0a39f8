"""A file system in memory, for tasks whose outcome is what the files hold at the end."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError, ToolError
from ..tool import Tool, tool


class FileSystem:
    """Text files by absolute path. Directories are not made: there is one where a file lies below it.

    Paths are read as in POSIX from the working directory `/`; `..` stops at `/`, and there is nothing outside.

    Args:
        files: Text by path, at the start.
        max_files: Files at any time.
        max_bytes: Bytes (UTF-8) of all files together.
        max_path_chars: Characters of one path.

    Raises:
        ConfigError: The files break a limit or each other.
    """

    def __init__(
        self,
        files: Mapping[str, str] | None = None,
        *,
        max_files: int = 256,
        max_bytes: int = 2**20,
        max_path_chars: int = 255,
    ) -> None:
        self.max_files, self.max_bytes, self.max_path_chars = max_files, max_bytes, max_path_chars
        self._files: dict[str, str] = {}
        for path, text in (files or {}).items():
            if not isinstance(path, str) or not isinstance(text, str):
                raise ConfigError(f"files must map paths to texts, got {path!r}: {type(text).__name__}")
            try:
                self.write_file(path, text)
            except ToolError as error:
                raise ConfigError(f"files[{path[:80]!r}]: {error}") from None

    def state(self) -> dict[str, str]:
        """Return a copy of the files, by path in order."""
        return dict(sorted(self._files.items()))

    def tools(self) -> list[Tool]:
        """Return `list_files`, `read_file`, `write_file`, `move_file` and `delete_file`, bound to this tree."""
        make = tool(in_memory=True)
        return [
            make(function)
            for function in (self.list_files, self.read_file, self.write_file, self.move_file, self.delete_file)
        ]

    def list_files(self, path: str = "/") -> list[str]:
        """List the paths of all files in a directory and below it.

        Args:
            path: The directory.

        Raises:
            ToolError: There is no such directory.
        """
        directory = self._resolve(path)
        found = sorted(name for name in self._files if name.startswith(_below(directory)))
        if not found and directory != "/":
            what = "a file, not a directory" if directory in self._files else "not there"
            raise ToolError(f"the directory {directory!r} is {what}")
        return found

    def read_file(self, path: str) -> str:
        """Read a text file.

        Raises:
            ToolError: There is no such file.
        """
        return self._files[self._existing(path)]

    def write_file(self, path: str, content: str) -> dict[str, str | int]:
        """Write a text file, in place of what it held before.

        Args:
            path: The file; its directories need not exist.
            content: The whole text.

        Raises:
            ToolError: The path is or goes through something else, or a limit is reached.
        """
        name = self._free(path, but=None)
        size = _size(content)
        total = size + sum(_size(text) for other, text in self._files.items() if other != name)
        if total > self.max_bytes:
            raise ToolError(f"the disk is full: {total} bytes, at most {self.max_bytes}")
        if name not in self._files and len(self._files) >= self.max_files:
            raise ToolError(f"there are {len(self._files)} files, at most {self.max_files} are allowed")
        self._files[name] = content
        return {"written": name, "bytes": size}

    def move_file(self, source: str, destination: str) -> dict[str, str]:
        """Move or rename a file. Nothing is overwritten.

        Args:
            source: The file.
            destination: Its new path, not that of a directory.

        Raises:
            ToolError: There is no source, or the destination is taken.
        """
        old = self._existing(source)
        new = self._free(destination, but=old)
        if new in self._files:
            raise ToolError(f"{new!r} exists already. Delete it first, or choose another destination.")
        self._files[new] = self._files.pop(old)
        return {"moved": old, "to": new}

    def delete_file(self, path: str) -> dict[str, str]:
        """Delete a file.

        Raises:
            ToolError: There is no such file.
        """
        name = self._existing(path)
        del self._files[name]
        return {"deleted": name}

    def _resolve(self, path: str) -> str:
        if len(path) > self.max_path_chars:
            raise ToolError(f"the path has {len(path)} characters, at most {self.max_path_chars} are allowed")
        if not path.strip() or not path.isprintable():
            raise ToolError(f"{path!r} is not a path: it is empty or has unprintable characters")
        parts: list[str] = []
        for part in path.split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        return "/" + "/".join(parts)

    def _existing(self, path: str) -> str:
        name = self._resolve(path)
        if name not in self._files:
            what = "a directory, not a file" if self._is_directory(name) else "not there. See list_files"
            raise ToolError(f"the file {name!r} is {what}")
        return name

    def _free(self, path: str, but: str | None) -> str:
        """Return the path of a file that may be written; `but` is about to go and stands in nobody's way."""
        name = self._resolve(path)
        if path.endswith("/") or self._is_directory(name):
            raise ToolError(f"{name!r} is a directory. Give the path of a file.")
        parts = name.split("/")
        for n in range(2, len(parts)):
            parent = "/".join(parts[:n])
            if parent in self._files and parent != but:
                raise ToolError(f"{parent!r} is a file, so {name!r} cannot lie in it")
        return name

    def _is_directory(self, name: str) -> bool:
        return name == "/" or any(other.startswith(_below(name)) for other in self._files)


def _below(directory: str) -> str:
    return directory.rstrip("/") + "/"


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
