"""Returns and what is taken off them, by hand."""

import math

import pytest

from gymtune.tools.errors import DataError, EnvError, RunError
from gymtune.trainers.experience import Experience
from gymtune.trainers.penalties import overlong_penalty, token_kl, token_penalties, turn_penalties
from gymtune.trainers.returns import episode_return, token_returns, turn_returns

FP64 = 1e-12  # two float64 ways to the same number
KL = {"beta": 0.5, "kl_in": "reward", "kl_estimator": "k1"}


@pytest.fixture
def walk(episode):
    """Three turns of 2, 1 and 3 tokens that earn 1, -2 and 4; the KL (k1) of the tokens is 0.1, 0.2, ... 0.6."""
    trajectory = episode((0, [3]), (1, [5, 6]), (0, [4]), (1, [7]), (0, [4]), (1, [8, 9, 0]))
    for turn, reward in zip(trajectory.turns, (1.0, -2.0, 4.0), strict=True):
        turn.reward = reward
    experience = Experience.of(trajectory, need_logprobs=True)
    experience.ref_logprobs = [old - 0.1 * (i + 1) for i, old in enumerate(experience.old_logprobs)]
    return experience


def test_without_penalties_returns_are_what_was_earned(walk, config):
    assert episode_return(walk, config()) == 3.0
    assert turn_returns(walk, config()) == [3.0, 2.0, 4.0]
    assert token_returns(walk, config()) == [3.0] * 6
    assert token_returns(walk, config(credit="turn")) == [3.0, 3.0, 2.0, 4.0, 4.0, 4.0]


def test_the_kl_in_the_reward_by_hand(walk, config):
    settings = config(**KL)
    assert token_penalties(walk, settings) == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25, 0.3], rel=FP64)
    assert episode_return(walk, settings) == pytest.approx(3 - 1.05, rel=FP64)
    # turns lose 0.15, 0.15, 0.75
    assert turn_returns(walk, settings) == pytest.approx([3 - 1.05, 2 - 0.9, 4 - 0.75], rel=FP64)
    to_come = [1.05, 1.0, 0.9, 0.75, 0.55, 0.3]
    assert token_returns(walk, settings) == pytest.approx([3 - kl for kl in to_come], rel=FP64)
    earned = [3, 3, 2, 4, 4, 4]
    by_turn = [reward - kl for reward, kl in zip(earned, to_come, strict=True)]
    assert token_returns(walk, config(credit="turn", **KL)) == pytest.approx(by_turn, rel=FP64)
    assert walk.reward == walk.trajectory.reward == 3.0  # what was earned stays


@pytest.mark.parametrize(("how", "value"), [("k1", 0.3), ("k2", 0.3**2 / 2), ("k3", math.exp(-0.3) + 0.3 - 1)])
def test_the_kl_is_told_by_the_estimator_that_is_named(walk, config, how, value):
    assert token_kl(walk, config(**(KL | {"kl_estimator": how})))[2] == pytest.approx(value, rel=FP64)


def test_the_kl_in_the_loss_takes_nothing_off(walk, config):
    assert episode_return(walk, config(beta=0.5)) == 3.0
    assert token_penalties(walk, config(beta=0.5)) == [0.0] * 6


@pytest.mark.parametrize(
    ("length", "taken"), [(0, 0.0), (6, 0.0), (7, 0.25), (8, 0.5), (9, 0.75), (10, 1.0), (30, 1.0)]
)
def test_overlong_turns_by_hand(length, taken):
    assert overlong_penalty(length, longest=10, buffer=4) == taken


def test_each_turn_is_judged_by_its_own_length(walk, config):
    settings = config(overlong_buffer=2, max_completion_length=3)  # 2 tokens: a half, 1: nothing, 3: all
    assert turn_penalties(walk.trajectory, settings) == [0.5, 0.0, 1.0]
    assert episode_return(walk, settings) == 1.5
    assert turn_returns(walk, settings) == [1.5, 1.0, 3.0]
    assert token_returns(walk, settings) == [1.5] * 6
    assert turn_penalties(walk.trajectory, config()) == [0.0] * 3


def test_without_a_reward_there_is_no_return(walk, config):
    walk.reward = None
    assert episode_return(walk, config()) is None
    assert turn_returns(walk, config()) == token_returns(walk, config()) == []


def test_a_control_run_s_reward_is_the_episode_s(walk, config):
    walk.reward = 9.0
    assert episode_return(walk, config(control="shuffle_rewards")) == 9.0
    assert token_returns(walk, config(control="shuffle_rewards")) == [9.0] * 6


def test_what_is_missing_is_named(walk, episode, config):
    walk.ref_logprobs = []
    with pytest.raises(RunError, match="t0: the KL needs the reference's log-probs of its 6 tokens, came 0"):
        episode_return(walk, config(**KL))
    loose = episode((0, [3]), (1, [5, 6]))
    loose.turns.clear()
    with pytest.raises(DataError, match="t0: token 1 has mask 1 and lies in no turn"):
        turn_returns(Experience.of(loose, need_logprobs=True), config())


@pytest.mark.parametrize("reward", [math.nan, math.inf])
@pytest.mark.parametrize("of", [episode_return, turn_returns, token_returns])
def test_a_reward_that_is_not_finite_is_named(episode, config, reward, of):
    experience = Experience.of(episode((0, [3]), (1, [5]), reward=reward), need_logprobs=True)
    with pytest.raises(EnvError, match=f"trajectory t0 has the reward {reward}: wanted a finite number"):
        of(experience, config())
