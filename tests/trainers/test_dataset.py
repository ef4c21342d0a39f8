"""Stored trajectories: which are read, in which order, what is refused."""

from collections import Counter

import pytest

from gymtune.agents import TrajectoryWriter, read_trajectories
from gymtune.tools.errors import DataError
from gymtune.trainers.dataset import TrajectoryDataset


@pytest.fixture
def load(tiny_renderer, tmp_path):
    """Write trajectories to a file and read it as a data set."""

    def make(trajectories, *, min_reward=None, max_length=100, seed=0):
        with TrajectoryWriter(tmp_path / "data.jsonl") as writer:
            for trajectory in trajectories:
                writer.append(trajectory)
        return TrajectoryDataset(
            tmp_path / "data.jsonl", tiny_renderer, min_reward=min_reward, max_length=max_length, seed=seed
        )

    return make


@pytest.fixture
def seven(episode, tiny_renderer):
    return [
        episode((0, [3, 4]), (1, [5]), name=f"t{i}", reward=i / 2, tokenizer=tiny_renderer.fingerprint)
        for i in range(7)
    ]


def names(trajectories):
    return [t.trajectory_id for t in trajectories]


def test_each_epoch_sees_each_once(load, seven):
    data = load(seven)
    stream = [name for step in range(21) for name in names(data.batch(step, 2))]  # 42 places: six epochs
    epochs = [stream[first : first + 7] for first in range(0, 42, 7)]
    assert all(sorted(epoch) == sorted(names(seven)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_the_order_is_a_function_of_seed_and_step(load, seven):
    data = load(seven)
    late = names(data.batch(9, 3))
    for step in (4, 0, 12):
        data.batch(step, 3)
    assert names(data.batch(9, 3)) == late


def test_the_same_seed_reads_the_same_and_another_seed_another_order(load, seven, tmp_path, tiny_renderer):
    first = load(seven, seed=3)
    again, other = (
        TrajectoryDataset(tmp_path / "data.jsonl", tiny_renderer, min_reward=None, max_length=100, seed=seed)
        for seed in (3, 4)
    )
    assert names(first.batch(0, 7)) == names(again.batch(0, 7)) != names(other.batch(0, 7))


def test_a_batch_may_be_larger_than_the_data(load, seven):
    assert Counter(names(load(seven).batch(0, 14))) == dict.fromkeys(names(seven), 2)


def test_min_reward_leaves_out_what_earned_less_or_is_not_known(load, seven):
    seven[6].rewards = {"gt": None}  # broken: no reward
    data = load(seven, min_reward=1.0)
    assert names(data.items) == ["t2", "t3", "t4", "t5"]
    assert data.left_out == 3


def test_without_min_reward_only_failures_are_left_out(load, seven, episode, tiny_renderer):
    seven[0].error = "Traceback"
    silent = episode((0, [3, 4]), name="silent", tokenizer=tiny_renderer.fingerprint)
    data = load([*seven, silent])
    assert names(data.items) == names(seven)[1:]
    assert data.left_out == 2


def test_the_longest_that_fits(load, seven, episode, tiny_renderer):
    long = episode((0, [3] * 9), (1, [5]), name="long", tokenizer=tiny_renderer.fingerprint)
    assert len(load([*seven, long], max_length=10).items) == 8


def test_too_long_is_named(load, seven, episode, tiny_renderer):
    long = episode((0, [3] * 10), (1, [5]), name="long", tokenizer=tiny_renderer.fingerprint)
    with pytest.raises(DataError, match=r"data.jsonl: trajectory long has 11 tokens, the model takes 10"):
        load([*seven, long], max_length=10)


def test_segments_are_measured_one_by_one(load, episode, tiny_renderer):
    two = episode((0, [3] * 5), (1, [5]), "segment", (0, [3] * 5), (1, [5]), tokenizer=tiny_renderer.fingerprint)
    assert len(load([two], max_length=6).items) == 1


def test_nothing_to_learn_from(load, seven):
    with pytest.raises(DataError, match=r"no trajectory to learn from \(7 left out: failed, less reward"):
        load(seven, min_reward=100.0)


def test_messages_without_tokens_are_rendered(sums_file, tiny_renderer):
    stored = next(read_trajectories(sums_file))
    assert stored.tokens == []
    data = TrajectoryDataset(sums_file, tiny_renderer, min_reward=1.0, max_length=100, seed=0)
    assert len(data.items) == 400
    first = data.items[0]
    answer = [t for t, mask in zip(first.tokens, first.response_mask, strict=True) if mask]
    assert tiny_renderer.decode(answer) == stored.gt
    assert answer[-1] in tiny_renderer.stop_ids
