"""Advantages by hand, against a slow reference, and where floating point or a broken checker would spoil them."""

import math
import random
import statistics
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gymtune.tools.errors import EnvError
from gymtune.trainers.advantages import GroupStats, group_advantages, group_stats, whiten

FP32 = 1e-6  # relative error of a value computed in float64 and rounded to float32
FP64 = 1e-12  # two float64 ways to the same number

EPISODES = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(-10, 10), st.sampled_from([0.0, 0.1, 1.0])), st.integers(0, 3)),
    max_size=24,
)


def reference(rewards, groups, scale, eps, leave_one_out=False, min_size=2):
    out = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and i != index]
        others = [r for r in others if r is not None]
        if reward is None or len(others) + 1 < min_size or set(others) <= {reward}:
            out.append(0.0)
            continue
        known = [*others, reward]
        baseline = statistics.mean(others if leave_one_out else known)
        out.append(reward - baseline)
        if scale == "group":
            out[-1] /= statistics.stdev([known_advantage(r, known, leave_one_out) for r in known]) + eps
    if scale == "batch":
        spread = [r for r in rewards if r is not None]
        if leave_one_out:
            sizes = Counter(g for r, g in zip(rewards, groups, strict=True) if r is not None)
            fit = [r is not None and sizes[g] >= min_size for r, g in zip(rewards, groups, strict=True)]
            spread = [a for a, counts in zip(out, fit, strict=True) if counts]
        out = [a / (statistics.stdev(spread) + eps) if a else 0.0 for a in out]
    return out


def known_advantage(reward, known, leave_one_out):
    others = list(known)
    if leave_one_out:
        others.remove(reward)
    return reward - statistics.mean(others)


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


def test_scale_batch_by_hand():
    # group means 2 and 5; all of 1 3 1 9: mean 14/4, squares 6.25 + 0.25 + 6.25 + 30.25 = 43, over 3
    deviation = math.sqrt(43 / 3)
    advantages = group_advantages([1.0, 1.0, 3.0, 9.0], ["a", "b", "a", "b"], scale="batch", eps=0.0)
    assert advantages.tolist() == pytest.approx([x / deviation for x in (-1, -4, 1, 4)], rel=FP32)


def test_leave_one_out_by_hand():
    # against the mean of the two others: 0 - 3, 2 - 2, 4 - 1; the broken one is nobody's other
    advantages = group_advantages([0.0, 2.0, None, 4.0], [0] * 4, scale="none", leave_one_out=True)
    assert advantages.tolist() == [-3.0, 0.0, 0.0, 3.0]
    # scaled by the batch, it is the deviation of the advantages (-3 0 3: 9 + 9 over 2), not of the rewards (2)
    scaled = group_advantages([0.0, 2.0, None, 4.0], [0] * 4, scale="batch", leave_one_out=True, eps=0.0)
    assert scaled.tolist() == [-1.0, 0.0, 0.0, 1.0]


def test_leave_one_out_over_the_deviation_of_its_group_is_grpo():
    rewards, groups = [0.5, 2.0, -1.0, 3.0, 7.0], [0, 0, 0, 1, 1]
    plain, others = (group_advantages(rewards, groups, leave_one_out=way, eps=0.0) for way in (False, True))
    assert others.tolist() == pytest.approx(plain.tolist(), rel=FP32)


def test_a_group_below_the_minimum_teaches_nothing():
    rewards, groups = [0.0, 1.0, 0.0, 1.0, None], [0, 0, 1, 1, 1]
    assert group_advantages([0.0, 1.0, 5.0], [0, 0, 0], scale="none", min_size=3).tolist() == [-2.0, -1.0, 3.0]
    assert group_advantages(rewards, groups, min_size=3).tolist() == [0.0] * 5


def test_whitening_by_hand():
    # 1 2 3 6: mean 3, squares 4 + 1 + 0 + 9 over 3
    deviation = math.sqrt(14 / 3)
    assert whiten([[1.0, 2.0], [], [3.0, 6.0]], eps=0.0) == [
        pytest.approx([-2 / deviation, -1 / deviation], rel=FP64),
        [],
        pytest.approx([0.0, 3 / deviation], rel=FP64),
    ]
    assert whiten([[0.1 + 0.2] * 3, [0.1 + 0.2] * 7]) == [[0.0] * 3, [0.0] * 7]
    assert whiten([[5.0], []]) == [[0.0], []]


@given(EPISODES, st.sampled_from(["group", "batch", "none"]), st.booleans(), st.sampled_from([2, 3]))
def test_equals_slow_reference(episodes, scale, leave_one_out, min_size):
    rewards, groups = [r for r, _ in episodes], [g for _, g in episodes]
    ways = {"scale": scale, "leave_one_out": leave_one_out, "min_size": min_size}
    expected = reference(rewards, groups, eps=1e-4, **ways)
    assert group_advantages(rewards, groups, **ways).tolist() == pytest.approx(expected, rel=FP32, abs=FP64)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 0.1, 0.1 + 0.2, 1 / 3, 1e-300, 1e12 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 10, 64])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_give_exactly_zero(value, size, scale, leave_one_out):
    # beside a group that teaches: the deviation of the batch is not 0
    rewards, groups = [*[value] * size, 0.0, 1.0], [*[0] * size, 1, 1]
    advantages = group_advantages(rewards, groups, scale=scale, leave_one_out=leave_one_out, eps=0.0)
    assert torch.equal(advantages[:size], torch.zeros(size))
    alone = group_advantages([value] * size, [0] * size, scale=scale, leave_one_out=leave_one_out, eps=0.0)
    assert torch.equal(alone, torch.zeros(size))


def test_none_is_no_reward():
    # Counted as 0 it would move the mean from 2 to 4/3; known: mean 2, std sqrt 2.
    advantages = group_advantages([1.0, None, 3.0], [0, 0, 0], eps=0.0)
    half = 1 / math.sqrt(2)
    assert advantages.tolist() == pytest.approx([-half, 0.0, half], rel=FP32)
    assert advantages[1] == 0.0


@pytest.mark.parametrize("rewards", [[1.0], [1.0, None], [None, None], [None], []])
def test_fewer_than_two_known_rewards_give_zero(rewards):
    assert torch.equal(group_advantages(rewards, [0] * len(rewards)), torch.zeros(len(rewards)))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_order_of_episodes_changes_no_bit(scale):
    rng = random.Random(0)
    # of sizes so far apart that a plain sum depends on its order
    episodes = [(rng.choice([-1e16, 1e16, 1.0, 0.1]), rng.randrange(3)) for _ in range(60)]
    plain = group_advantages(*zip(*episodes, strict=True), scale=scale)
    order = rng.sample(range(60), 60)
    shuffled = group_advantages(*zip(*(episodes[i] for i in order), strict=True), scale=scale)
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
