"""Validate: every planted fault is found, with its line and path, and nothing else; the counts are those of a hand."""

import json
import runpy
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gymtune.agents import ScriptedAgent, TrajectoryWriter, rollout
from gymtune.envs.files import KINDS, FileTasks, example_path, read_records
from gymtune.envs.files.toolsets import is_plain
from gymtune.envs.files.validate import validate
from gymtune.tools import DataError

BAD = Path(__file__).parent / "bad"

#: file -> (line, path, rule) of each fault planted there
PLANTED = {
    "preference": [
        (2, "rejected[0]", "prompts differ"),
        (3, "rejected[1]", "empty answer"),
        (4, "chosen[1].role", "shape"),
        (5, "rejected", "shape"),
    ],
    "prompts": [
        (2, "conversations[0].content", "shape"),
        (3, "conversations[0]", "roles"),
        (4, "", "roles"),
        (5, "", "json"),
        (6, "", "kind"),
    ],
    "agentic": [
        (2, "conversations[0].tools", "tools"),
        (3, "conversations[0].tools[0].function.parameters", "tools"),
        (4, "gt", "gt"),
        (5, "gt[1]", "gt"),
        (6, "conversations[0].tools[1]", "tools"),
        (7, "conversations[2]", "roles"),
        (8, "conversations[2].tool_calls[0].arguments", "tool calls"),
    ],
    "verifiable": [
        (3, "answer", "gt"),
        (4, "", "gt"),
        (5, "question", "shape"),
        (6, "", "json"),
        (7, "", "json"),
        (8, "reward_model.ground_truth", "gt"),
        (10, "answer", "json"),
        (11, "", "json"),
    ],
    "unpaired": [
        (2, "label", "shape"),
        (3, "completion", "empty answer"),
        (4, "", "shape"),
        (5, "label", "shape"),
        (6, "", "roles"),
    ],
    "sft": [
        (2, "messages[1]", "empty answer"),
        (3, "messages", "roles"),
        (4, "messages[1].tool_calls[0].function.arguments", "tool calls"),
        (5, "messages[2].tool_call_id", "roles"),
        (6, "messages[1]", "empty answer"),
        (7, "messages[0].tool_calls", "shape"),
        (8, "messages[1]", "shape"),
        (9, "messages", "roles"),
        (11, "tools[0].function.name", "tools"),
    ],
    "sharegpt": [
        (2, "conversations[1].from", "shape"),
        (3, "conversations[1]", "shape"),
        (4, "", "roles"),
        (5, "conversations[1].value", "tool calls"),
        (6, "conversations[1]", "roles"),
        (7, "conversations[1]", "empty answer"),
        (8, "tools", "tools"),
    ],
    "bfcl": [
        (2, "question", "shape"),
        (3, "question", "shape"),
        (4, "function[0].parameters", "tools"),
        (5, "function[0].parameters", "tools"),
        (6, "question[0][0].content", "shape"),
        (7, "function", "tools"),
    ],
}
WARNED = {
    "preference": {"chosen equals rejected": [7]},
    "agentic": {"gt not reachable: no tools": [9], "gt is empty": [10]},
    "verifiable": {"reference does not end in gt": [9]},
    "sft": {"roles out of order": [10]},
}


@pytest.mark.parametrize("name", PLANTED)
def test_every_planted_fault_is_found_and_no_other(name: str) -> None:
    report = validate(BAD / f"{name}.jsonl")
    assert [(fault.line, fault.path, fault.rule) for fault in report.faults] == PLANTED[name]
    assert all(fault.wanted and fault.came for fault in report.faults)
    assert {what: warned.lines for what, warned in report.warnings.items()} == WARNED.get(name, {})
    assert report.ok is False
    assert sum(report.errors.values()) == len(PLANTED[name])
    with pytest.raises(DataError, match=r"\.jsonl, line \d+.*: wanted .*, came .*`gymtune validate"):
        list(read_records(BAD / f"{name}.jsonl", report.kind))


@pytest.mark.parametrize("name", PLANTED)
def test_the_examples_are_without_fault(name: str) -> None:
    report = validate(example_path(name))
    assert report.ok
    assert (report.rows, report.faults, report.warnings) == (10, [], {})
    assert report.kind in KINDS


def test_trajectories(tmp_path: Path) -> None:
    """Of our own rollout, with a tool; then with one list cut."""
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        for trajectory in rollout("gymtune/Calculator-v0", ScriptedAgent(), 4):
            writer.append(trajectory)
    report = validate(path)
    assert (report.kind, report.ok, report.rows) == ("trajectories", True, 4)
    record = FileTasks(path)[0]
    value = json.loads(path.read_text().splitlines()[0])
    assert [*record.prompt, *record.reply("good")] == value["messages"]
    assert (list(record.tools), record.gt) == (json.loads(value["tools"]), value["gt"])
    broken = value | {
        "messages": [*value["messages"][:2], value["messages"][2] | {"tool_calls": []}, *value["messages"][3:]]
    }
    path.write_text(json.dumps(broken))
    assert validate(path).ok  # the result of a call whose markup was broken answers no call, and is no fault
    value |= {"tokens": [1], "success": None, "schema_version": 2}
    path.write_text(json.dumps(value))
    found = [(fault.path, fault.wanted, fault.came) for fault in validate(path).faults]
    assert found == [
        ("schema_version", "1", "2"),
        ("response_mask", "as many as tokens: 1", "0"),
        ("logprobs", "as many as tokens: 1", "0"),
    ]


