"""The tool-use env: MiniMind's records, BFCL's, tools of your own, and its whole reward."""

import json
from pathlib import Path
from typing import Any

import pytest

from gymtune.agents import ScriptedAgent, rollout
from gymtune.envs import make_env
from gymtune.tools import ConfigError, DataError, call
from gymtune.tools.library.everyday import everyday_tools

ENV = "gymtune/ToolUse-v0"


def record(names: list[str], question: str, gt: list[str], **more: Any) -> dict[str, Any]:
    schemas = [t.schema() for t in everyday_tools() if t.name in names]
    schemas += [
        {"type": "function", "function": {"name": n, "description": "", "parameters": {"type": "object"}}}
        for n in names
        if n not in {s["function"]["name"] for s in schemas}
    ]
    said = [{"role": "system", "content": "Use tools.", "tools": json.dumps(schemas)}, {"role": "user", "content": question}]  # fmt: skip  # noqa: E501
    return {"conversations": [*said, {"role": "assistant", "content": ""}], "gt": gt, **more}


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write(
        tmp_path / "agent.jsonl",
        record(["calculate_math"], "256 times 37?", ["9472"]),
        record(["get_current_weather", "calculate_math"], "Weather in Beijing?", ["28"]),
    )


def test_a_record_brings_its_tools(data: str) -> None:
    env = make_env(ENV, data=data)
    for index, names in enumerate([["calculate_math"], ["calculate_math", "get_current_weather"]]):
        messages, info = env.reset(options={"task_index": index})
        assert sorted(schema["function"]["name"] for schema in info["tools"]) == names
        assert [m["role"] for m in messages] == ["system", "user"]
        assert "tools" not in messages[0]


def test_calls_run_and_the_end_is_scored(data: str) -> None:
    env = make_env(ENV, data=data)
    env.reset(options={"task_index": 0})
    two = env.chat_format.render("", [call("calculate_math", expression="256 * 37"), call("no_such")])
    replies, reward, terminated, truncated, info = env.step(two)
    assert [r.outcome for r in info["tool_results"]] == ["ok", "unknown_tool"]
    assert "9472" in replies[0]["content"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    *_, reward, terminated, _, info = env.step("256 times 37 is 9472.")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_an_episode_cut_at_its_last_turn_is_punished(data: str) -> None:
    env = make_env(ENV, data=data, max_turns=2)
    env.reset(options={"task_index": 0})
    text = env.chat_format.render("", [call("calculate_math", expression="1 + 1")])
    env.step(text)
    *_, reward, terminated, truncated, info = env.step(text)
    assert (reward, terminated, truncated, info["success"]) == (-0.5, False, True, None)


def test_minimind_s_whole_reward(data: str) -> None:
    env = make_env(ENV, data=data, rewards="minimind_agent")
    env.reset(options={"task_index": 0})
    env.step(env.chat_format.render("", [call("calculate_math", expression="256 * 37")]))
    *_, reward, _, _, info = env.step("256 times 37 is 9472.")
    assert reward == pytest.approx(0.5 + 2.5)  # as many calls as gts, and every gt met
    assert info["rewards"]["gt"] == 1.0


@pytest.mark.parametrize("source", ["moon_phase", "my_tools"])
def test_tools_of_your_own(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moon.py").write_text(
        "from gymtune.tools import tool\n\n@tool(in_memory=True)\ndef moon_phase() -> str:\n"
        '    """Say the phase of the moon."""\n    return "full"\n\ndef my_tools():\n    return [moon_phase]\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = write(tmp_path / "moon.jsonl", record(["moon_phase"], "Which phase?", ["full"]))
    with pytest.raises(ConfigError, match="nobody has implemented its tool 'moon_phase'"):
        make_env(ENV, data=data)
    env = make_env(ENV, data=data, tools=f"moon:{source}")
    env.reset(options={"task_index": 0})
    replies, *_ = env.step(env.chat_format.render("", [call("moon_phase")]))
    assert replies[0]["content"] == "full"


@pytest.mark.parametrize("source", ["nowhere:x", "json:dumps", "json:nothing", "json"])
def test_what_are_no_tools_is_said(data: str, source: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)tools.*{source.partition(':')[0]}"):
        make_env(ENV, data=data, tools=source)


def test_bfcl_is_judged_by_its_calls(tmp_path: Path) -> None:
    parameters = {"type": "dict", "properties": {"city": {"type": "string"}, "days": {"type": "float"}}}
    function = {"name": "weather.forecast", "description": "", "parameters": parameters | {"required": ["city"]}}
    question = {"id": "a", "question": [[{"role": "user", "content": "Weather?"}]], "function": [function]}
    wanted = [{"weather.forecast": {"city": ["Paris", "Paris, France"], "days": ["", 1]}}]
    data = write(tmp_path / "b.jsonl", question | {"ground_truth": wanted}, question | {"id": "b", "ground_truth": []})
    found = rollout(ENV, ScriptedAgent(), 2, env_args={"data": data})
    assert [t.reward for t in found] == [1.0, 1.0]
    assert [len(t.turns) for t in found] == [2, 1]
    env = make_env(ENV, data=data)
    for text, right in [({"city": "Rome"}, False), ({"city": "paris, france", "days": 1}, True)]:
        env.reset(options={"task_index": 0})
        env.step(env.chat_format.render("", [call("weather.forecast", **text)]))
        assert env.step("Done.")[4]["success"] is right
    with pytest.raises(DataError, match="wanted ground_truth beside the question"):
        make_env(ENV, data=write(tmp_path / "c.jsonl", question))


def test_markup_without_types_is_read_by_the_schema(tmp_path: Path) -> None:
    data = write(tmp_path / "t.jsonl", record(["translate_text", "unit_converter"], "?", ["x"]))
    env = make_env(ENV, data=data, chat_format="qwen3_coder")
    env.reset(options={"task_index": 0})
    made = [call("unit_converter", value=15, from_unit="km", to_unit="miles"), call("translate_text", text="5", target_language="english")]  # fmt: skip  # noqa: E501
    *_, info = env.step(env.chat_format.render("", made))
    assert env.episode is not None
    assert [c.arguments for c in env.episode.calls] == [c["arguments"] for c in made]
    assert info["tool_results"][0].outcome == "ok"
