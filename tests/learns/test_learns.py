"""Every algorithm learns the toy, and does not where its loss is 0 or its rewards are dealt out at random.

The best is 1, chance 0.1, and the model that RL starts from is right about four times in ten.
"""

from dataclasses import replace
from math import log
from statistics import fmean
from time import perf_counter

import pytest
import torch

from gymtune.agents import ModelAgent, Renderer, Sampling, rollout
from gymtune.agents.models import load_model
from gymtune.agents.torch_engine import TorchEngine
from gymtune.trainers.presets import PRESETS
from gymtune.trainers.registry import ALGORITHMS

TOY = "gymtune-test/Echo-v0"
FLOOR = 0.85  # of the answers that are right after learning
CEILING = 0.5  # and without it
WIDER = 0.1  # growth of the margin between better and worse replies

pytestmark = pytest.mark.learns


def methods(*quick):
    """Return the methods without a critic; `quick` ones run in `make test`, all in `make test-all`."""
    names = [algo for algo, preset in PRESETS.items() if "scale_rewards" in preset.reads]
    names.remove("opd")  # a teacher, not rewards
    return [pytest.param(algo, marks=() if algo in quick else pytest.mark.slow) for algo in names]


RL = {
    "env": TOY,
    "max_steps": 40,
    "prompts_per_step": 10,
    "num_generations": 8,
    "max_completion_length": 3,
    "learning_rate": 3e-3,
    "save_trajectories": False,
}


def success(folder, greedy=False):
    """Return the share of right answers over the ten tasks, 20 samples of each."""
    sampling = Sampling(temperature=0.0 if greedy else 1.0, max_new_tokens=3)
    agent = ModelAgent(TorchEngine(load_model(folder), max_sequences=200), Renderer.from_folder(folder), sampling)
    return fmean(t.success is True for t in rollout(TOY, agent, 10, num_generations=20, seed=7))


@pytest.fixture
def no_loss(monkeypatch):
    """Make the loss of every token 0, with its graph."""
    for algorithm in {cls for known in ALGORITHMS.values() for cls in known.__mro__ if "loss" in vars(cls)}:
        plain = algorithm.loss

        def zero(self, tokens, plain=plain):
            losses = plain(self, tokens)
            return replace(losses, loss=torch.zeros_like(losses.loss) * losses.loss)

        monkeypatch.setattr(algorithm, "loss", zero)


def sft(run, fresh, echo_files):
    return run(algo="sft", model=str(fresh), data=str(echo_files["right"]), max_steps=60, learning_rate=1e-2)


def test_sft_learns(run, fresh, echo_files, learnt):
    began = perf_counter()
    folder, lines = sft(run, fresh, echo_files)
    learnt("sft", floor=FLOOR, reached=success(folder), seconds=perf_counter() - began)
    assert lines[-1]["loss"] < 0.1 * lines[0]["loss"]
    assert success(folder) >= FLOOR
    assert success(folder, greedy=True) == 1.0


@pytest.mark.usefixtures("no_loss")
def test_sft_without_a_loss_learns_nothing(run, fresh, echo_files, learnt):
    folder, _ = sft(run, fresh, echo_files)
    learnt("sft", without=success(folder))
    assert success(folder) <= CEILING


@pytest.fixture(scope="module")
def teacher(run, fresh, echo_files):
    """A model that is right."""
    return sft(run, fresh, echo_files)[0]


def distill(run, fresh, teacher, echo_files, alpha=0.0, **changes):
    """Learn from a file that is wrong six times in ten, beside a teacher that is right."""
    files = {"model": str(fresh), "teacher_model": str(teacher), "data": str(echo_files["guesses"])}
    return run(algo="distill", max_steps=60, learning_rate=1e-2, distill_alpha=alpha, **files, **changes)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_distillation_learns(run, fresh, teacher, echo_files, kind, learnt):
    """What the teacher would have said, and not what the file says; cross-entropy alone learns the file."""
    began = perf_counter()
    folder, lines = distill(run, fresh, teacher, echo_files, divergence=kind)
    learnt(f"distill ({kind})", floor=FLOOR, reached=success(folder), seconds=perf_counter() - began)
    assert lines[-1]["distill/divergence"] < 0.1 * lines[0]["distill/divergence"]
    assert success(folder) >= FLOOR
    if kind == "forward_kl":
        assert success(distill(run, fresh, teacher, echo_files, alpha=1.0)[0]) <= CEILING


@pytest.mark.usefixtures("no_loss")
def test_distillation_without_a_loss_learns_nothing(run, fresh, teacher, echo_files, learnt):
    folder, _ = distill(run, fresh, teacher, echo_files)
    learnt("distill (forward_kl)", without=success(folder))
    assert success(folder) <= CEILING


@pytest.mark.parametrize("how", ["sampled", "full"])
def test_on_policy_distillation_learns(run, guesser, teacher, how, learnt):
    """From the teacher alone: no reward counts."""
    began = perf_counter()
    folder, lines = run(algo="opd", model=str(guesser), teacher_model=str(teacher), opd_loss=how, **RL)
    learnt(f"opd ({how})", floor=FLOOR, reached=success(folder), seconds=perf_counter() - began)
    assert lines[0]["reward"] <= CEILING
    assert lines[-1]["distill/divergence"] < 0.2 * lines[0]["distill/divergence"]
    assert success(folder) >= FLOOR


@pytest.mark.usefixtures("no_loss")
def test_on_policy_distillation_without_a_loss_learns_nothing(run, guesser, teacher, learnt):
    folder, _ = run(algo="opd", model=str(guesser), teacher_model=str(teacher), **RL)
    learnt("opd (sampled)", without=success(folder))
    assert success(folder) <= CEILING


