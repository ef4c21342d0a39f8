"""The file of trajectories: whole after a crash, one error with file and line for what is not."""

import json
import os
from pathlib import Path

import pytest

from gymtune.agents import Trajectory, TrajectoryWriter, read_trajectories
from gymtune.agents.store import cut_torn_line
from gymtune.tools.errors import DataError


def episode(number: int) -> Trajectory:
    trajectory = Trajectory(
        trajectory_id=f"run/s{number}", group_id="run", task_id="sum/0", env_id="Sum-v0", task_index=0, gt="\u4e2d"
    )
    trajectory.start_segment()
    trajectory.append_context([1, 2])
    trajectory.append_turn("15", "stop", [3, 4], [-0.5, -0.1])
    trajectory.messages = [{"role": "user", "content": "line\nbreak \u2028 \u0000 \U0001f600"}]
    trajectory.turns[0].reward = 1.0
    return trajectory


def write(path: Path, *numbers: int) -> None:
    with TrajectoryWriter(path) as writer:
        for number in numbers:
            writer.append(episode(number))


def test_what_is_appended_is_read_in_order(tmp_path: Path):
    path = tmp_path / "deep" / "run.jsonl"
    write(path, 0, 1)
    write(path, 2)
    assert list(read_trajectories(path)) == [episode(0), episode(1), episode(2)]
    assert path.read_bytes().count(b"\n") == 3


def test_a_line_is_in_the_file_before_append_returns(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    writer = TrajectoryWriter(path)
    writer.append(episode(0))
    assert list(read_trajectories(path)) == [episode(0)]  # a killed process never gets to close it
    writer.close()
    writer.close()


def test_every_cut_of_the_last_line_loses_that_line_only(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    write(path, 0, 1)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in [*range(first, len(whole) - 1, 37), len(whole) - 2]:
        path.write_bytes(whole[:length])
        write(path, 5)
        assert list(read_trajectories(path)) == [episode(0), episode(5)]
    path.write_bytes(whole[:-1])  # all but the newline: nothing is lost
    write(path, 5)
    assert list(read_trajectories(path)) == [episode(0), episode(1), episode(5)]


def test_cut_torn_line_says_how_much_it_cut(tmp_path: Path):
    path = tmp_path / "any.jsonl"
    for before, after, cut in [
        (b"", b"", 0),
        (b"{}\n", b"{}\n", 0),
        (b'{}\n{"a": ', b"{}\n", 6),
        (b'{"a', b"", 3),
        (b'{}\n{"a": 1}', b'{}\n{"a": 1}\n', 0),
        (b"{}\n" + b"x" * 200_000, b"{}\n", 200_000),
    ]:
        path.write_bytes(before)
        assert cut_torn_line(path) == cut
        assert path.read_bytes() == after


def test_a_cut_line_is_told_with_its_mend(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    write(path, 0, 1)
    path.write_bytes(path.read_bytes()[:-20])
    stream = read_trajectories(path)
    assert next(stream) == episode(0)  # lazily: what comes before is read
    with pytest.raises(DataError, match=r"run.jsonl, line 2: the line is cut in the middle.*--resume"):
        next(stream)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{oops}", "line 3: record: Invalid JSON"),
        (b"\xff\xfe", "line 3: record: Invalid JSON"),
        (b'"\\ud800"', "line 3: record"),
        (b"[]", "line 3: record"),
    ],
)
def test_a_broken_line_is_told_with_file_and_line(tmp_path: Path, line, told):
    path = tmp_path / "run.jsonl"
    write(path, 0)
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")  # blank lines are skipped, and counted
    with pytest.raises(DataError) as caught:
        list(read_trajectories(path))
    assert str(caught.value).startswith(f"{path}, {told}")


def test_a_wrong_value_is_told_with_its_path_and_what_came(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    record = json.loads(episode(0).model_dump_json())
    record["turns"][0]["start"] = "two"
    record |= {f"extra{i}": i for i in range(6)}
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError) as caught:
        list(read_trajectories(path))
    assert "turns.0.start: Input should be a valid integer" in str(caught.value)
    assert "(got 'two')" in str(caught.value)
    assert str(caught.value).endswith("; and 2 more")


def test_what_cannot_be_opened_is_told(tmp_path: Path):
    with pytest.raises(DataError, match="cannot read: No such file"):
        list(read_trajectories(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="cannot write: Is a directory"):
        TrajectoryWriter(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        TrajectoryWriter(tmp_path / "file" / "run.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_told(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.symlink_to("/dev/full")
    with (
        pytest.raises(DataError, match=r"No space left on device; what was finished before is kept"),
        TrajectoryWriter(path) as writer,
    ):
        writer.append(episode(0))


def test_a_disk_that_fills_in_the_middle_of_a_line_keeps_whole_lines(tmp_path: Path):
    """A limit on the file's size stands for the full disk: the kernel takes a part of the line, then refuses."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    path = tmp_path / "run.jsonl"
    write(path, 0, 1)
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = TrajectoryWriter(path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        with pytest.raises(DataError, match="File too large"):
            writer.append(episode(2))
        assert path.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.append(episode(3))  # there is room again
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
        writer.close()
    assert list(read_trajectories(path)) == [episode(0), episode(1), episode(3)]


@pytest.mark.parametrize("text", ["\ud800", None])
def test_what_has_no_json_form_is_refused_and_leaves_the_file_whole(tmp_path: Path, text):
    path = tmp_path / "run.jsonl"
    bad = episode(1)
    bad.messages[0]["content"] = text
    with TrajectoryWriter(path) as writer:
        writer.append(episode(0))
        with pytest.raises(DataError, match="trajectory run/s1 cannot be written as JSON"):
            writer.append(bad)
        writer.append(episode(2))
    assert list(read_trajectories(path)) == [episode(0), episode(2)]
