"""Stored trajectories: which are read, in which order, what is refused."""

from collections import Counter

import pytest

from gymtune.agents import Sampling, TrajectoryWriter, read_trajectories
from gymtune.tools.errors import DataError
from gymtune.trainers.dataset import GroupDataset, TrajectoryDataset


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


def test_all_that_are_too_long_are_named(load, seven, episode, tiny_renderer):
    long = [
        episode((0, [3] * (10 + i)), (1, [5]), name=f"long{i}", tokenizer=tiny_renderer.fingerprint) for i in range(12)
    ]
    with pytest.raises(DataError) as caught:
        load([*seven, *long], max_length=10)
    named = ", ".join(f"long{i} has {11 + i} tokens" for i in range(10))
    assert str(caught.value).endswith(f"data.jsonl: trajectory {named}, and 2 more; the model takes 10")


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


# -- groups of sampled episodes ----------------------------------------------------------------------------------------


@pytest.fixture
def sampled(episode, tiny_renderer):
    """Make an episode of a group; names are group and number."""

    def make(group, number=0, **fields):
        fields = {"name": f"{group}/{number}", "reward": float(number)} | fields
        return episode((0, [3, 4]), (1, [5]), group=group, **({"tokenizer": tiny_renderer.fingerprint} | fields))

    return make


@pytest.fixture
def load_groups(tiny_renderer, tmp_path):
    """Write trajectories to a file and read it as groups."""

    def make(trajectories, *, min_group_size=2, max_length=100, seed=0):
        (tmp_path / "groups.jsonl").unlink(missing_ok=True)
        with TrajectoryWriter(tmp_path / "groups.jsonl") as writer:
            for trajectory in trajectories:
                writer.append(trajectory)
        return GroupDataset(
            tmp_path / "groups.jsonl", tiny_renderer, min_group_size=min_group_size, max_length=max_length, seed=seed
        )

    return make


def groups_of(trajectories):
    return list(dict.fromkeys(t.group_id for t in trajectories))


