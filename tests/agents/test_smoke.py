"""The smoke test: its own cases hold, and what breaks one is seen."""

import json
from pathlib import Path
from typing import Any

import pytest

from gymtune.agents.smoke import CASES, read_tools, run_smoke
from gymtune.tools import ConfigError, DataError

CALL = '<tool_call>\n{"name": "calculate_math", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
NOTHING: dict[str, Any] = {"tools": None, "gt": [], "rewards": None, "weights": {}, "reward_model": None}


@pytest.fixture
def texts(tmp_path: Path):
    def write(*said: str) -> list[Path]:
        paths = [tmp_path / f"{index}.txt" for index in range(len(said))]
        for path, text in zip(paths, said, strict=True):
            path.write_text(text)
        return paths

    return write


def test_every_built_in_case_goes_as_it_must() -> None:
    found = run_smoke([], **NOTHING)
    assert [result.name for result in found if not result.holds] == []
    assert len(found) == len(CASES) == len({case.name for case in CASES})
    outcomes = {outcome for result in found for outcome in result.outcomes}
    wanted = "ok parse_error unknown_tool schema_violation timeout exception truncated"
    assert outcomes == set(wanted.split())
    by_name = {result.name: result for result in found}
    assert by_name["two calls, then the answer"].reward == 3.0  # MiniMind's most: 0.5 + 2.5
    assert by_name["calls to the last turn"].rewards["unfinished"] == -1.0
    assert max(r.reward for r in found if r.success is not True) < 3.0


def test_a_text_of_yours(texts) -> None:
    (found,) = run_smoke(texts(CALL, "It is 42."), **NOTHING | {"gt": ["42"]})
    assert (found.holds, found.success, found.outcomes) == (True, True, ("ok",))
    assert found.rewards["gt"] == 1.0
    (found,) = run_smoke(texts(CALL, "It is 43."), **NOTHING | {"gt": ["42"]})
    assert (found.holds, found.success) == (False, False)
    (found,) = run_smoke(texts(CALL.replace('"6 * 7"', "42"), "It is 42."), **NOTHING)
    assert (found.holds, found.outcomes) == (False, ("schema_violation",))
    assert "gt" not in found.rewards


def test_other_formats_checkers_and_rewards(texts) -> None:
    said = '{"name": "calculate_math", "parameters": {"expression": "6 * 7"}}'
    asked = NOTHING | {
        "gt": ["42"],
        "chat_format": "llama3_json",
        "checker": "numeric",
        "weights": {"failed_calls": 1.0},
    }
    (found,) = run_smoke(texts(said, "42"), **asked | {"gt": ["42"], "checker": "exact", "reward_model": "stub"})
    assert found.outcomes == ("ok",)
    assert found.rewards["reward_model"] == 1.0
    assert found.rewards["failed_calls"] == 0.0
    with pytest.raises(ConfigError, match="no checker is named"):
        run_smoke(texts("42"), **NOTHING | {"gt": ["42"], "checker": "nummeric"})


def test_schemas_from_a_file(tmp_path: Path, texts) -> None:
    path = tmp_path / "tools.json"
    mine = {"name": "book", "parameters": {"type": "object", "properties": {"day": {"type": "string"}}}}
    path.write_text(json.dumps([mine, {"type": "function", "function": {"name": "calculate_math"}}]))
    said = '<tool_call>\n{"name": "book", "arguments": {"day": "Monday"}}\n</tool_call>'
    (found,) = run_smoke(texts(said), **NOTHING | {"tools": str(path)})
    assert found.results == ("book: noted: no tool of the library has this name",)
    for text, words in [
        ("{", "cannot read"),
        ("[1]", "tool 0: wanted an object"),
        ('[{"name": "x", "parameters": 5}]', "x"),
    ]:
        path.write_text(text)
        with pytest.raises((DataError, ConfigError), match=words):
            read_tools(path)


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the text"):
        run_smoke([tmp_path / "nowhere.txt"], **NOTHING)
