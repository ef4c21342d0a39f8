"""Pairs and labels: which episodes of a group are compared, what a file gives of either, what is refused."""

import json

import pytest

from gymtune.agents import Renderer, ScriptedAgent, TrajectoryWriter, rollout
from gymtune.envs.files import example_path
from gymtune.tools.errors import DataError
from gymtune.trainers.pairs import LabelledDataset, PairDataset, labelled, pairs_of


@pytest.fixture
def group(episode, tiny_renderer):
    """Make the episodes of one group by what they earned; each says something else."""

    def make(name, *rewards, prompt=(3, 4), **fields):
        return [
            episode(
                (0, list(prompt)), (1, [5 + n]), group=name, name=f"{name}/{n}", reward=reward,
                tokenizer=tiny_renderer.fingerprint, **fields,
            )
            for n, reward in enumerate(rewards)
        ]  # fmt: skip

    return make


def names(trajectories):
    return [one.trajectory_id for one in trajectories]


def two(trajectories):
    """Return the names two by two, without their group."""
    flat = [name.rpartition("/")[2] for name in names(trajectories)]
    return list(zip(flat[::2], flat[1::2], strict=True))


# -- which two of a group ----------------------------------------------------------------------------------------------


def test_the_best_and_the_worst_the_earlier_of_equals(group):
    assert two(pairs_of(group("g", 0.5, 1.0, 0.0, 1.0, 0.0), "best_worst")) == [("1", "2")]


def test_all_that_differ_the_better_first(group):
    assert two(pairs_of(group("g", 0.5, 1.0, 0.0, 0.5), "all")) == [
        ("1", "0"), ("0", "2"), ("1", "2"), ("1", "3"), ("3", "2"),
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["best_worst", "all"])
def test_groups_are_kept_apart_and_those_of_equals_give_none(group, how):
    mixed = [*group("a", 1.0, 0.0), *group("b", 0.5, 0.5), *group("c", 2.0, 3.0), *group("d", 1.0)]
    mixed = mixed[::2] + mixed[1::2]  # written sample by sample
    assert names(pairs_of(mixed, how)) == ["a/0", "a/1", "c/1", "c/0"]


@pytest.mark.parametrize("how", ["best_worst", "all"])
def test_with_ties_a_group_of_equals_gives_one_pair(group, how):
    mixed = [*group("a", 0.5, 0.5, 0.5), *group("b", 1.0, 1.0, 0.0), *group("c", 1.0)]
    tied = pairs_of(mixed, how, ties=True)
    assert names(tied)[:2] == ["a/0", "a/1"]
    assert tied[0].reward == tied[1].reward
    assert names(tied)[2:] == names(pairs_of(mixed, how))


def test_what_failed_broke_or_said_nothing_is_in_no_pair(group, episode):
    failed, broken, *rest = group("g", 9.0, 8.0, 1.0, 0.5)
    failed.error, broken.rewards = "Traceback", {"gt": None}
    silent = episode((0, [3, 4]), group="g", name="g/silent")
    assert two(pairs_of([failed, broken, silent, *rest], "all")) == [("2", "3")]


def test_the_very_same_words_are_no_pair_even_if_they_earned_different(group):
    best, worst, other = group("g", 1.0, 0.0, 0.5)
    worst.tokens = list(best.tokens)
    assert pairs_of([best, worst]) == []
    assert two(pairs_of([best, worst, other], "all")) == [("0", "2"), ("2", "1")]
    worst.turns[0].text = "another text of the same tokens"
    assert two(pairs_of([best, worst])) == [("0", "1")]


def test_both_of_a_pair_have_the_same_prompt(group):
    """Where some of a group think and others do not, their prompts differ, and so each sort has pairs of its own."""
    plain, thinking = group("g", 0.0, 1.0), group("g", 3.0, 2.0, prompt=(3, 4, 9))
    found = pairs_of([plain[0], thinking[0], plain[1], thinking[1]])
    assert [one.reward for one in found] == [1.0, 0.0, 3.0, 2.0]
    assert [one.tokens[:-1] for one in found] == [[3, 4]] * 2 + [[3, 4, 9]] * 2


