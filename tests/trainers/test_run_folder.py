"""The run folder: what it refuses, what a kill leaves in it, what is kept."""

import json

import pytest

from gymtune.agents import read_trajectories
from gymtune.tools.errors import ConfigError, RunError
from gymtune.trainers import Resolved
from gymtune.trainers.run_folder import RunFolder


@pytest.fixture
def resolved(config, tmp_path):
    def make(algo="grpo", name="run", **changes):
        return Resolved(config(algo, output_dir=str(tmp_path / name), **changes), {})

    return make


@pytest.fixture
def run(resolved):
    return RunFolder.create(resolved())


def test_a_run_begins_in_a_new_or_an_empty_folder(resolved, tmp_path):
    RunFolder.create(resolved(name="deep/new"))
    (tmp_path / "empty").mkdir()
    run = RunFolder.create(resolved(name="empty"))
    assert Resolved.load(run.path / "config.json").config == resolved(name="empty").config


def test_another_run_is_never_overwritten(resolved, run, tmp_path):
    before = (run.path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"already holds another run: give another --output, or --resume"):
        RunFolder.create(resolved(seed=5))
    assert (run.path / "config.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already holds files"):
        RunFolder.create(resolved(name="mine"))


def test_a_place_that_cannot_be_written_is_named(resolved, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"file/run: cannot write: Not a directory"):
        RunFolder.create(resolved(name="file/run"))


def test_resume_needs_a_run(resolved, tmp_path):
    with pytest.raises(ConfigError, match=r"--resume: .*/run holds no run \(no config.json\); start it without"):
        RunFolder.resume(resolved())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.5}, r"has learning_rate = 0.0003, now 0.5 was asked for \(1 keys differ\)"),
        ({"max_steps": 7}, r"has max_steps = 100, now 7"),
        ({"env_args": {"levels": [2]}}, r"has env_args = \{\}, now \{'levels': \[2\]\}"),
        ({"seed": 1, "beta": 0.5}, r"has beta = 0.0, now 0.5 was asked for \(2 keys differ\)"),
        ({"algo": "cispo"}, r"has algo = 'grpo', now 'cispo'"),
    ],
)
def test_resume_with_other_options_names_the_key(resolved, run, changes, message):
    with pytest.raises(ConfigError, match=message):
        RunFolder.resume(resolved(**changes))


def test_resume_lets_what_is_not_learnt_change(resolved, run):
    free = {"save_steps": 1, "save_total_limit": 9, "logging_steps": 3, "torch_threads": 1, "save_trajectories": False}
    free |= {"report_to": ["wandb"], "debug_mode": True, "debug_interval": 3}
    assert RunFolder.resume(resolved(**free)).path == run.path


def test_a_run_has_one_id_and_a_folder_that_was_not_begun_gets_no_file(run, tmp_path):
    assert RunFolder(run.path).run_id == run.run_id == (run.path / "run_id").read_text()
    dry = RunFolder(tmp_path / "dry")
    assert dry.run_id == dry.run_id != run.run_id
    assert not dry.path.exists()


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_are_rewound_to_the_checkpoint(run):
    run.rewind(3)  # nothing there yet
    for step in range(1, 6):
        run.log({"step": step, "reward": step / 10})
    run.rewind(3)
    assert run.read_metrics() == [{"step": step, "reward": step / 10} for step in (1, 2, 3)]
    run.log({"step": 4, "reward": 0.5})
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4]
    run.rewind(0)
    assert run.read_metrics() == []
    assert sorted(path.name for path in run.path.iterdir()) == ["config.json", "metrics.jsonl", "run_id"]


def test_evaluations_before_the_first_step_are_metrics_of_step_0(run):
    run.log({"step": 0, "eval/success": 0.5})
    run.log({"step": 1})
    run.rewind(0)
    assert run.read_metrics() == [{"step": 0, "eval/success": 0.5}]
    run.rewind(-1)
    assert run.read_metrics() == []


def test_samples_are_rewound_with_the_metrics(run):
    run.log_debug([{"step": 1, "why": ["best"]}, {"step": 1, "why": ["worst"]}])
    run.log_debug([{"step": 3, "why": ["best"]}])
    run.rewind(1)
    lines = [json.loads(line) for line in run.debug.read_text().splitlines()]
    assert lines == [{"step": 1, "why": ["best"]}, {"step": 1, "why": ["worst"]}]


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', '{"step": 3}', "\x00\x00"])
def test_a_torn_last_line_is_no_line(run, torn):
    for step in (1, 2):
        run.log({"step": step})
    with run.metrics.open("a") as file:
        file.write(torn)
    assert run.read_metrics() == [{"step": 1}, {"step": 2}]
    run.rewind(2)
    run.log({"step": 3})
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2, 3]


def test_metrics_that_cannot_be_written_are_an_error(run):
    run.metrics.mkdir()
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot write: Is a directory"):
        run.log({"step": 1})


def test_a_record_is_whole_or_absent(run):
    assert json.loads(run.write_json("handoff.json", {"prefix": "grpo"}).read_text()) == {"prefix": "grpo"}
    (run.path / "there").mkdir()
    with pytest.raises(RunError, match=r"there: cannot write"):
        run.write_json("there", {})


def test_a_batch_is_written_anew_when_a_step_breaks_again(run):
    for size in (3, 2):
        file = run.write_nonfinite(12, [{"reward": number} for number in range(size)])
    assert file.name == "nonfinite_step_000012.jsonl"
    assert len(file.read_text().splitlines()) == 2


# --- trajectories and checkpoints -----------------------------------------------------------------------------------


def test_trajectories_of_a_step_are_written_whole_and_again(run, episode):
    for names in (("a", "b"), ("c",)):
        (run.path / "trajectories").mkdir(exist_ok=True)
        (run.path / "trajectories" / "step_000003.partial").write_text('{}\n{"torn')  # a killed writer's
        run.write_trajectories(3, [episode((0, [1]), (1, [2]), name=name) for name in names])
        stored = list(read_trajectories(run.path / "trajectories" / "step_000003.jsonl"))
        assert [t.trajectory_id for t in stored] == list(names)
    assert [path.name for path in (run.path / "trajectories").iterdir()] == ["step_000003.jsonl"]


def test_checkpoints_are_listed_and_pruned_by_step(run):
    assert run.checkpoint_steps() == []
    for step in (900, 5, 1000000, 20):
        run.checkpoint_path(step).mkdir(parents=True)
    (run.checkpoints / ".step_000030.partial").mkdir()
    (run.checkpoints / "notes").mkdir()
    assert run.checkpoint_steps() == [5, 20, 900, 1000000]
    run.prune(None)
    assert run.checkpoint_steps() == [5, 20, 900, 1000000]
    run.prune(2)
    assert run.checkpoint_steps() == [900, 1000000]
    run.prune(5)
    assert run.checkpoint_steps() == [900, 1000000]
