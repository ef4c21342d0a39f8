"""The commands of tasks, tools and rewards, as people type them: validate, smoke, envs new and check, --reward."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gymtune.agents import read_trajectories
from gymtune.envs import env_ids
from gymtune.envs.files import KINDS, example_path

GYMTUNE = str(Path(sys.executable).with_name("gymtune"))
BAD = Path(__file__).parent.parent / "envs" / "files" / "bad"
CALL = '<tool_call>\n{"name": "calculate_math", "arguments": {"expression": "6 * 7"}}\n</tool_call>'


def run(*arguments: object, cwd: Path | None = None) -> tuple[int, str, str]:
    done = subprocess.run([GYMTUNE, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "trajectories"])
def test_validate_tells_good_from_bad(kind: str) -> None:
    code, out, err = run("validate", example_path(kind))
    assert (code, err) == (0, "")
    assert f"kind                 {kind}" in out or kind in out
    code, out, _ = run("validate", BAD / f"{kind}.jsonl", "--kind", kind, "--json")
    report = json.loads(out)
    assert code == 1
    assert report["ok"] is False
    assert report["faults"]
    assert {"line", "path", "wanted", "came"} <= report["faults"][0].keys()


def test_validate_says_what_it_cannot_read(tmp_path: Path) -> None:
    code, out, err = run("validate", tmp_path / "nowhere.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("gymtune: error: ")
    assert "nowhere.jsonl" in err


def test_rollouts_are_valid_files(tmp_path: Path) -> None:
    out = tmp_path / "gold.jsonl"
    assert run("rollout", "--env", "gymtune/ToolUse-v0", "--agent", "scripted", "-n", 5, "--out", out)[0] == 0
    code, said, _ = run("validate", out)
    assert code == 0
    assert "trajectories" in said


def test_smoke_without_anything_and_with_bad_calls(tmp_path: Path) -> None:
    code, out, err = run("smoke")
    assert (code, err) == (0, "")
    assert "WRONG" not in out
    assert out.count("as it must") >= 15
    (tmp_path / "call.txt").write_text(CALL)
    (tmp_path / "answer.txt").write_text("It is 42.")
    texts = ("--text", tmp_path / "call.txt", "--text", tmp_path / "answer.txt")
    code, out, _ = run("smoke", *texts, "--gt", "42", "--reward-model", "stub")
    assert code == 0
    assert "reward_model" in out
    code, out, _ = run("smoke", *texts, "--gt", "43")
    assert (code, "WRONG" in out) == (1, True)
    (tmp_path / "call.txt").write_text(CALL.replace("</tool_call>", "").replace("}}", "}"))
    code, out, _ = run("smoke", *texts)
    assert code == 1
    assert "parse_error" in out
    assert run("smoke", "--gt", "42")[0] == 2
    assert run("smoke", "--sglang-url", "http://127.0.0.1:9")[0] == 1


def test_a_new_env_is_found_where_one_stands(tmp_path: Path) -> None:
    code, out, err = run("envs", "new", "demo_env", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "gymtune envs check demo_env:DemoEnv-v0" in out
    assert run("envs", "check", "demo_env:DemoEnv-v0", cwd=tmp_path)[0] == 0
    rollout = ("rollout", "--env", "demo_env:DemoEnv-v0", "--agent", "scripted", "-n", 20, "--out", "gold.jsonl")
    code, out, _ = run(*rollout, cwd=tmp_path)
    assert code == 0
    assert out.startswith("20 episodes, success 20/20, mean reward 1.000")
    assert run("envs", "new", "demo_env", cwd=tmp_path)[0] == 2


def test_every_env_is_checked_with_its_attacks() -> None:
    code, out, _ = run("envs", "check", "--all")
    assert code == 0
    assert "BROKEN" not in out
    assert all(name in out for name in env_ids())
    attacks = [line.split() for line in out.splitlines() if line.strip().startswith("gymtune/") and "holds" not in line]
    assert len(attacks) > 100
    assert {line[-1] for line in attacks} == {"0"}


def test_rewards_by_name_preset_and_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def brief(completions, **columns):\n    return [float(len(c[-1]['content']) < 9) for c in completions]\n"
    )
    base = ("rollout", "--env", "gymtune/Arithmetic-v0", "--agent", "scripted", "-n", 4)
    rewards = ("--reward", "gt=2", "--reward", "length", "--reward", "mine:brief=0.5", "--reward-model", "stub")
    code, _, err = run(*base, "--out", "a.jsonl", *rewards, cwd=tmp_path)
    assert code == 0, err
    for trajectory in read_trajectories(tmp_path / "a.jsonl"):
        found = trajectory.rewards
        assert (found["gt"], found["brief"], found["reward_model"]) == (1.0, 1.0, 1.0)
        assert trajectory.reward == pytest.approx(2 + (found["length"] or 0.0) + 0.5 + 1)
    assert run(*base, "--out", "b.jsonl", "--reward", "gsm8k", cwd=tmp_path)[0] == 0
    assert {frozenset(t.rewards) for t in read_trajectories(tmp_path / "b.jsonl")} == {frozenset({"gt", "answer_tag"})}
    for wrong, words in [("gtt=1", "gtt"), ("gt=much", "NAME=WEIGHT"), ("nowhere:f", "nowhere"), ("gt=1=2", "gt=1")]:
        code, _, err = run(*base, "--out", "c.jsonl", "--reward", wrong, cwd=tmp_path)
        assert code == 2, err
        assert words in err


def test_data_reaches_the_env(tmp_path: Path) -> None:
    data = tmp_path / "q.jsonl"
    data.write_text('{"question": "Twice 4?", "answer": "#### 8"}\n')
    rollout = ("rollout", "--env", "gymtune/Math-v0", "--agent", "scripted", "-n", 1, "--out", tmp_path / "o.jsonl")
    assert run(*rollout, "--data", data)[0] == 0
    assert [t.task_id for t in read_trajectories(tmp_path / "o.jsonl")] == ["q/1"]