def reward(run, fresh, opinions):
    """Learn a reward model from pairs; return the lines of metrics, the last with those of pairs that were held out."""
    files = {"data": str(opinions["pairs"]), "eval_data": str(opinions["held_out"]), "eval_steps": 120}
    return run(algo="reward", model=str(fresh), max_steps=120, batch_size=32, learning_rate=3e-3, **files)[1]


def test_a_reward_model_learns(run, fresh, opinions, learnt):
    """It scores the right answer to a question that it did not see above each wrong one."""
    began = perf_counter()
    lines = reward(run, fresh, opinions)
    accuracy = lines[-1]["eval/accuracy"]
    learnt("reward", floor=FLOOR, reached=accuracy, seconds=perf_counter() - began)
    assert lines[0]["loss"] == pytest.approx(log(2), abs=1e-6)
    assert lines[-1]["loss"] < 0.1 * lines[0]["loss"]
    assert accuracy >= FLOOR


@pytest.mark.usefixtures("no_loss")
def test_a_reward_model_without_a_loss_learns_nothing(run, fresh, opinions, learnt):
    lines = reward(run, fresh, opinions)
    learnt("reward", without=lines[-1]["eval/accuracy"])
    assert lines[-1]["eval/accuracy"] <= CEILING


#: What each needs to get from four right in ten to nearly all.
PREFERENCE = {
    "dpo": {"pairs": "all"},
    "ipo": {"pairs": "all"},
    "orpo": {"pairs": "all"},
    "simpo": {"pairs": "all", "simpo_gamma": 5.0},
    "kto": {"beta": 0.3},
}
SAMPLED = [pytest.param(algo, marks=() if algo in ("dpo", "kto") else pytest.mark.slow) for algo in PREFERENCE]


@pytest.mark.parametrize("algo", SAMPLED)
def test_preference_learns_from_what_it_samples(run, guesser, algo, learnt):
    began = perf_counter()
    folder, lines = run(algo=algo, model=str(guesser), **(RL | PREFERENCE[algo]))
    learnt(algo, floor=FLOOR, reached=success(folder), seconds=perf_counter() - began)
    assert lines[0]["reward"] <= CEILING
    assert fmean(line["reward"] for line in lines[-5:]) >= FLOOR
    assert success(folder) >= FLOOR


@pytest.mark.parametrize("algo", SAMPLED)
@pytest.mark.usefixtures("no_loss")
def test_preference_without_a_loss_learns_nothing_of_what_it_samples(run, guesser, algo, learnt):
    folder, _ = run(algo=algo, model=str(guesser), **(RL | PREFERENCE[algo]))
    learnt(algo, without=success(folder))
    assert success(folder) <= CEILING


def prefer(run, guesser, opinions, algo):
    """Learn from a file of pairs, KTO from one of labels; return how the margin grew, and the accuracy held out.

    KTO has no held-out file: a good reply to a task stands in the other one.
    """
    files = {"data": str(opinions["pairs"]), "eval_data": str(opinions["held_out"]), "eval_steps": 40}
    if algo == "kto":
        files = {"data": str(opinions["labels"])}
    _, lines = run(algo=algo, model=str(guesser), max_steps=40, batch_size=32, learning_rate=1e-3, **files)
    where = "rewards" if algo == "kto" else "eval/rewards"
    return lines[-1][f"{where}/margins"] - lines[0]["rewards/margins"], lines[-1].get("eval/rewards/accuracies")


@pytest.mark.parametrize("algo", PREFERENCE)
def test_preference_learns_from_a_file(run, guesser, opinions, algo):
    """Pairs that were held out are told apart. (What is said is not asked: DPO may make better and worse unlikely.)"""
    margin, accuracy = prefer(run, guesser, opinions, algo)
    assert margin > WIDER
    assert accuracy == (None if algo == "kto" else 1.0)


@pytest.mark.parametrize("algo", PREFERENCE)
@pytest.mark.usefixtures("no_loss")
def test_preference_without_a_loss_learns_nothing_from_a_file(run, guesser, opinions, algo):
    assert prefer(run, guesser, opinions, algo)[0] < WIDER


@pytest.mark.parametrize("algo", methods("grpo", "dapo", "rloo"))
def test_rl_learns(run, guesser, algo, learnt):
    began = perf_counter()
    folder, lines = run(algo=algo, model=str(guesser), **RL)
    learnt(algo, floor=FLOOR, reached=success(folder), seconds=perf_counter() - began)
    assert lines[0]["reward"] <= CEILING
    assert fmean(line["reward"] for line in lines[-5:]) >= FLOOR
    assert success(folder) >= FLOOR


@pytest.mark.parametrize("algo", methods("grpo", "dapo", "rloo"))
@pytest.mark.usefixtures("no_loss")
def test_rl_without_a_loss_learns_nothing(run, guesser, algo, learnt):
    folder, lines = run(algo=algo, model=str(guesser), **RL)
    learnt(algo, without=success(folder))
    assert fmean(line["reward"] for line in lines[-5:]) <= CEILING
    assert success(folder) <= CEILING


@pytest.mark.parametrize("algo", methods("grpo"))
def test_rl_with_shuffled_rewards_learns_nothing(run, guesser, algo, learnt):
    folder, lines = run(algo=algo, model=str(guesser), control="shuffle_rewards", **RL)
    learnt(algo, shuffled=success(folder))
    assert fmean(line["reward"] for line in lines[-5:]) <= CEILING
    assert success(folder) <= CEILING
