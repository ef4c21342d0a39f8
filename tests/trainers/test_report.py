"""The picture of a run: what it draws, and that it draws nothing by global state."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gymtune.tools.errors import DataError
from gymtune.trainers import report
from gymtune.trainers.report import reward_curve, trailing_mean


def test_trailing_mean_by_hand() -> None:
    assert trailing_mean([1, 3, 5, 7], 2) == [1, 2, 4, 6]
    assert trailing_mean([1, 3, 5, 7], 1) == [1, 3, 5, 7]
    assert trailing_mean([4, 2], 10) == [4, 3]
    assert trailing_mean([], 3) == []


def run_of(folder: Path, lines: list[dict[str, float]], **config: str) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config:
        (folder / "config.json").write_text(json.dumps({"config": config}))
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[tuple[int, float]]]]:
    """Notes each panel's name and points."""
    seen = []
    original = report._draw

    def note(panel: object, name: str, points: list[tuple[int, float]]) -> None:
        seen.append((name, points))
        original(panel, name, points)

    monkeypatch.setattr(report, "_draw", note)
    return seen


def test_rl_shows_reward_and_success_over_the_steps(tmp_path: Path, drawn) -> None:
    lines = [{"step": s, "reward": s / 50, "success": s / 60, "loss": 0.0} for s in range(1, 50)]
    run = run_of(tmp_path / "run", lines, algo="grpo", env="gymtune/Calculator-v0")
    reward_curve(run, run / "curve.png")
    assert drawn == [(name, [(line["step"], line[name]) for line in lines]) for name in ("reward", "success")]
    assert (run / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_sft_shows_the_loss_and_one_step_is_enough(tmp_path: Path, drawn) -> None:
    run = run_of(tmp_path / "run", [{"step": 1, "loss": 2.5}], algo="sft", data="somewhere/gold.jsonl")
    reward_curve(run, run / "curve.png")
    assert drawn == [("loss", [(1, 2.5)])]


def test_evaluations_have_a_panel_of_their_own(tmp_path: Path, drawn) -> None:
    lines = [{"step": 0, "eval/success": 0.25}, *({"step": s, "reward": 0.5, "success": 0.5} for s in (1, 2))]
    lines[2]["eval/success"] = 0.75
    run = run_of(tmp_path / "run", lines)
    reward_curve(run, run / "curve.png")
    assert [name for name, _ in drawn] == ["reward", "success", "eval/success"]
    assert drawn[2][1] == [(0, 0.25), (2, 0.75)]


def test_steps_where_every_episode_failed_are_left_out(tmp_path: Path, drawn) -> None:
    lines = [{"step": 1, "reward": 0.5, "success": 0.5}, {"step": 2}, {"step": 3, "reward": 1.0, "success": 1.0}]
    run = run_of(tmp_path / "run", lines)
    reward_curve(run, run / "curve.png")
    assert drawn[0] == ("reward", [(1, 0.5), (3, 1.0)])


def test_the_title_names_algorithm_and_env_or_file(tmp_path: Path) -> None:
    assert report._title(run_of(tmp_path / "a", [], algo="grpo", env="E")) == "grpo, E"
    assert report._title(run_of(tmp_path / "b", [], algo="sft", data="x/gold.jsonl")) == "sft, gold.jsonl"
    assert report._title(run_of(tmp_path / "c", [])) == "c"


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot read"):
        reward_curve(tmp_path, tmp_path / "curve.png")
    empty = run_of(tmp_path / "empty", [])
    with pytest.raises(DataError, match="no step has been finished yet"):
        reward_curve(empty, empty / "curve.png")
    torn = run_of(tmp_path / "torn", [{"step": 1, "loss": 1.0}])
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not JSON"):
        reward_curve(torn, torn / "curve.png")
    whole = run_of(tmp_path / "whole", [{"step": 1, "loss": 1.0}])
    with pytest.raises(DataError, match=r"none/curve\.png: cannot write"):
        reward_curve(whole, whole / "none" / "curve.png")


def test_pyplot_and_its_global_state_are_never_loaded(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    code = (
        "import sys; from pathlib import Path; from gymtune.trainers.report import reward_curve; "
        f"run = Path({str(run)!r}); reward_curve(run, run / 'curve.png'); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
