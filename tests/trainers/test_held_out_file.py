"""Evaluation on a held-out file: what it measures, that it changes nothing, and which model it keeps."""

import json
import math
from pathlib import Path

import pytest

from gymtune.agents.models import load_model
from gymtune.tools.errors import ConfigError, DataError, RunError
from gymtune.trainers import Listeners, TrainConfig, train
from gymtune.trainers.evaluation import keep_best
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.held_out_file import HeldOutFile
from gymtune.trainers.preflight import preflight
from gymtune.trainers.preflight_data import file_dataset
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.run_folder import RunFolder
from gymtune.trainers.update import Updater

FP32 = 1e-5  # float32 sums in another order
PAIRS = [
    {"prompt": f"What is {n} + {n}?", "chosen": str(2 * n * 10 ** (n % 4)), "rejected": "7 " * (1 + n % 3)}
    for n in range(10, 34)
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(taught_model, tmp_path):
    """Make a config that learns from 16 pairs and holds out 8."""

    def make(algo="dpo", name="run", **changes):
        base = {
            "model": str(taught_model), "output_dir": str(tmp_path / name), "batch_size": 4, "max_steps": 6,
            "learning_rate": 3e-4, "eval_steps": 2, "save_steps": 1, "save_total_limit": 9,
            "data": write(tmp_path / "train.jsonl", PAIRS[:16]),
            "eval_data": write(tmp_path / "held.jsonl", PAIRS[16:]),
        }  # fmt: skip
        given = {key: value for key, value in (base | changes).items() if value is not None}
        return TrainConfig(algo=algo, **given)

    return make


def lines_of(config):
    lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


# -- what it measures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_tokens", [1, 4096])
def test_the_loss_of_sft_is_the_mean_over_all_held_out_tokens(config, tiny_renderer, taught_model, micro_batch_tokens):
    """Replies differ in length, so the mean over batches would be another number."""
    settings = config("sft", micro_batch_tokens=micro_batch_tokens)
    data = file_dataset(settings, settings.eval_data, tiny_renderer, 512)
    model = load_model(taught_model)
    algorithm = ALGORITHMS["sft"](settings)
    updater = Updater(model, algorithm, settings)

    def credit(trajectories):
        found = experiences_of(trajectories, need_logprobs=False)
        updater.annotate(found)
        algorithm.credit(found)
        return found

    found = HeldOutFile(data.everything(), credit, updater).evaluate()
    each = [
        (HeldOutFile([one], credit, updater).evaluate()["eval/loss"], one.sampled_tokens) for one in data.everything()
    ]
    assert len({count for _, count in each}) > 1
    wanted = math.fsum(loss * count for loss, count in each) / sum(count for _, count in each)
    assert found["eval/loss"] == pytest.approx(wanted, rel=FP32)
    assert found["time/eval"] > 0
    assert set(found) == {"eval/loss", "eval/entropy", "time/eval"}


def test_margins_are_0_before_the_first_step_and_the_pairs_of_the_file_are_told_apart_later(config):
    settings = config(max_steps=12, learning_rate=2e-3, eval_steps=4)
    train(settings)
    lines = lines_of(settings)
    evaluated = {step: line for step, line in lines.items() if "eval/loss" in line}
    assert list(evaluated) == [0, 4, 8, 12]
    assert evaluated[0]["eval/loss"] == pytest.approx(math.log(2), abs=FP32)
    assert evaluated[0]["eval/rewards/margins"] == pytest.approx(0, abs=FP32)
    assert evaluated[12]["eval/rewards/margins"] > 0.1
    assert evaluated[12]["eval/rewards/accuracies"] > evaluated[0]["eval/rewards/accuracies"]
    assert set(lines[0]) == {"step"} | {name for name in evaluated[12] if name.startswith("eval/")} | {"time/eval"}


@pytest.mark.parametrize("algo", ["sft", "dpo", "ipo", "orpo", "simpo", "kto"])
def test_an_evaluation_changes_nothing_of_the_training(config, algo):
    plain, tried = config(algo, "plain", eval_steps=None, eval_data=None), config(algo, "tried", eval_steps=1)
    folders = [train(one) for one in (plain, tried)]
    assert (folders[0] / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()
    assert all("eval/loss" in line for line in lines_of(tried).values())
    assert not any("eval/loss" in line for line in lines_of(plain).values())


def test_a_loss_that_is_no_number_stops_the_run():
    class Judge:
        def evaluate(self, experiences):
            return {"loss": math.nan}

    with pytest.raises(RunError, match="the loss on the held-out file is nan"):
        HeldOutFile([], lambda _: [], Judge()).evaluate()


# -- the best model ----------------------------------------------------------------------------------------------------


def offer(run, step, **metrics):
    named = {f"eval/{name.replace('__', '/')}": value for name, value in metrics.items()}
    return keep_best(run, {"step": step} | named, lambda folder: (folder / "model").write_text(f"step {step}"))


def test_the_most_pairs_told_right_are_kept_of_equals_the_lowest_loss_then_the_earlier(tmp_path):
    run = RunFolder(tmp_path)
    seen = [(0.2, 1.0), (0.6, 9.0), (0.5, 0.5), (0.6, 8.0), (0.6, 8.0)]
    assert [offer(run, step, rewards__accuracies=share, loss=cost) for step, (share, cost) in enumerate(seen)] == [
        1,
        1,
        0,
        1,
        0,
    ]
    assert run.read_best() == {"step": 3, "by": "eval/rewards/accuracies", "value": 0.6, "loss": 8.0}
    assert (run.best / "model").read_text() == "step 3"


def test_a_reward_model_is_judged_by_its_accuracy(tmp_path):
    run = RunFolder(tmp_path)
    assert [offer(run, step, accuracy=share, loss=1.0) for step, share in enumerate([0.5, 0.4, 0.9])] == [1, 0, 1]
    assert run.read_best() == {"step": 2, "by": "eval/accuracy", "value": 0.9, "loss": 1.0}


def test_without_pairs_the_lowest_loss_is_kept(tmp_path):
    run = RunFolder(tmp_path)
    assert [offer(run, step, loss=loss) for step, loss in enumerate([3.0, 1.0, 2.0, 1.0])] == [1, 1, 0, 0]
    assert run.read_best() == {"step": 1, "by": "eval/loss", "value": 1.0, "loss": 1.0}


def test_a_run_keeps_the_model_of_its_best_evaluation(config):
    settings = config("sft", learning_rate=3e-2)  # so high that it gets worse and better
    train(settings)
    losses = {step: line["eval/loss"] for step, line in lines_of(settings).items() if "eval/loss" in line}
    best = min(losses, key=losses.get)
    run = RunFolder(Path(settings.output_dir))
    assert run.read_best() == {"step": best, "by": "eval/loss", "value": losses[best], "loss": losses[best]}
    source = run.checkpoint_path(best) if best else Path(settings.model)
    assert (run.best / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_resumed_run_ends_with_the_same_best(config, monkeypatch):
    whole, cut = config("sft", "whole"), config("sft", "cut")
    train(whole)

    def stop(metrics):
        if metrics["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(cut, listeners=Listeners(on_step=stop))
    train(cut, resume=True)
    assert RunFolder(Path(cut.output_dir)).read_best() == RunFolder(Path(whole.output_dir)).read_best()
    files = [Path(one.output_dir) / "best" / "model.safetensors" for one in (whole, cut)]
    assert files[0].read_bytes() == files[1].read_bytes()


# -- looked at before --------------------------------------------------------------------------------------------------


def wrong(found):
    return {finding.what: finding.came for finding in found.findings if finding.verdict == "wrong"}


def said(found, what):
    return next(finding.came for finding in found.findings if finding.what == what)


def test_both_files_are_looked_at(config):
    found = preflight(config())
    assert wrong(found) == {}
    assert (said(found, "data"), said(found, "eval_data")) == ("16 pairs", "8 pairs")
    assert said(found, "held out").startswith("no reply of ")
    assert len(found.held_out.everything()) == 16


def test_a_held_out_record_that_is_trained_on_is_refused_with_both_lines(config, tmp_path):
    held = write(tmp_path / "other.jsonl", [PAIRS[20], PAIRS[3], PAIRS[21], PAIRS[9] | {"rejected": "another"}])
    found = preflight(config(eval_data=held))
    assert wrong(found)["held out"].endswith(
        f"other.jsonl: 2 held-out records are trained on: line 2 is line 4 of {tmp_path / 'train.jsonl'}, "
        f"line 4 is line 10 of {tmp_path / 'train.jsonl'}"
    )
    with pytest.raises(DataError, match="2 held-out records are trained on"):
        train(config(eval_data=held))
    other = [PAIRS[3] | {"chosen": "otherwise", "rejected": "never"}]  # the prompt is known, the replies are not
    assert wrong(preflight(config(eval_data=write(tmp_path / "new.jsonl", other)))) == {}


def test_faults_of_both_files_are_told(config, tmp_path):
    empty = write(tmp_path / "a.jsonl", [PAIRS[0] | {"chosen": ""}])
    found = preflight(config(data=empty, eval_data=write(tmp_path / "b.jsonl", [{"prompt": "q"}])))
    assert "line 1: chosen: wanted an answer" in wrong(found)["data"]
    assert "wanted pairs of a better and a worse reply, this file has prompts" in wrong(found)["eval_data"]
    with pytest.raises(ConfigError, match="2 things are wrong"):
        found.refuse()
