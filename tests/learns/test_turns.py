"""PPO learns three turns that are each paid, and its critic learns to tell what is still to come."""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from time import perf_counter

import pytest
import torch

from gymtune.trainers import ppo

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

from ppo_turns import PPO, make_guesser  # noqa: E402 - the script beside the package is not on the path before

FLOOR = 0.85  # of the turns that are right after learning
CEILING = 0.5  # and without it
EXPLAINED = 0.5  # of the returns' variance, by the critic
STILL_EXPLAINED = 0.1  # where the policy goes on guessing: how many turns are left, which no guess changes

pytestmark = pytest.mark.learns


@pytest.fixture(scope="module")
def turns_guesser(tmp_path_factory):
    return make_guesser(tmp_path_factory.mktemp("turns"))


@pytest.fixture
def no_loss(monkeypatch):
    """Make the policy's loss of every token 0, with its graph; the critic's stays."""
    plain = ppo.PPO.loss

    def zero(self, tokens):
        losses = plain(self, tokens)
        return replace(losses, loss=torch.zeros_like(losses.loss) * losses.loss)

    monkeypatch.setattr(ppo.PPO, "loss", zero)


def last(lines, name):
    return fmean(line[name] for line in lines[-5:])


def test_ppo_learns(run, turns_guesser, learnt):
    began = perf_counter()
    folder, lines = run(model=str(turns_guesser), **PPO)
    learnt("ppo (turns right)", floor=FLOOR, reached=last(lines, "reward"), seconds=perf_counter() - began)
    assert folder.name == "ppo_actor"
    assert lines[0]["reward"] <= CEILING
    assert last(lines, "reward") >= FLOOR
    assert lines[0]["val/explained_variance"] == pytest.approx(0, abs=1e-9)  # all values are 0
    assert max(line["val/explained_variance"] for line in lines) >= EXPLAINED


@pytest.mark.usefixtures("no_loss")
def test_ppo_without_a_loss_learns_nothing(run, turns_guesser, learnt):
    _, lines = run(model=str(turns_guesser), **PPO)
    learnt("ppo (turns right)", without=last(lines, "reward"))
    assert last(lines, "reward") <= CEILING
    assert last(lines, "val/explained_variance") >= STILL_EXPLAINED


@pytest.mark.slow
def test_ppo_with_shuffled_rewards_learns_nothing(run, turns_guesser):
    _, lines = run(model=str(turns_guesser), control="shuffle_rewards", **PPO)
    assert last(lines, "reward") <= CEILING
