"""FileTasks: records by number, read when asked for, in every process."""

import gzip
import pickle
import tracemalloc
from pathlib import Path

import pytest

from gymtune.envs.files import FileTasks, example_path, read_records
from gymtune.tools import DataError


@pytest.mark.parametrize("kind", ["preference", "agentic", "verifiable"])
@pytest.mark.parametrize("packed", [False, True])
def test_records_by_number_are_those_in_a_row(tmp_path: Path, kind: str, packed: bool) -> None:
    path = tmp_path / "x.jsonl"
    content = example_path(kind).read_bytes().replace(b"\n", b"\r\n\n", 3)
    path.write_bytes(gzip.compress(content) if packed else b"\xef\xbb\xbf" + content.rstrip())
    tasks, records = FileTasks(path), list(read_records(path))
    assert tasks.kind == kind
    assert list(tasks) == records == tasks[:]
    assert [record.line for record in records][:4] == [1, 3, 5, 7]
    assert (tasks[-1], tasks[9], tasks[2:4]) == (records[9], records[9], records[2:4])
    with pytest.raises(IndexError):
        tasks[10]
    copy = pickle.loads(pickle.dumps(tasks))
    assert list(copy) == records


def test_a_bad_record_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "q", "answer": "5"}\n{"question": "q", "answer": null}\n')
    tasks = FileTasks(path, kind="verifiable")
    assert tasks[0].gt == "5"
    with pytest.raises(DataError, match=r"x.jsonl, line 2: wanted one of the keys gt, .* `gymtune validate .*x.jsonl`"):
        tasks[1]
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        tasks[0]


def test_a_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """20 MB of records are opened within 1 MB."""
    path = tmp_path / "x.jsonl"
    path.write_text(('{"prompt": "%s"}\n' % ("x" * 10_000)) * 2000)
    tracemalloc.start()
    tasks = FileTasks(path)
    assert len(tasks[1999].prompt[0]["content"]) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(tasks) == 2000
    assert peak < 1e6
