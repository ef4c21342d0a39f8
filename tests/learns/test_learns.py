"""Every algorithm learns the toy, and does not where its loss is 0 or its rewards are dealt out at random.

The best is 1, chance 0.1, and the model that RL starts from is right about four times in ten.
"""

from dataclasses import replace
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

pytestmark = pytest.mark.learns


def methods(*quick):
    """Return the methods without a critic; `quick` ones run in `make test`, all in `make test-all`."""
    names = [algo for algo, preset in PRESETS.items() if "scale_rewards" in preset.reads]
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
