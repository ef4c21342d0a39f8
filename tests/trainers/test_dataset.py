"""Stored trajectories: which are read, in which order, what is refused."""

import itertools
import json
from collections import Counter

import pytest

from gymtune.agents import Renderer, Sampling, TrajectoryWriter, read_trajectories
from gymtune.envs.files import example_path
from gymtune.tools.errors import DataError
from gymtune.trainers.dataset import GroupDataset, TrajectoryDataset


@pytest.fixture
def load(tiny_renderer, tmp_path):
    """Write trajectories to a file and read it as a data set."""

    def make(trajectories, *, max_length=100, seed=0, **options):
        (tmp_path / "data.jsonl").unlink(missing_ok=True)
        with TrajectoryWriter(tmp_path / "data.jsonl") as writer:
            for trajectory in trajectories:
                writer.append(trajectory)
        return TrajectoryDataset(tmp_path / "data.jsonl", tiny_renderer, max_length=max_length, seed=seed, **options)

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
    assert names(data.everything()) == ["t2", "t3", "t4", "t5"]
    assert data.left_out == 3


def test_without_min_reward_only_failures_are_left_out(load, seven, episode, tiny_renderer):
    seven[0].error = "Traceback"
    silent = episode((0, [3, 4]), name="silent", tokenizer=tiny_renderer.fingerprint)
    data = load([*seven, silent])
    assert names(data.everything()) == names(seven)[1:]
    assert data.left_out == 2


def test_the_longest_that_fits(load, seven, episode, tiny_renderer):
    long = episode((0, [3] * 9), (1, [5]), name="long", tokenizer=tiny_renderer.fingerprint)
    assert len(load([*seven, long], max_length=10).everything()) == 8


def test_all_that_are_too_long_are_named_or_left_out(load, seven, episode, tiny_renderer):
    long = [
        episode((0, [3] * (10 + i)), (1, [5]), name=f"long{i}", tokenizer=tiny_renderer.fingerprint) for i in range(12)
    ]
    with pytest.raises(DataError) as caught:
        load([*seven, *long], max_length=10)
    named = ", ".join(f"line {8 + i} has {11 + i}" for i in range(10))
    assert f"data.jsonl: more tokens than the 10 that the model takes: {named}, and 2 more. drop_long=true" in str(
        caught.value
    )
    data = load([*seven, *long], max_length=10, drop_long=True)
    assert names(data.everything()) == names(seven)
    assert data.notes == ["12 episodes are left out: they are longer than the 10 tokens that the model takes"]


def test_segments_are_measured_one_by_one(load, episode, tiny_renderer):
    two = episode((0, [3] * 5), (1, [5]), "segment", (0, [3] * 5), (1, [5]), tokenizer=tiny_renderer.fingerprint)
    assert len(load([two], max_length=6).everything()) == 1


def test_nothing_to_learn_from(load, seven):
    with pytest.raises(
        DataError, match=r"no episodes to learn from\. 7 episodes are left out: they earned less than 100"
    ):
        load(seven, min_reward=100.0)


@pytest.fixture
def groups(episode, tiny_renderer):
    """Two groups of four, written sample by sample; names say group, number and reward."""
    rewards = {"a": [0.5, 1.0, 0.0, 1.0], "b": [3.0, 2.0, 2.0, 2.0]}
    return [
        episode(
            (0, [3, 4]), (1, [5]), name=f"{g}{n}", group=g, reward=rewards[g][n], tokenizer=tiny_renderer.fingerprint
        )
        for n in range(4)
        for g in "ab"
    ]


@pytest.mark.parametrize(
    ("best_of", "kept"),
    [(1, ["b0", "a1"]), (2, ["b0", "a1", "b1", "a3"]), (3, ["a0", "b0", "a1", "b1", "b2", "a3"]), (9, None)],
)
def test_the_best_of_each_group_the_earlier_of_equals_in_the_order_of_the_file(load, groups, best_of, kept):
    data = load(groups, best_of=best_of)
    assert names(data.everything()) == (kept or names(groups))
    assert data.notes == (
        [f"{8 - len(kept)} episodes are left out: {best_of} better ones are in their group"] if kept else []
    )


def test_the_best_are_of_those_that_earned_enough_and_have_a_reward(load, groups):
    groups[2].rewards = {"gt": None}  # the best of a
    assert names(load(groups, best_of=1).everything()) == ["b0", "a3"]
    assert names(load(groups, best_of=9).everything()) == ["a0", "b0", "b1", "a2", "b2", "a3", "b3"]
    assert names(load(groups, best_of=2, min_reward=1.0).everything()) == ["b0", "b1", "a3"]


def test_a_long_one_gives_way_to_the_next_best_and_is_no_fault_where_it_is_not_chosen(load, groups, episode):
    groups[1] = episode((0, [3] * 20), (1, [5]), name="long", group="b", reward=9.0, tokenizer=groups[0].tokenizer)
    assert names(load(groups, best_of=1, max_length=10, drop_long=True).everything()) == ["a1", "b1"]
    with pytest.raises(DataError, match=r": line 2 has 21\."):
        load(groups, best_of=1, max_length=10)
    groups[1].turns[-1].reward = -1.0
    assert names(load(groups, best_of=3, max_length=10).everything()) == ["a0", "a1", "b1", "b2", "a3", "b3"]


# -- other kinds of files ----------------------------------------------------------------------------------------------


@pytest.fixture
def read(tiny_renderer, tmp_path):
    """Write records to a file and read it as what is to be imitated."""

    def make(rows, **options):
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return TrajectoryDataset(path, tiny_renderer, max_length=400, seed=0, **options)

    return make


def talk(*texts, **last):
    roles = itertools.cycle(["user", "assistant"])
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    said[-1] |= last
    return said