def test_labels_by_success_or_by_threshold(group):
    good, bad, unknown, failed, broken = group("g", 0.2, 0.9, 0.5, 1.0, 1.0)
    good.success, bad.success, failed.success, failed.error = True, False, True, "Traceback"
    broken.rewards = {"gt": None}
    every = [good, bad, unknown, failed, broken]
    assert [(one.trajectory_id, one.success) for one in labelled(every)] == [("g/0", True), ("g/1", False)]
    assert [(one.trajectory_id, one.success) for one in labelled(every, 0.5)] == [
        ("g/0", False), ("g/1", True), ("g/2", True),
    ]  # fmt: skip
    assert (good.success, bad.success, unknown.success) == (True, False, None)  # copies were labelled


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    """Write rows, or trajectories, to a file."""

    def make(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else as_json(row)) + "\n" for row in rows))
        return path

    return make


def as_json(row):
    return json.dumps(row) if isinstance(row, dict) else row.to_json()


@pytest.fixture
def pairs(write, tiny_renderer):
    def make(rows, max_length=100, seed=0, **options):
        return PairDataset(write(rows), tiny_renderer, max_length=max_length, seed=seed, **options)

    return make


@pytest.fixture
def labels(write, tiny_renderer):
    def make(rows, max_length=100, seed=0, **options):
        return LabelledDataset(write(rows), tiny_renderer, max_length=max_length, seed=seed, **options)

    return make


def pair(number, **more):
    return {"prompt": f"q{number}", "chosen": f"yes {number}", "rejected": f"no {number}", **more}


def minimind(number):
    """A line of MiniMind's dpo.jsonl: both sides repeat the conversation."""
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{number}"}]
    sides = {"chosen": "yes", "rejected": "no"}
    return {side: [*opening, {"role": "assistant", "content": text}] for side, text in sides.items()}


def texts(trajectories):
    return [one.turns[-1].text for one in trajectories]


@pytest.mark.parametrize("make", [pair, minimind])
def test_chosen_and_rejected_take_turns_and_share_their_prompt_ids(pairs, make):
    data = pairs([make(n) for n in range(5)])
    assert data.summary == "5 pairs"
    assert data.notes == []
    flat = data.everything()
    assert [one.reward for one in flat] == [1.0, 0.0] * 5
    for chosen, rejected in zip(flat[::2], flat[1::2], strict=True):
        place = chosen.response_mask.index(1)
        assert place == rejected.response_mask.index(1) > 0
        assert chosen.tokens[:place] == rejected.tokens[:place]
        assert chosen.tokens[place:] != rejected.tokens[place:]
        assert chosen.sampled_tokens == len(chosen.tokens) - place


