import json
import posixpath
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymtune.tools import ConfigError, Outcome, ParsedCall, Toolbox, ToolResult
from gymtune.tools.library import FileSystem


def call(files: FileSystem, name: str, **arguments: object) -> ToolResult:
    return Toolbox(files.tools()).call(ParsedCall("call_0_0", name, arguments, None, ""))


def test_an_episode() -> None:
    files = FileSystem({"/docs/a.txt": "one", "b.txt": "two"})
    assert json.loads(call(files, "list_files").content) == ["/b.txt", "/docs/a.txt"]
    assert json.loads(call(files, "list_files", path="docs").content) == ["/docs/a.txt"]
    assert call(files, "read_file", path="docs/../docs/./a.txt").content == "one"
    assert json.loads(call(files, "write_file", path="new/c", content="三").content) == {
        "written": "/new/c",
        "bytes": 3,
    }
    assert json.loads(call(files, "move_file", source="b.txt", destination="/new/b").content)["to"] == "/new/b"
    assert call(files, "delete_file", path="/docs/a.txt").outcome is Outcome.ok
    assert files.state() == {"/new/b": "two", "/new/c": "三"}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["..", ".", "", "a", "b b", "...", "é"]), max_size=8).map("/".join))
def test_paths_agree_with_posixpath(path: str) -> None:
    files = FileSystem()
    result = call(files, "write_file", path=path, content="x")
    expected = posixpath.normpath("/" + path.lstrip("/"))
    if expected == "/" or path.endswith("/"):
        assert result.failed
        assert files.state() == {}
    else:
        assert files.state() == {expected: "x"}


@pytest.mark.parametrize("path", ["../../etc/passwd", "/../../../../etc/passwd", "a/../../../etc/passwd"])
def test_nothing_is_outside_the_tree(path: str) -> None:
    files = FileSystem({"/a": "x"})
    assert "not there" in call(files, "read_file", path=path).content
    call(files, "write_file", path=path, content="mine")
    assert files.state()["/etc/passwd"] == "mine"
    assert "mine" not in Path("/etc/passwd").read_text(encoding="utf-8")


class Disk:
    """The same tools on a real directory, by the operating system's own rules; empty directories are removed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write_file(self, path: str, content: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(content, encoding="utf-8")

    def read_file(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def delete_file(self, path: str) -> None:
        (self.root / path).unlink()
        self.prune()

    def move_file(self, source: str, destination: str) -> None:
        text = self.read_file(source)
        if (self.root / destination).exists():
            raise FileExistsError(destination)
        (self.root / source).unlink()
        try:
            self.write_file(destination, text)
        except OSError:
            self.write_file(source, text)
            raise
        self.prune()

    def prune(self) -> None:
        for folder in sorted(self.root.rglob("*"), reverse=True):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def state(self) -> dict[str, str]:
        found = [path for path in self.root.rglob("*") if path.is_file()]
        return {"/" + path.relative_to(self.root).as_posix(): path.read_text(encoding="utf-8") for path in found}


def test_agrees_with_a_real_file_system(tmp_path: Path) -> None:
    rng = random.Random(0)
    paths = ["a", "b", "a/b", "a/b/c", "b/a", "c"]
    files, disk = FileSystem(), Disk(tmp_path)
    box = Toolbox(files.tools())
    failures = 0
    for step in range(500):
        name = rng.choice(["write_file", "read_file", "delete_file", "move_file"])
        arguments = {"path": rng.choice(paths)}
        if name == "write_file":
            arguments["content"] = str(step)
        if name == "move_file":
            arguments = {"source": rng.choice(paths), "destination": rng.choice(paths)}
        try:
            expected = getattr(disk, name)(**arguments)
        except OSError:
            expected = OSError
        result = box.call(ParsedCall("call_0_0", name, arguments, None, ""))
        assert result.failed is (expected is OSError), (name, arguments, result.content, disk.state())
        if name == "read_file" and not result.failed:
            assert result.content == expected
        assert files.state() == disk.state()
        failures += result.failed
    assert 100 < failures < 450, "both kinds were seen"


def test_limits_are_told_and_change_nothing() -> None:
    files = FileSystem({"/a": "12345"}, max_files=2, max_bytes=10, max_path_chars=8)
    assert "at most 8" in call(files, "write_file", path="/12345678", content="").content
    assert "disk is full: 11 bytes" in call(files, "write_file", path="/b", content="三三").content
    assert call(files, "write_file", path="/a", content="1234567890").outcome is Outcome.ok  # replaced, not added
    assert call(files, "write_file", path="/b", content="").outcome is Outcome.ok
    assert "at most 2" in call(files, "write_file", path="/c", content="").content
    assert call(files, "write_file", path="/b", content="").outcome is Outcome.ok  # full, but not a new one
    assert files.state() == {"/a": "1234567890", "/b": ""}
    assert call(files, "move_file", source="/b", destination="/c").outcome is Outcome.ok


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("read_file", {"path": "/d"}, "a directory, not a file"),
        ("read_file", {"path": "/x"}, "See list_files"),
        ("list_files", {"path": "/x"}, "not there"),
        ("list_files", {"path": "/d/f"}, "a file, not a directory"),
        ("write_file", {"path": "/", "content": ""}, "is a directory"),
        ("write_file", {"path": "/d", "content": ""}, "is a directory"),
        ("write_file", {"path": "/new/", "content": ""}, "is a directory"),
        ("write_file", {"path": "/d/f/g", "content": ""}, "'/d/f' is a file"),
        ("write_file", {"path": "", "content": ""}, "not a path"),
        ("write_file", {"path": "a\x00b", "content": ""}, "not a path"),
        ("write_file", {"path": "a\nb", "content": ""}, "not a path"),
        ("write_file", {"path": "x" * 1_000_000, "content": ""}, "1000000 characters"),
        ("write_file", {"path": "/big", "content": "x" * 2_000_000}, "disk is full"),
        ("move_file", {"source": "/d/f", "destination": "/e"}, "exists already"),
        ("move_file", {"source": "/x", "destination": "/y"}, "not there"),
        ("move_file", {"source": "/d/f", "destination": "/d"}, "is a directory"),
        ("delete_file", {"path": "/d"}, "a directory, not a file"),
    ],
)
def test_mistakes_are_told_and_change_nothing(name: str, arguments: dict[str, object], says: str) -> None:
    files = FileSystem({"/d/f": "1", "/e": "2"})
    result = call(files, name, **arguments)
    assert result.outcome is Outcome.exception
    assert says in result.content
    assert len(result.content) < 400
    assert files.state() == {"/d/f": "1", "/e": "2"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("read_file", {}), ("read_file", {"path": 1}), ("write_file", {"path": "/a"}), ("list_files", {"dir": "/"})],
)
def test_wrong_arguments_are_schema_violations(name: str, arguments: dict[str, object]) -> None:
    assert call(FileSystem(), name, **arguments).outcome is Outcome.schema_violation


def test_two_trees_share_nothing_and_state_is_a_copy() -> None:
    given_files = {"/a": "1"}
    one, two = FileSystem(given_files), FileSystem(given_files)
    call(one, "write_file", path="/a", content="2")
    one.state()["/a"] = "3"
    assert (one.state(), two.state(), given_files) == ({"/a": "2"}, {"/a": "1"}, {"/a": "1"})


def test_bad_files_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="'/a' is a file"):
        FileSystem({"/a": "", "/a/b": ""})
    with pytest.raises(ConfigError, match="must map paths to texts"):
        FileSystem({"/a": b""})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="at most 1"):
        FileSystem({"/a": "", "/b": ""}, max_files=1)