@pytest.mark.parametrize(
    ("rows", "told", "summary"),
    [
        ([{"conversations": talk("q", "a", "r", "b")}], [["a", "b"]], "1 conversations"),
        ([{"prompt": "q", "completion": "a"}], [["a"]], "1 conversations"),
        ([{"prompt": "q", "chosen": "a", "rejected": "b"}], [["a"]], "1 chosen replies"),
        (
            [{"prompt": "q", "completion": text, "label": text == "a"} for text in "aba"],
            [["a"], ["a"]],
            "2 good replies",
        ),
        ([{"question": "q", "answer": "so #### 2"}], [["so #### 2"]], "1 answers"),
        ([{"conversations": talk("q", "a"), "gt": ["2"]}], [["a"]], "1 answers"),
    ],
)
def test_any_kind_with_something_to_imitate_is_read(read, tiny_renderer, rows, told, summary):
    data = read(rows)
    decode = tiny_renderer.decode
    assert [[decode(one.tokens[turn.start : turn.end]) for turn in one.turns] for one in data.everything()] == told
    assert data.summary == summary


def test_a_conversation_of_minimind_with_tools_and_reasoning(read, tiny_renderer):
    """A line as `sft_t2t.jsonl` has it: the tools are JSON text on the system message, calls are JSON text too."""
    schema = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
    row = {
        "conversations": [
            {"role": "system", "content": "s", "tools": json.dumps([schema])},
            {"role": "user", "content": "1+1?", "reasoning_content": ""},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": json.dumps(calls)},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2", "reasoning_content": ""},
        ]
    }
    (one,) = read([row]).everything()
    turns = [tiny_renderer.decode(one.tokens[turn.start : turn.end]) for turn in one.turns]
    parsed = tiny_renderer.chat_format.parse(turns[0])
    assert (parsed.reasoning, [(call.name, call.arguments) for call in parsed.calls]) == ("hm", [("add", {"x": 1})])
    assert turns[1] == "2"
    assert "add" in tiny_renderer.decode(one.tokens[: one.turns[0].start])
    between = one.tokens[one.turns[0].end : one.turns[1].start]
    assert "2" in tiny_renderer.decode(between)
    assert set(one.response_mask[one.turns[0].end : one.turns[1].start]) == {0}


def test_records_without_an_answer_are_counted(read):
    answered = {"question": "q", "answer": "so #### 2"}
    data = read([answered, {"question": "r", "answer": "3"}])
    assert data.notes == ["1 records hold no answer"]
    assert len(data.everything()) == 1


def test_what_goes_on_without_results_is_left_out(read, tiny_renderer):
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {}}}
    made_up = talk("q", "", tool_calls=[call]) + [{"role": "assistant", "content": "5"}]
    data = read([{"messages": made_up}, {"messages": talk("q", "a")}])
    assert [one.turns[0].text for one in data.everything()] == ["a"]
    assert data.notes[0].startswith("1 replies are left out: they go on after calls whose results are not on file")
    with pytest.raises(
        DataError, match=r"no answers to learn from\. 10 replies .*-agent scripted` plays them\)\. Such a"
    ):
        TrajectoryDataset(example_path("agentic"), tiny_renderer, max_length=400, seed=0)


@pytest.mark.parametrize("kind", ["prompts", "bfcl"])
def test_a_file_with_nothing_to_imitate_says_what_it_is_for(tiny_renderer, kind):
    with pytest.raises(
        DataError, match=r"wanted replies to imitate, this file has .*, for algorithms that sample in an"
    ):
        TrajectoryDataset(example_path(kind), tiny_renderer, max_length=400, seed=0)


def test_every_fault_of_a_file_is_told_with_its_line(read, load, seven, tmp_path):
    with pytest.raises(DataError) as caught:
        read([{"messages": talk("q", "a")}, {"messages": talk("q", "")}, {"messages": talk("q")}, {"chosen": 1}])
    for line in ("line 2: messages[1]: wanted an answer", "line 3: ", "line 4: "):
        assert line in str(caught.value)
    load(seven)
    path = tmp_path / "data.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"trajectory_id": 1}', *lines[1:], lines[2][:-20]]))
    with pytest.raises(DataError, match=r"line 2: trajectory_id: .*; line 9: the line is cut in the middle"):
        TrajectoryDataset(path, None, max_length=100, seed=0)


def test_a_record_of_another_kind_is_a_fault_even_where_it_could_be_read(read):
    """A bad reply among conversations would be imitated."""
    with pytest.raises(DataError, match=r"line 2: wanted the kind sft, as other lines, came the kind unpaired"):
        read([{"messages": talk("q", "a")}, {"messages": talk("q", "b"), "label": False}])


def test_what_the_chat_template_refuses_is_told_with_its_line(read, tiny_renderer, tmp_path):
    template = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}" + tiny_renderer.chat_template
    picky = Renderer(tiny_renderer.tokenizer, chat_template=template)
    system = {"role": "system", "content": "s"}
    opening = [system, system]
    read([{"messages": talk("q", "a")}, {"messages": [*opening, *talk("q", "a")]}])
    with pytest.raises(DataError, match=r"line 2: the chat template of .* refuses the conversation: too many\. "):
        TrajectoryDataset(tmp_path / "records.jsonl", picky, max_length=400, seed=0)


def test_messages_without_tokens_are_rendered(sums_file, tiny_renderer):
    stored = next(read_trajectories(sums_file))
    assert stored.tokens == []
    data = TrajectoryDataset(sums_file, tiny_renderer, min_reward=1.0, max_length=100, seed=0)
    assert len(data.everything()) == 400
    first = data.everything()[0]
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