def test_a_template_that_rewrites_history_leaves_the_prompt_ids_equal(write, tiny_renderer):
    template = (
        "{% for m in messages %}{% if loop.first and messages[-1].role == 'assistant' %}[{{ messages[-1].content }}]"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # a rendered conversation begins with what is said last: no prefix is common to the two sides
    renderer = Renderer(tiny_renderer.tokenizer, chat_template=template)
    data = PairDataset(write([pair(0)]), renderer, max_length=100, seed=0)
    for one in data.everything():
        place = one.response_mask.index(1)
        assert one.tokens[:place] == renderer.prompt([{"role": "user", "content": "q0"}])


def test_each_epoch_sees_each_pair_once_and_never_half_of_one(pairs):
    data = pairs([pair(n) for n in range(5)])
    stream = [one for step in range(5) for one in data.batch(step, 3)]  # 15 pairs: three epochs
    chosen, rejected = texts(stream[::2]), texts(stream[1::2])
    assert [text.replace("yes", "no") for text in chosen] == rejected
    epochs = [chosen[first : first + 5] for first in (0, 5, 10)]
    assert all(sorted(epoch) == [f"yes {n}" for n in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again, other = pairs([pair(n) for n in range(5)]), pairs([pair(n) for n in range(5)], seed=1)
    assert texts(again.batch(3, 3)) == texts(data.batch(3, 3))
    assert [texts(other.batch(step, 3)) for step in range(5)] != [texts(data.batch(step, 3)) for step in range(5)]


def test_pairs_that_say_the_same_are_left_out_by_line(pairs):
    data = pairs([pair(0), pair(1, chosen="a", rejected="a"), pair(2), pair(3, chosen="b", rejected="b")])
    assert data.notes == ["2 pairs are left out, chosen and rejected say the same: lines 2, 4"]
    assert texts(data.everything()) == ["yes 0", "no 0", "yes 2", "no 2"]
    with pytest.raises(DataError, match=r"no pair to learn from. 1 pairs are left out, .* say the same: lines 1"):
        pairs([pair(1, chosen="a", rejected="a")])


def test_all_faults_of_a_file_come_at_once(pairs):
    rows = [pair(0), pair(1, rejected=""), "{", {"prompt": "q", "completion": "a", "label": True}]
    with pytest.raises(DataError) as caught:
        pairs(rows)
    text = str(caught.value)
    assert "line 2: rejected: wanted an answer, came an empty one" in text
    assert "line 3: wanted a JSON object, came what is no JSON" in text
    assert "line 4: " in text
    assert text.endswith("data.jsonl` shows the file")
    with pytest.raises(DataError, match=r"line 13: .*; and 5 more\. `gymtune validate"):
        pairs([pair(0)] * 3 + [pair(1, chosen="")] * 15)


def test_too_long_is_refused_by_line_or_left_out_with_its_pair(pairs, tiny_renderer):
    rows = [pair(0), pair(1, rejected="no " * 60), pair(2)]
    length = len(tiny_renderer.prompt([{"role": "user", "content": "q1"}]))
    length += len(tiny_renderer.assistant_ids(rows[1]["rejected"]))
    with pytest.raises(DataError, match=rf"more tokens than the 60 .*: line 2 has {length}\. drop_long=true leaves"):
        pairs(rows, max_length=60)
    data = pairs(rows, max_length=60, drop_long=True)
    assert texts(data.everything()) == ["yes 0", "no 0", "yes 2", "no 2"]
    assert data.notes == ["1 replies are left out: they are longer than the 60 tokens that the model takes"]
    assert pairs(rows, max_length=length).summary == "3 pairs"


@pytest.mark.parametrize(
    ("kind", "holds"), [("sft", "conversations"), ("unpaired", "labelled"), ("prompts", "prompts")]
)
def test_a_file_without_pairs_says_what_it_is_for(tiny_renderer, kind, holds):
    with pytest.raises(DataError, match=f"wanted pairs of a better and a worse reply, this file has {holds}.*, for "):
        PairDataset(example_path(kind), tiny_renderer, max_length=512, seed=0)


def test_groups_of_episodes_are_pairs(pairs, group):
    rows = [*group("a", 0.0, 1.0, 0.5), *group("b", 1.0, 1.0), *group("c", 0.0, 2.0), *group("d", 1.0)]
    data = pairs(rows)
    assert names(data.everything()) == ["a/1", "a/0", "c/1", "c/0"]
    assert data.summary == "2 pairs of 2 groups"
    assert data.notes == ["2 of 4 groups give no pair: too few episodes, equal rewards, or the same words"]
    assert data.lines["c/1"] == 7
    assert pairs(rows, how="all").summary == "4 pairs of 2 groups"
    assert names(pairs(rows, ties=True).everything()) == ["a/1", "a/0", "b/0", "b/1", "c/1", "c/0"]


def test_an_episode_without_reward_is_left_out_and_counted(pairs, group):
    rows = group("a", 0.0, 1.0, 0.5)
    rows[0].rewards = {"gt": None}
    data = pairs(rows)
    assert names(data.everything()) == ["a/1", "a/2"]
    assert (data.left_out, data.notes) == (1, ["1 episodes are left out: their reward is not known"])


def test_groups_that_all_earned_the_same_are_no_pairs(pairs, group):
    with pytest.raises(DataError, match=r"no pair to learn from\. 1 of 1 groups give no pair: .*\. A pair is two"):
        pairs(group("a", 1.0, 1.0))


def test_a_trajectory_that_stands_there_twice_is_named(pairs, group):
    with pytest.raises(DataError, match=r"line 3: trajectory a/0 stands there twice"):
        pairs([*group("a", 0.0, 1.0), *group("a", 0.0)])


def test_episodes_of_an_env_with_tools_are_pairs(tmp_path, tiny_renderer, pairs):
    """What an expert did against what it did without its last turn, with another model's tokens or none."""
    path = tmp_path / "played.jsonl"
    with TrajectoryWriter(path) as writer:
        for played in rollout("gymtune/Calculator-v0", ScriptedAgent(), 4, num_generations=2):
            if played.sample:
                played.turns[-1].text, played.turns[-1].reward = "no idea", 0.0
                played.messages[-1] = {"role": "assistant", "content": "no idea"}
            writer.append(played)
    data = PairDataset(path, tiny_renderer, max_length=512, seed=0)
    assert [one.sample for one in data.everything()] == [0, 1] * 4
    assert all(one.tokenizer == tiny_renderer.fingerprint for one in data.everything())
    assert max(len(one.turns) for one in data.everything()) > 1


# -- labels ------------------------------------------------------------------------------------------------------------


def kto(number, *, good):
    """A line of TRL's KTO form."""
    return {
        "prompt": [{"role": "user", "content": f"q{number}"}],
        "completion": [{"role": "assistant", "content": f"a{number}"}],
        "label": good,
    }


def test_labels_of_a_file_are_successes(labels):
    data = labels([kto(n, good=n % 3 == 0) for n in range(7)])
    assert data.summary == "3 good and 4 bad replies"
    assert [one.success for one in data.everything()] == [n % 3 == 0 for n in range(7)]
    assert sorted(texts(one for step in range(7) for one in data.batch(step, 2))) == sorted(
        [f"a{n}" for n in range(7)] * 2
    )


def test_a_pair_is_one_good_and_one_bad_reply(labels):
    data = labels([pair(n) for n in range(2)], threshold=-1.0)  # of episodes alone
    assert [(one.turns[0].text, one.success) for one in data.everything()] == [
        ("yes 0", True), ("no 0", False), ("yes 1", True), ("no 1", False),
    ]  # fmt: skip


def test_episodes_are_labelled_by_success_or_threshold(labels, group):
    rows = group("a", 0.0, 0.3, 0.6, 1.0)
    rows[0].success, rows[3].success = False, True
    data = labels(rows)
    assert [(one.trajectory_id, one.success) for one in data.everything()] == [("a/0", False), ("a/3", True)]
    assert data.notes == ["2 episodes are left out: it is not known whether they are good"]
    other = labels(rows, threshold=0.5)
    assert [one.success for one in other.everything()] == [False, False, True, True]
    assert other.notes == []


@pytest.mark.parametrize(("good", "mend"), [(True, "3 good ones: sft learns"), (False, "3 bad ones: label_threshold")])
def test_labels_of_one_sort_are_refused(labels, good, mend):
    with pytest.raises(DataError, match=f"wanted good and bad replies, came {mend}"):
        labels([kto(n, good=good) for n in range(3)])


def test_a_file_without_labels_says_what_it_is_for(tiny_renderer):
    with pytest.raises(DataError, match=r"labelled good or bad, this file has conversations, for sft, distill"):
        LabelledDataset(example_path("sft"), tiny_renderer, max_length=512, seed=0)


def test_long_replies_are_refused_or_left_out(labels):
    rows = [kto(0, good=True), kto(1, good=False), kto("x" * 200, good=False)]
    with pytest.raises(DataError, match="line 3 has"):
        labels(rows)
    assert labels(rows, drop_long=True).summary == "1 good and 1 bad replies"
