"""Rows: every form of file gives the same ones, and no bad row stops the rest."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymtune.envs.files import Row, read_rows
from gymtune.envs.files.records import shown
from gymtune.envs.files.strict_json import JsonError, loads
from gymtune.tools import DataError

ROWS = [
    {"messages": [{"role": "user", "content": "\u4f60\u597d \U0001f600 \u2028"}], "n": 1.5},
    {"messages": [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}], "n": 2.0},
    {"messages": [{"role": "user", "content": "z" * 200_000}], "n": -3.0},
]


def lines(rows: list) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def values(path) -> list:
    rows = list(read_rows(path))
    assert all(row.error is None for row in rows), rows
    return [row.value for row in rows]


def rows_of(tmp_path: Path, content: bytes, name: str = "x.jsonl") -> list[Row]:
    path = tmp_path / name
    path.write_bytes(content)
    return list(read_rows(path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", lines(ROWS)),
        ("x.data", lines(ROWS)),
        ("x.json", lines(ROWS)),  # as BFCL does
        ("x.jsonl", b"\xef\xbb\xbf" + lines(ROWS)),
        ("x.jsonl", lines(ROWS).replace(b"\n{", b"\r\n \r\n\n{")),
        ("x.jsonl", lines(ROWS).rstrip(b"\n")),
        ("x.json", json.dumps(ROWS).encode()),
        ("x.json", b"\xef\xbb\xbf" + json.dumps(ROWS, indent=2, ensure_ascii=False).encode()),
        ("x.txt", b"\n [" + b" , ".join(lines([row]).strip() for row in ROWS) + b"]\n"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_gives_the_same_rows(tmp_path: Path, name: str, content: bytes, packed: bool) -> None:
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content) if packed else content)
    assert values(path) == ROWS


def test_tables_give_the_same_rows(tmp_path: Path) -> None:
    """The keys that Arrow fills with null, because other rows have them, are missing again; so in schemas of tools."""
    datasets = pytest.importorskip("datasets")
    tools = [{"name": "f", "parameters": {"properties": {name: {"type": "string"}}}} for name in ("a", "b")]
    rows = [
        {"messages": [{"role": "user", "content": "q"}], "tools": tools, "n": 5},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning": "r"}]},
    ]
    table = datasets.Dataset.from_list(rows)
    assert "null" in json.dumps(table[0])
    table.to_parquet(tmp_path / "x.parquet")
    table.save_to_disk(tmp_path / "saved")
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines(rows))
    assert values(tmp_path / "x.parquet") == rows
    assert values(tmp_path / "saved") == rows
    assert values(f"hf:{folder}") == values(f"hf:{folder}:train") == rows
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"several splits; name one: .*splits/train"):
        next(read_rows(tmp_path / "splits"))


def test_parquet_values_without_a_json_form_are_told(tmp_path: Path) -> None:
    from datetime import datetime
    from decimal import Decimal

    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    odd = {"day": datetime(2025, 3, 7), "price": Decimal("1.50"), "n": float("nan"), "raw": b"x"}
    rows = [{"day": odd["day"], "price": odd["price"]}, {"n": odd["n"]}, {"raw": odd["raw"]}, {"n": 1.0}]
    kinds = {"day": pyarrow.timestamp("s"), "price": pyarrow.decimal128(5, 2), "n": pyarrow.float64()}
    schema = pyarrow.schema([*kinds.items(), ("raw", pyarrow.binary())])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), tmp_path / "x.parquet")
    first, second, third, last = read_rows(tmp_path / "x.parquet")
    assert first.value == {"day": "2025-03-07T00:00:00", "price": "1.50"}
    assert (second.path, second.error) == ("n", "nan, which is no JSON")
    assert (third.path, third.error) == ("raw", "a bytes, which is no JSON")
    assert last.value == {"n": 1.0}
    (tmp_path / "y.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot read as parquet"):
        next(read_rows(tmp_path / "y.parquet"))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"{", "what is no JSON (Expecting property name enclosed in double quotes at character 3)"),
        (b"[1]", "a list of 1"),
        (b"5", "5"),
        (b'{"a": NaN}', "NaN, which is no JSON"),
        (b'{"a": -Infinity}', "-Infinity, which is no JSON"),
        (b'{"a": 1e999}', "the number 1e999, which no float holds"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of thousands of digits"),
        (b'{"a": {"b": 1, "b": 2}}', "the key 'b' twice in one object"),
        (b'{"a": "\xff"}', "bytes that are not UTF-8, at byte 8 of the line"),
        (b'{"a": "\xed\xa0\x80"}', "bytes that are not UTF-8, at byte 8 of the line"),
        (b'{"a": [0, "x\\ud800"]}', "half a surrogate pair at character 2"),
        (b'{"\\udfff": 0}', "half a surrogate pair in the key '\\udfff'"),
        (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "more than 100 levels of lists and objects"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 100 levels of lists and objects"),
        (b"\xfe\xff\x00{", "bytes that are not UTF-8, at byte 1 of the line"),
    ],
)
def test_a_bad_line_is_told_and_the_rest_is_read(tmp_path: Path, bad: bytes, error: str) -> None:
    first, second, third = rows_of(tmp_path, b'{"n": 1}\n' + bad + b'\n{"n": 3}')
    assert (first, third) == (Row(1, {"n": 1}), Row(3, {"n": 3}))
    assert (second.line, second.value, second.error) == (2, None, error)


def test_half_a_last_line_says_so(tmp_path: Path) -> None:
    *_, last = rows_of(tmp_path, b'{"n": 1}\n{"n": 2')
    assert last.error is not None
    assert last.error.endswith("; the file ends in this line")


def test_a_surrogate_is_found_by_its_path() -> None:
    with pytest.raises(JsonError) as caught:
        loads('{"m": [{"c": "\\ud83d\\ude00"}, {"c": "ab\\ud83d"}]}')
    assert (caught.value.path, caught.value.came) == ("m[1].c", "half a surrogate pair at character 3")
    assert loads('"\\ud83d\\ude00"') == "\U0001f600"


def test_keys_of_a_file_cannot_paint_the_terminal(tmp_path: Path) -> None:
    key = "\x1b[31m" + "k" * 100
    first, second = rows_of(tmp_path, lines([{key: 1}]).replace(b": 1", b': "\\ud800"') + lines([[{key: 1}]]))
    assert first.path == "\\x1b[31m" + "k" * 55
    assert "\x1b" not in shown(json.loads(json.dumps({key: 1})))
    assert second.error == "a list of 1"


def test_long_lines_are_fine_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = rows_of(tmp_path, lines([{"a": "x" * 10_000_000}]))
    assert len(row.value["a"]) == 10_000_000
    monkeypatch.setattr("gymtune.envs.files.reading.MAX_LINE", 1 << 20)
    first, second = rows_of(tmp_path, lines([{"a": "x" * 3_000_000}, {"a": 2}]))
    assert (first.line, first.error) == (1, "a line of more than 1 MB")
    assert second == Row(2, {"a": 2})


def test_an_array_goes_on_after_a_bad_value_and_ends_at_bad_syntax(tmp_path: Path) -> None:
    big = "9" * 5000
    text = f'[{{"n": 1}}, {{"n": NaN}}, 7, {{"n": 1, "n": 2}}, {{"n": {big}}}, {{"s": "\\ud800"}}, {{"n": 7}}'
    found = rows_of(tmp_path, text.encode() + b', {"s": "\xff"}, {"n": 9} {"n": 10}]', "x.json")
    assert [row.line for row in found] == list(range(1, 11))
    assert [row.value for row in found if row.value] == [{"n": 1}, {"n": 7}, {"n": 9}]
    assert [row.error for row in found if row.error] == [
        "NaN, which is no JSON",
        "7",
        "the key 'n' twice in one object",
        "a number of thousands of digits",
        "half a surrogate pair at character 1",
        "bytes that are not UTF-8 at character 1",
        "no comma or bracket after a record; the rest of the array is not read",
    ]
    assert rows_of(tmp_path, b"[]", "x.json") == []
    assert "no JSON" in rows_of(tmp_path, b"[1, ]", "x.json")[-1].error
    assert "no comma or bracket" in rows_of(tmp_path, b'[{"a": 1}', "x.json")[-1].error
    assert "bomb" in rows_of(tmp_path, b'[{"a": 1}, ' + b"[" * 50_000, "x.json")[-1].error


def test_an_object_over_many_lines_is_one_row(tmp_path: Path) -> None:
    assert rows_of(tmp_path, json.dumps(ROWS[0], indent=1).encode(), "x.json") == [Row(1, ROWS[0])]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        next(read_rows(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="directory"):
        next(read_rows(tmp_path))
    content = gzip.compress(b'{"a": 1}\n' * 100_000)
    found = rows_of(tmp_path, content[: len(content) // 2], "x.jsonl.gz")
    assert found[0] == Row(1, {"a": 1})
    assert "gzip file that breaks" in found[-1].error


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_memory_is_that_of_a_record(tmp_path: Path, name: str) -> None:
    """20 MB of rows are read within 2 MB."""
    path = tmp_path / name
    row = json.dumps({"a": "x" * 10_000})
    path.write_text("[" + ",\n".join([row] * 2000) + "]" if name == "x.json" else (row + "\n") * 2000)
    tracemalloc.start()
    count = sum(row.value is not None for row in read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2000
    assert peak < 2e6


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:0123456789aNn\\u ', max_size=60).map(str.encode))
def test_no_bytes_crash_the_reading(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in ("junk.jsonl", "junk.json"):
        for row in rows_of(folder, content.removeprefix(b"\x1f\x8b"), name):
            assert (row.value is None) != (row.error is None)