def test_counts_and_percentiles_by_hand(tmp_path: Path) -> None:
    """Prompts of 1 to 99 characters, the first of them twice, and a blank line."""
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": "x" * n, "id": n} for n in range(1, 100)]
    path.write_text(
        "\n".join(map(json.dumps, rows)).replace("\n", "\n\n", 1) + "\n" + json.dumps({"prompt": "x"}) + "\n"
    )
    report = validate(path)
    assert (report.rows, report.blank, report.ok) == (100, 1, True)
    assert report.spread["characters"] == {"p0": 1, "p50": 49, "p90": 89, "p99": 98, "max": 99}
    assert report.spread["turns"] == dict.fromkeys(("p0", "p50", "p90", "p99", "max"), 1)
    assert report.unused == {"id": 99}
    again = report.warnings["the same as an earlier record"]
    assert (again.count, again.lines) == (1, [101])


@pytest.mark.parametrize(
    ("roles", "odd"),
    [
        ("system user assistant", False),
        ("user assistant user assistant", False),
        ("user assistant system user assistant", True),
        ("user user assistant", True),
        ("user assistant assistant", True),
        ("user assistant user", True),
    ],
)
def test_speakers_out_of_order_are_a_warning(tmp_path: Path, roles: str, odd: bool) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": "x"} for role in roles.split()]}))
    assert list(validate(path, "sft").warnings) == ["roles out of order"] * odd


def test_keys_that_nobody_reads_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    message = {"role": "assistant", "content": "a", "weight": 0}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, message], "source": "s"}))
    assert validate(path).unused == {"source": 1, "messages[].weight": 1}
    path.write_text("\n".join(json.dumps({"prompt": "q", f"key{n}": n}) for n in range(1000)))
    assert len(validate(path).unused) == 101


def test_the_listing_is_bounded_and_the_rest_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "q"}\n' + '{"prompt": 5}\n' * 50)
    report = validate(path, max_faults=10)
    assert ([fault.line for fault in report.faults], report.unlisted) == (list(range(2, 12)), 40)
    told = json.loads(report.to_json())
    assert (told["ok"], told["errors"], told["unlisted"]) == (False, {"shape": 50}, 40)
    assert told["faults"][0] == {
        "line": 2, "path": "prompt", "wanted": "text or a list of messages", "came": "5", "rule": "shape"
    }  # fmt: skip
    tables = {title: rows for title, _, rows in report.tables()}
    assert tables["errors"][0] == ("2", "prompt", "text or a list of messages", "5")
    assert tables["errors not listed"] == [("40",)]
    assert all(len(row) == len(columns) for _, columns, rows in report.tables() for row in rows)


def test_a_file_without_records_is_not_ok(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n\n")
    assert [str(fault) for fault in validate(path, "sft").faults] == ["line 0: wanted at least one record, came none"]
    with pytest.raises(DataError, match="cannot tell the kind"):
        validate(path)


def test_the_files_of_the_table_are_validated_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in example_path("agentic").read_text(encoding="utf-8").splitlines()]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    report = validate(tmp_path / "x.parquet")
    assert (report.kind, report.ok, report.rows) == ("agentic", True, 10)
    assert list(read_records(tmp_path / "x.parquet")) == list(read_records(example_path("agentic")))


def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """For the time that 100 MB take, see `benchmarks/validate_100mb.py`."""
    path = tmp_path / "agentic.jsonl"
    runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "validate_100mb.py"))["write_file"](path, 3_000_000)
    tracemalloc.start()
    report = validate(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.ok
    assert report.rows > 1000
    assert peak < path.stat().st_size  # its records together take 8 MB


# -- the short way to a valid schema -----------------------------------------------------------------------------------

ANY = st.sampled_from(["object", "string", "strnig", "x", "", 1, 1.5, True, None]) | st.lists(
    st.sampled_from(["a", "b", "object", 1]), max_size=3
)
WORDS = "type title description properties required items additionalProperties enum default minimum $ref anyOf"
SCHEMAS = st.recursive(
    ANY,
    lambda inner: st.dictionaries(
        st.sampled_from(WORDS.split()),
        inner | st.dictionaries(st.sampled_from(["a", "type"]), inner, max_size=2),
        max_size=4,
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(SCHEMAS)
def test_what_is_plain_is_valid(schema) -> None:
    if is_plain(schema):
        Draft202012Validator.check_schema(schema)


def test_everyday_schemas_are_plain() -> None:
    assert all(is_plain(tool["function"]["parameters"]) for r in read_records(example_path("bfcl")) for tool in r.tools)
