"""Advantages by hand, against a slow reference, and where floating point or a broken checker would spoil them."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gymtune.tools.errors import EnvError
from gymtune.trainers.advantages import GroupStats, group_advantages, group_stats

FP32 = 1e-6  # relative error of a value computed in float64 and rounded to float32
FP64 = 1e-12  # two float64 ways to the same number

EPISODES = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(-10, 10), st.sampled_from([0.0, 0.1, 1.0])), st.integers(0, 3)),
    max_size=24,
)


def reference(rewards, groups, scale, eps):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        known = [r for r, g in zip(rewards, groups, strict=True) if g == group and r is not None]
        if reward is None or len(known) < 2 or len(set(known)) == 1:
            out.append(0.0)
        else:
            divisor = statistics.stdev(known) + eps if scale == "group" else 1.0
            out.append((reward - statistics.mean(known)) / divisor)
    return out


def test_two_groups_of_different_variance_by_hand():
    # group a: mean 2, deviations -2, 0, 2, unbiased variance (4 + 0 + 4) / 2 = 4, std 2
    # group b: mean 15, deviations -5, 5, unbiased variance 50 / 1, std 5 sqrt 2 (biased: 5; of the batch: others)
    advantages = group_advantages([0.0, 10.0, 2.0, 20.0, 4.0], ["a", "b", "a", "b", "a"], eps=0.0)
    half = 1 / math.sqrt(2)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([-1.0, -half, 0.0, half, 1.0], rel=FP32)


def test_default_epsilon_is_that_of_trl():
    # mean 1/2, std sqrt((1/4 + 1/4) / 1) = sqrt(1/2)
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert group_advantages([0.0, 1.0], [7, 7]).tolist() == pytest.approx([-expected, expected], rel=FP32)


def test_scale_none_only_centres():
    assert group_advantages([0.0, 3.0, 3.0], [0, 0, 0], scale="none").tolist() == [-2.0, 1.0, 1.0]


@given(EPISODES, st.sampled_from(["group", "none"]))
def test_equals_slow_reference(episodes, scale):
    rewards, groups = [r for r, _ in episodes], [g for _, g in episodes]
    expected = reference(rewards, groups, scale, 1e-4)
    assert group_advantages(rewards, groups, scale=scale).tolist() == pytest.approx(expected, rel=FP32, abs=FP64)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 0.1, 0.1 + 0.2, 1 / 3, 1e-300, 1e12 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 10, 64])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_equal_rewards_give_exactly_zero(value, size, scale):
    advantages = group_advantages([value] * size, [0] * size, scale=scale, eps=0.0)
    assert torch.equal(advantages, torch.zeros(size))


def test_none_is_no_reward():
    # Counted as 0 it would move the mean from 2 to 4/3; known: mean 2, std sqrt 2.
    advantages = group_advantages([1.0, None, 3.0], [0, 0, 0], eps=0.0)
    half = 1 / math.sqrt(2)
    assert advantages.tolist() == pytest.approx([-half, 0.0, half], rel=FP32)
    assert advantages[1] == 0.0


@pytest.mark.parametrize("rewards", [[1.0], [1.0, None], [None, None], [None], []])
def test_fewer_than_two_known_rewards_give_zero(rewards):
    assert torch.equal(group_advantages(rewards, [0] * len(rewards)), torch.zeros(len(rewards)))


def test_order_of_episodes_changes_no_bit():
    rng = random.Random(0)
    # of sizes so far apart that a plain sum depends on its order
    episodes = [(rng.choice([-1e16, 1e16, 1.0, 0.1]), rng.randrange(3)) for _ in range(60)]
    plain = group_advantages(*zip(*episodes, strict=True), scale="none")
    order = rng.sample(range(60), 60)
    shuffled = group_advantages(*zip(*(episodes[i] for i in order), strict=True), scale="none")
    assert torch.equal(shuffled, plain[torch.tensor(order)])


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_reward_that_is_not_finite_is_named(reward):
    with pytest.raises(EnvError, match="episode 1 of group 'g' has the reward"):
        group_advantages([0.0, reward], ["g", "g"])


def test_stats_by_hand():
    # a: std sqrt 2; b: equal, 0; c: one known, no std, teaches nothing; d: none known. Mean of 1 3 5 5 7 is 21/5.
    rewards = [1.0, 3.0, 5.0, 5.0, 7.0, None, None]
    stats = group_stats(rewards, list("aabbccd"))
    assert stats.reward == pytest.approx(4.2, rel=FP64)
    assert stats.reward_std == pytest.approx(math.sqrt(2) / 2, rel=FP64)
    assert stats.frac_reward_zero_std == 3 / 4


def test_stats_of_equal_rewards_are_exactly_zero():
    assert group_stats([0.1 + 0.2] * 3, [0] * 3) == GroupStats(
        pytest.approx(0.3, rel=FP64), reward_std=0.0, frac_reward_zero_std=1.0
    )


def test_stats_of_nothing_are_none():
    assert group_stats([], []) == GroupStats(None, None, None)
    assert group_stats([None], [0]) == GroupStats(None, None, 1.0)
