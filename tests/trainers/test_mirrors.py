"""Mirrors of the metrics: what they are told is what the file says; a package that is missing is named."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gymtune.tools.errors import ConfigError
from gymtune.trainers import TrainConfig, train
from gymtune.trainers.mirrors import MIRRORS, Mirrors

FP32 = 1e-6


@pytest.mark.parametrize("name", MIRRORS)
def test_a_missing_package_is_named_before_anything_is_made(name, settings, monkeypatch):
    monkeypatch.setitem(
        sys.modules, MIRRORS[name].module, None
    )  # what Python itself does for a module that is not there
    config = settings("grpo", report_to=[name])
    with pytest.raises(ConfigError, match=rf"report_to {name}: .*`pip install 'gymtune\[{name}\]'`, or leave it out"):
        train(config)
    assert not Path(config.output_dir).exists()


def test_every_name_of_the_config_has_a_mirror(config):
    wanted = r"'tensorboard', 'wandb' or 'trackio'"
    with pytest.raises(ConfigError, match=wanted):
        config(report_to=["mlflow"])
    assert list(MIRRORS) == ["tensorboard", "wandb", "trackio"]
    assert TrainConfig.model_fields["report_to"].default == []


class Recorder:
    """Stands in for a service: it notes what it is called with."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def note(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return note

    def named(self, name):
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def service(monkeypatch):
    """Put a recorder where a mirror imports its package from."""

    def install(name):
        recorder, module = Recorder(), ModuleType(MIRRORS[name].module)
        module.__getattr__ = lambda attribute: getattr(recorder, attribute)
        monkeypatch.setitem(sys.modules, MIRRORS[name].module, module)
        return recorder

    return install


def lines_of(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def numbers_of(run):
    """Return the lines of metrics as a mirror gets them: the step, and the other numbers."""
    return [(line["step"], {k: float(v) for k, v in line.items() if k != "step"}) for line in lines_of(run)]


@pytest.mark.parametrize("mode", [None, "online"])
def test_wandb_gets_every_line_and_stays_offline_unless_it_is_told(settings, service, monkeypatch, mode):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    recorder = service("wandb")
    config = settings("grpo", max_steps=2, report_to=["wandb"], eval_steps=1, eval_tasks=4)
    train(config)
    ((_, began),) = recorder.named("init")
    assert began["mode"] == (mode or "offline")
    assert began["id"] == (Path(config.output_dir) / "run_id").read_text()
    assert began["config"]["max_steps"] == 2
    assert [(kwargs["step"], args[0]) for args, kwargs in recorder.named("log")] == numbers_of(config.output_dir)
    assert [called for called, *_ in recorder.calls][-1] == "finish"


def test_trackio_gets_every_line(settings, service):
    recorder = service("trackio")
    config = settings("grpo", max_steps=2, report_to=["trackio"])
    train(config)
    assert [(kwargs["step"], args[0]) for args, kwargs in recorder.named("log")] == numbers_of(config.output_dir)
    assert [called for called, *_ in recorder.calls] == ["init", "log", "log", "finish"]


def test_tensorboard_gets_a_point_of_each_curve_and_hides_what_is_made_again(settings, service):
    recorder = service("tensorboard")
    config = settings("grpo", max_steps=2, report_to=["tensorboard"], save_steps=1)
    train(config)
    points = [(args[2], args[0], args[1]) for args, _ in recorder.named("add_scalar")]
    wanted = [(step, name, value) for step, line in numbers_of(config.output_dir) for name, value in line.items()]
    assert points == wanted
    ((_, opened),) = recorder.named("SummaryWriter")
    assert opened == {"log_dir": str(Path(config.output_dir) / "tensorboard"), "purge_step": 1}
    train(config, resume=True)
    assert recorder.named("SummaryWriter")[1][1]["purge_step"] == 3
    assert len(recorder.named("close")) == 2


def test_a_run_that_fails_ends_its_mirrors(trainer, service):
    recorder = service("trackio")
    made = trainer(max_steps=2, report_to=["trackio"])
    made.on_step = lambda line: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.train(Path(made.config.model))
    assert [called for called, *_ in recorder.calls] == ["init", "log", "finish"]


def test_numbers_alone_are_shown(service, trainer):
    recorder = service("trackio")
    made = trainer(report_to=["trackio", "trackio"])
    assert len(made.mirrors.all) == 1
    mirrors = Mirrors(["trackio"])
    mirrors.begin(made.run, made.config, 0)
    mirrors.log({"step": 4, "loss": 1, "note": "text", "nothing": None})
    ((args, kwargs),) = recorder.named("log")
    assert (args, kwargs) == (({"loss": 1.0},), {"step": 4})


def test_the_event_files_of_tensorboard_can_be_read(settings):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settings("grpo", max_steps=2, report_to=["tensorboard"])
    train(config)
    events = EventAccumulator(str(Path(config.output_dir) / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward")]
    assert found == [(line["step"], pytest.approx(line["reward"], abs=FP32)) for line in lines_of(config.output_dir)]