def test_groups_stay_together_and_each_epoch_sees_each_once(load_groups, sampled):
    data = load_groups([sampled(f"g{g}", n) for n in range(3) for g in range(6)])  # written sample by sample
    assert all(len(group) == 3 for group in data.groups)
    epochs = [[groups_of(data.batch(step, 2)) for step in range(first, first + 3)] for first in (0, 3, 6)]
    for epoch in epochs:
        assert sorted(name for step in epoch for name in step) == [f"g{g}" for g in range(6)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert names(data.batch(0, 1)) == [f"{epochs[0][0][0]}/{n}" for n in range(3)]


def test_the_order_of_groups_is_a_function_of_seed_and_step(load_groups, sampled):
    episodes = [sampled(f"g{g}", n) for g in range(7) for n in range(2)]
    data, other = load_groups(episodes), load_groups(episodes, seed=1)
    late = names(data.batch(9, 3))
    data.batch(4, 3)
    assert names(data.batch(9, 3)) == late
    assert [names(data.batch(step, 3)) for step in range(4)] != [names(other.batch(step, 3)) for step in range(4)]


@pytest.mark.parametrize("size", [3, 5, 99])
def test_no_group_comes_twice_in_a_step(load_groups, sampled, size):
    """A baseline over a group that is there twice would be another baseline."""
    data = load_groups([sampled(f"g{g}", n) for g in range(7) for n in range(2)])
    for step in range(20):
        batch = data.batch(step, size)
        assert len(set(names(batch))) == len(batch) == 2 * min(size, 7)


def test_what_has_no_reward_is_left_out_and_so_are_groups_that_are_too_small_then(load_groups, sampled):
    failed = sampled("g0", 1)
    failed.error = "Traceback"
    broken = sampled("g1", 2)
    broken.rewards = {"gt": None}
    data = load_groups([sampled("g0"), failed, sampled("g1"), sampled("g1", 1), broken, sampled("g2", 3)])
    assert [names(group) for group in data.groups] == [["g1/0", "g1/1"]]
    assert data.left_out == 2
    assert data.notes == [
        "2 episodes are left out: they failed, have no reward, or said nothing",
        "2 groups are left out: too few episodes to compare",
    ]
    alone = load_groups([sampled("g0"), failed, sampled("g1")], min_group_size=1)
    assert len(alone.groups) == 2


def test_no_group_to_learn_from(load_groups, sampled):
    with pytest.raises(DataError, match=r"wanted 2 episodes or more of one group_id .* came 3 smaller groups, and 0"):
        load_groups([sampled(f"g{g}") for g in range(3)])


def test_a_trajectory_that_stands_there_twice(load_groups, sampled):
    with pytest.raises(DataError, match=r"groups.jsonl: trajectory g0/0 stands there twice"):
        load_groups([sampled("g0"), sampled("g0", 1), sampled("g0")])


def test_every_fault_of_a_file_is_told_at_once(load_groups, sampled, episode, tiny_renderer):
    fingerprint = tiny_renderer.fingerprint
    expert = [sampled("g0", n, agent="scripted") for n in range(12)]
    for one in expert:
        one.logprobs[2] = None
    other = sampled("g1", tokenizer="0123456789abcdef")
    greedy = sampled("g2", sampling=Sampling(temperature=0))
    bare = episode((1, [5]), group="g3", name="bare", tokenizer=fingerprint)
    long = episode((0, [3] * 10), (1, [5]), group="g4", name="long", tokenizer=fingerprint)
    with pytest.raises(DataError) as caught:
        load_groups([*expert, other, greedy, bare, long, sampled("g5"), sampled("g5", 1)], max_length=10)
    text = str(caught.value)
    ten = ", ".join(f"g0/{n} (agent 'scripted')" for n in range(10))
    assert (
        f"no log-probs of what was said, so no policy sampled it (sft takes such episodes): {ten}, and 2 more" in text
    )
    assert "tokens of another tokenizer or chat template than the model's, and log-probs belong to tokens: g1/0" in text
    assert "sampled greedily, and RL needs a temperature above 0: g2/0" in text
    assert "a segment that begins with mask 1, so nothing predicts its first token: bare" in text
    assert text.endswith("trajectory long has 11 tokens; the model takes 10")


def test_messages_alone_have_no_log_probs(sums_file, tiny_renderer):
    with pytest.raises(DataError, match=r"no log-probs .* \(agent 'scripted'\).*, and 390 more"):
        GroupDataset(sums_file, tiny_renderer, min_group_size=1, max_length=100, seed=0)


def test_a_mix_of_temperatures_and_a_narrowed_softmax_are_told(load_groups, sampled):
    hot, narrow = Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=5)
    data = load_groups([sampled("g0", n, sampling=hot if n < 3 else narrow) for n in range(4)])
    assert data.notes[0] == "sampled at temperatures 0.7 (1 episodes), 1 (3 episodes): each counts at its own"
    assert data.notes[1].startswith("1 episodes were sampled with top-p, top-k or min-p")
    assert load_groups([sampled("g0", n, sampling=hot) for n in range(4)]).notes == []


def test_groups_of_equal_rewards_are_counted(load_groups, sampled):
    data = load_groups([sampled(f"g{g}", n, reward=1.0 if g else float(n)) for g in range(3) for n in range(2)])
    assert data.notes == ["2 of 3 groups have equal rewards: they teach nothing"]


def test_turns_and_tools_of_a_file(load_groups, sampled, episode, tiny_renderer):
    two = episode(
        (0, [3]),
        (1, [5]),
        (0, [4]),
        (1, [6]),
        group="g0",
        name="two",
        tokenizer=tiny_renderer.fingerprint,
        tools="[{}]",
    )
    assert (load_groups([sampled("g0"), two]).most_turns, load_groups([sampled("g0"), two]).with_tools) == (2, True)
    plain = load_groups([sampled("g0"), sampled("g0", 1)])
    assert (plain.most_turns, plain.with_tools) == (1, False)
