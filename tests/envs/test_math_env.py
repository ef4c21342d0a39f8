"""The math env: files, checkers, tools, and GSM8K's annotations as calls."""

import json
from pathlib import Path

import pytest

from gymtune.agents import ScriptedAgent, rollout
from gymtune.envs import make_env
from gymtune.envs.math_env import calculator_episode
from gymtune.tools import ConfigError, DataError

ANNOTATED = "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"
RECORDS = [
    {"question": "How many clips did she sell in April and May?", "answer": ANNOTATED},
    {"question": "What is half of 9?", "answer": "4.5"},
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return str(path)


def test_a_solution_becomes_the_calls_it_is_annotated_with() -> None:
    episode = calculator_episode(ANNOTATED)
    assert [m["content"] for m in episode] == [
        "She sold 48/2 =",
        "24 clips in May.\nAltogether 48+24 =",
        "72 clips.\n#### 72",
    ]
    calls = [call["function"] for m in episode for call in m.get("tool_calls", [])]
    assert calls == [{"name": "calculator", "arguments": {"expression": e}} for e in ("48/2", "48+24")]


@pytest.mark.parametrize(("tools", "turns"), [([], 1), (["calculator"], 3)])
def test_the_files_own_solutions_score_full(file: str, tools: list[str], turns: int) -> None:
    found = rollout("gymtune/Math-v0", ScriptedAgent(), 2, env_args={"data": file, "tools": tools})
    assert [t.reward for t in found] == [1.0, 1.0]
    assert len(found[0].turns) == turns
    assert [t.task_id for t in found] == ["few/1", "few/2"]
    assert all(use.outcome == "ok" for t in found for turn in t.turns for use in turn.tools)


@pytest.mark.parametrize(
    ("checker", "answer", "right"),
    [("numeric", "72", True), ("numeric", "144/2", False), ("math", r"\boxed{72.0}", True), ("exact", "72", True)],
)
def test_the_checker_is_chosen_by_name(file: str, checker: str, answer: str, right: bool) -> None:
    env = make_env("gymtune/Math-v0", data=file, checker=checker)
    env.reset(options={"task_index": 0})
    assert env.step(answer)[4]["success"] is right


def test_wrong_names_and_files_are_said(file: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checker is named 'numerc'.*numeric"):
        make_env("gymtune/Math-v0", data=file, checker="numerc")
    with pytest.raises(ConfigError, match="no tool of the library is named 'calc'"):
        make_env("gymtune/Math-v0", data=file, tools=["calc"])
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        make_env("gymtune/Math-v0", data=str(tmp_path / "nowhere.jsonl"))
