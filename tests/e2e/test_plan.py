"""`gymtune plan` as people type it: what it says at each stage, and that what it prints can be run."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gymtune import cli
from gymtune.envs.files import example_path
from gymtune.trainers.plan import make_plan

ROOT = Path(cli.__file__).resolve().parent
ARITHMETIC, CALCULATOR = "gymtune/Arithmetic-v0", "gymtune/Calculator-v0"
Run = Callable[..., tuple[int, str, str]]

#: Words of a command -> what makes it tiny. `-n 2000` and `--num-generations 8` are replaced, the others are added.
TINY = {
    ("models",): "--hidden-size 16 --layers 1 --heads 2 --kv-heads 1 --intermediate-size 32",
    ("rollout", "scripted"): "-n 12",
    ("rollout", "--model"): "-n 24 --num-generations 4 --max-completion-length 6",
    ("train", "sft"): "--max-steps 1 --batch-size 4 --learning-rate 1e-6",
    ("train", "reward"): "--max-steps 1 --batch-size 4",
    ("train", "dpo"): "--max-steps 1 --batch-size 4",
    ("train", "kto"): "--max-steps 1 --batch-size 4",
    ("train", "ppo"): "--max-steps 1 --prompts-per-step 2 --max-completion-length 6",
    ("train", "grpo"): "--max-steps 1 --prompts-per-step 2 --num-generations 2 --max-completion-length 6",
    ("eval",): "-n 4 --max-completion-length 6",
}


def tiny(words: Sequence[str]) -> list[str]:
    """Return a command with tiny sizes."""
    (added,) = (added.split() for marks, added in TINY.items() if set(marks) <= set(words))
    kept = list(words)
    for option in ("-n", "--num-generations"):
        if option in kept and option in added:
            del kept[kept.index(option) : kept.index(option) + 2]
    return kept + added


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process, through the console script's own function."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gymtune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_in_an_empty_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("plan")
    assert (code, err) == (0, "")
    assert "Nothing is here yet" in out
    assert f"\ngymtune models init --out base --env {CALCULATOR}\n" in out
    assert out.rstrip().endswith("next: base, which writes base")
    assert list(tmp_path.iterdir()) == []


def test_with_a_malformed_file(run: Run, tmp_path: Path):
    file = tmp_path / "pairs.jsonl"
    lines = example_path("preference").read_text().splitlines()
    file.write_text("\n".join([*lines[:4], '{"chosen": 1}', lines[4], lines[5][:-9]]))
    code, out, _ = run("plan", tmp_path, "--data", file)
    assert code == 1
    table = out.partition("\nthere\n")[0]
    assert "line 5" in table
    assert "line 7" in table
    assert f"`gymtune validate {file}`" in table
    for option in ("--json", "--pipeline"):
        code, out, err = run("plan", tmp_path, "--data", file, option)
        assert code == 1
        assert err.count(f"plan: {file}: line ") == err.count("\n") >= 2
    code, out, _ = run("plan", tmp_path / "nowhere")
    assert code == 1
    assert "no such folder" in out


def test_as_json(run: Run, tmp_path: Path):
    code, out, _ = run("plan", tmp_path, "--data", example_path("preference"), "--json")
    told = json.loads(out)
    assert (code, told["ok"], told["next"]) == (0, True, "base")
    (routes,) = told["routes"].values()
    assert {route["algo"] for route in routes if route["way"] == "data"} >= {"dpo", "reward", "sft"}
    assert {route["why"] for route in routes if route["algo"] == "grpo"} == {"a recorded answer has no log-probs"}
    assert [stage["shell"] for stage in told["stages"]] == [shlex.join(stage["command"]) for stage in told["stages"]]


def test_the_whole_chain_runs_and_the_plan_sees_it(run: Run, taught_model: Path, tmp_path: Path):
    """Each command of a plan, in order; every one leaves what the plan said, and in the end all is done."""
    start = tmp_path / "start"
    shutil.copytree(taught_model, start)
    given = {"model": str(start), "env": ARITHMETIC}
    plan = make_plan(tmp_path, **given)
    assert [stage.name for stage in plan.stages if stage.command] == [
        "demonstrations", "sft", "groups", "reward", "dpo", "ppo", "grpo", "eval",
    ]  # fmt: skip
    for stage in plan.stages:
        if not stage.command:
            continue
        code, out, err = run(*tiny(stage.command)[1:])
        assert code == 0, (stage.name, out, err)
        if stage.name == "eval":
            assert all(model in out for model in stage.command if model.startswith(str(tmp_path)))
            break
        assert Path(stage.writes).exists(), stage
        assert not stage.mark or Path(stage.mark).exists(), stage
        ahead = {after.name: after.state for after in make_plan(tmp_path, **given).stages}
        assert ahead.get(stage.name, "done") == "done"
    done = make_plan(tmp_path, **given)
    assert {stage.name: stage.state for stage in done.stages} == dict.fromkeys(
        ("base", "sft", "reward", "dpo", "ppo", "grpo"), "done"
    ) | {"eval": "open"}
    assert "# 6. grpo" in done.script()
    assert "gymtune train" not in done.script()


@pytest.mark.slow
def test_a_printed_pipeline_runs_in_a_shell(run: Run, taught_model: Path, tmp_path: Path):
    """The script itself, by bash; and once more, which finds all of it done."""
    code, script, _ = run("plan", tmp_path, "--model", taught_model, "--env", ARITHMETIC, "--pipeline")
    assert code == 0
    shim = tmp_path / "bin" / "gymtune"
    shim.parent.mkdir()
    shim.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {[str(ROOT / '.types'), str(Path(__file__).parent)]!r}\n"
        "from test_plan import tiny\nfrom gymtune.cli import main\n"
        "sys.argv = tiny(sys.argv)\nmain()\n"
    )
    shim.chmod(0o755)
    env = os.environ | {"PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}"}
    for _ in range(2):
        done = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        assert "agent" not in done.stdout
    assert (tmp_path / "grpo" / "grpo" / "config.json").is_file()
    assert "train" not in done.stdout  # what was there already
