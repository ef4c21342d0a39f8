"""The scorer: what an env cannot score alone, on hand-made trajectories and in a whole collection."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gymtune.agents import ScriptedAgent, Trajectory, read_trajectories, rollout
from gymtune.agents.collect import CollectConfig, Collection
from gymtune.agents.reward_model import StubRewardModel, load_reward_model
from gymtune.agents.scorer import Part, Scorer, function_part, scorer_part, split_rewards
from gymtune.tools import ConfigError, Message

SEEN: list[dict[str, Any]] = []


def brevity(completions: Sequence[Sequence[Message]], **columns: Any) -> list[float]:
    """Minus the characters of the last message; remembers what it was given."""
    SEEN.append({"completions": completions, **columns})
    return [-float(len(messages[-1]["content"])) for messages in completions]


def rank(prompts: Sequence[Any], gt: Sequence[str]) -> list[float]:
    """A reward relative to the batch: the place of each gt."""
    order = sorted(set(gt))
    return [float(order.index(answer)) for answer in gt]


def sums(n: int, samples: int = 1) -> list[Trajectory]:
    return rollout("gymtune/Arithmetic-v0", ScriptedAgent(), n, num_generations=samples)


def test_a_function_sees_the_conversation_and_adds_its_component_to_the_last_turn() -> None:
    SEEN.clear()
    trajectories = sums(3)
    before = [t.reward for t in trajectories]
    Scorer([function_part("brevity", 0.5, brevity)]).score(trajectories)
    seen = SEEN[0]
    assert [m["role"] for m in seen["prompts"][0]] == ["user"]
    assert [[m["role"] for m in c] for c in seen["completions"]] == [["assistant"]] * 3
    assert seen["gt"] == [t.gt for t in trajectories]
    assert seen["level"] == [1, 1, 1]  # the tasks' metadata
    for trajectory, was in zip(trajectories, before, strict=True):
        value = -float(len(trajectory.messages[-1]["content"]))
        assert trajectory.rewards["brevity"] == value
        assert trajectory.reward == was + 0.5 * value
        assert trajectory.turns[-1].reward == trajectory.reward
        assert Trajectory.model_validate_json(trajectory.to_json()) == trajectory


def test_a_function_may_compare_the_episodes_of_a_batch() -> None:
    trajectories = sums(5)
    Scorer([function_part("rank", 1.0, rank)]).score(trajectories)
    order = sorted({t.gt for t in trajectories})
    assert [t.rewards["rank"] for t in trajectories] == [order.index(t.gt) for t in trajectories]


@pytest.mark.parametrize("wrong", ["raises", "nan"])
def test_a_broken_part_leaves_the_reward_untold(wrong: str) -> None:
    def crash(**columns: Any) -> list[float]:
        if wrong == "raises":
            raise KeyError("lost")
        return [float("nan")] * len(columns["prompts"])

    trajectories = sums(2)
    scorer = Scorer([function_part("crash", 1.0, crash)])
    scorer.score(trajectories)
    assert [t.rewards["crash"] for t in trajectories] == [None, None]
    assert [t.reward for t in trajectories] == [None, None]
    assert scorer.fault is not None
    assert scorer.fault.startswith("crash: ")


def test_a_part_may_have_no_say() -> None:
    trajectories = sums(2)
    Scorer([function_part("some", 1.0, lambda prompts: [2.0, None])]).score(trajectories)
    assert [t.reward for t in trajectories] == [3.0, 1.0]
    assert "some" not in trajectories[1].rewards


def test_failed_episodes_are_not_shown() -> None:
    trajectories = sums(2)
    trajectories[0].error = "the env crashed"
    SEEN.clear()
    Scorer([function_part("brevity", 1.0, brevity)]).score(trajectories)
    assert len(SEEN[0]["completions"]) == 1
    assert "brevity" not in trajectories[0].rewards


def test_two_parts_of_one_name_and_a_name_of_the_env_are_refused() -> None:
    part = Part("a", 1.0, lambda trajectories: pytest.fail("not called"))
    with pytest.raises(ConfigError, match="two rewards are named 'a'"):
        Scorer([part, part])
    with pytest.raises(ConfigError, match="component 'gt' already"):
        Scorer([function_part("gt", 1.0, brevity)]).score(sums(1))


def test_weights_are_split_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("def short(completions):\n    return [1.0 for _ in completions]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own, scorer = split_rewards({"gt": 1.0, "judges:short": 0.5, "reward_model": 2.0}, "stub")
    assert own == {"gt": 1.0}
    assert [(part.name, part.weight) for part in scorer.parts] == [("short", 0.5), ("reward_model", 2.0)]
    assert not split_rewards({"gt": 1.0})[1]
    with pytest.raises(ConfigError, match="give --reward-model FOLDER"):
        split_rewards({"reward_model": 2.0})
    with pytest.raises(ConfigError, match="no such model folder"):
        split_rewards({}, str(tmp_path))


# --- scores that are changed ----------------------------------------------------------------------------------------


def given(*values: float | None) -> Any:
    return lambda prompts: list(values)


@pytest.mark.parametrize(
    ("options", "values", "counts"),
    [
        # mean 5, deviation sqrt((9 + 1 + 1 + 9) / 4) = sqrt(5)
        ({"normalize": True}, [2.0, 4.0, 6.0, 8.0], [-3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5, 3 / 5**0.5]),
        ({"clip": 3.0}, [2.0, 4.0, -6.0, -3.0], [2.0, 3.0, -3.0, -3.0]),
        ({"normalize": True, "clip": 1.0}, [2.0, 4.0, 6.0, 8.0], [-1.0, -1 / 5**0.5, 1 / 5**0.5, 1.0]),
        ({"normalize": True}, [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 0.0]),
        ({"normalize": True}, [None, None, 7.0, None], [None, None, 0.0, None]),
        ({"normalize": True}, [1.0, None, 3.0, None], [-1.0, None, 1.0, None]),
    ],
)
def test_scores_are_normalised_and_cut_and_what_was_given_stays_visible(
    options: dict[str, Any], values: list[float | None], counts: list[float | None]
) -> None:
    trajectories = sums(4)
    Scorer([function_part("some", 0.5, given(*values))], **options).score(trajectories)
    for trajectory, value, counted in zip(trajectories, values, counts, strict=True):
        if value is None or counted is None:
            assert "some" not in trajectory.rewards
            assert "some/raw" not in trajectory.rewards
            assert trajectory.reward == 1.0
            continue
        assert trajectory.rewards["some"] == pytest.approx(counted, abs=1e-12)
        assert trajectory.rewards["some/raw"] == value
        assert trajectory.reward == pytest.approx(1 + 0.5 * counted, abs=1e-12)


def test_every_part_is_normalised_by_itself_and_equal_scores_are_exactly_0() -> None:
    trajectories = sums(3)
    parts = [function_part("wide", 1.0, given(0.0, 300.0, 600.0)), function_part("flat", 1.0, given(0.3, 0.3, 0.3))]
    Scorer(parts, normalize=True).score(trajectories)
    assert [t.rewards["wide"] for t in trajectories] == pytest.approx([-(1.5**0.5), 0, 1.5**0.5], abs=1e-12)
    assert [t.rewards["flat"] for t in trajectories] == [0.0, 0.0, 0.0]


def test_a_broken_part_stays_broken_and_has_no_raw_score() -> None:
    trajectories = sums(2)
    scorer = Scorer([function_part("some", 1.0, given(1.0, float("nan")))], normalize=True, clip=1.0)
    scorer.score(trajectories)
    assert [t.rewards["some"] for t in trajectories] == [None, None]
    assert [t.broken for t in trajectories] == [["some"], ["some"]]


def test_without_a_part_there_is_no_score_to_change() -> None:
    for options in ({"normalize": True}, {"clip": 1.0}):
        with pytest.raises(ConfigError, match="normalize_scores and score_clip change the scores of reward models and"):
            split_rewards({"gt": 1.0}, **options)
    _, scorer = split_rewards({}, "stub", normalize=True, clip=2.0)
    assert (scorer.normalize, scorer.clip) == (True, 2.0)


def test_the_stub_counts_distinct_words() -> None:
    says = [[{"role": "assistant", "content": text}] for text in ("a a b B", "one two", "")]
    assert StubRewardModel().score(says) == [0.5, 1.0, 0.0]
    assert isinstance(load_reward_model("stub"), StubRewardModel)
    trajectories = sums(1)
    Scorer([scorer_part("reward_model", 1.0, StubRewardModel())]).score(trajectories)
    assert trajectories[0].reward == 2.0


def test_a_sequence_classifier_scores_as_transformers_does(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(tiny_model, num_labels=1, pad_token_id=None)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    says = [[{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": t}] for t in ("5", "no")]
    scores = load_reward_model(str(tmp_path)).score(says)
    for messages, score in zip(says, scores, strict=True):
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
            assert score == pytest.approx(float(model.score(hidden)[0]), abs=1e-6)
    assert scores[0] != scores[1]


def test_a_collection_scores_whole_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "groups.py").write_text("def size(prompts):\n    return [float(len(prompts))] * len(prompts)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = CollectConfig(
        env="gymtune/Arithmetic-v0", agent="scripted", n=3, num_generations=4, reward_weights={"groups:size": 1.0}
    )
    out = tmp_path / "out.jsonl"
    Collection.open(out, config).run(ScriptedAgent(), concurrency=5)
    found = list(read_trajectories(out))
    assert [t.rewards["size"] for t in found] == [4.0] * 12
    assert [t.reward for t in found] == [5.0] * 12
    ids = [t.group_id for t in found]
    assert all(ids.count(name) == 4 for name in ids)
