"""The preference env: pairs replayed, prompts alone, labelled replies."""

import json
from pathlib import Path
from typing import Any

import pytest

from gymtune.agents import ScriptedAgent, rollout
from gymtune.envs import make_env
from gymtune.tools import DataError

ENV = "gymtune/Preference-v0"
HELLO = {"role": "user", "content": "Hello?"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_pair_is_one_group_that_earns_one_and_nothing(tmp_path: Path) -> None:
    data = write(
        tmp_path / "pairs.jsonl",
        {"chosen": [HELLO, says("Hi!")], "rejected": [HELLO, says("What?")]},
        {"prompt": "Bye", "chosen": "See you.", "rejected": "Go."},
    )
    found = rollout(ENV, ScriptedAgent(), 2, num_generations=2, env_args={"data": data})
    assert [t.reward for t in found] == [1.0, 0.0, 1.0, 0.0]
    assert [t.messages[-1]["content"] for t in found] == ["Hi!", "What?", "See you.", "Go."]
    assert found[0].group_id == found[1].group_id != found[2].group_id
    assert found[0].messages[:1] == found[1].messages[:1] == [HELLO]


def test_a_text_that_nobody_judged_earns_nothing(tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", {"prompt": "Bye", "chosen": "See you.", "rejected": "Go."})
    env = make_env(ENV, data=data)
    env.reset(options={"task_index": 0})
    *_, reward, _, _, info = env.step("Farewell.")
    assert (reward, info["success"]) == (0.0, False)


def test_labelled_replies_are_right_or_wrong(tmp_path: Path) -> None:
    data = write(
        tmp_path / "kto.jsonl",
        {"prompt": "Bye", "completion": "See you.", "label": True},
        {"prompt": "Bye", "completion": "Go.", "label": False},
    )
    found = rollout(ENV, ScriptedAgent(), 2, env_args={"data": data})
    assert [t.reward for t in found] == [1.0, 0.0]


def test_prompts_alone_are_not_scored(tmp_path: Path) -> None:
    data = write(tmp_path / "prompts.jsonl", {"conversations": [HELLO, says("")]})
    env = make_env(ENV, data=data)
    env.reset(options={"task_index": 0})
    *_, reward, terminated, _, info = env.step("Hi!")
    assert (reward, terminated, info["success"], info["rewards"]) == (0.0, True, None, {})


def test_a_reply_of_several_messages_is_refused_by_line(tmp_path: Path) -> None:
    long = [HELLO, says("Hi!"), HELLO, says("Hi again!")]
    data = write(tmp_path / "pairs.jsonl", {"chosen": long, "rejected": [HELLO, says("What?")]})
    with pytest.raises(DataError, match="pairs, line 1: a reply must be one assistant message"):
        make_env(ENV, data=data).reset(options={"task_index": 0})
