"""What people can look at: decoded samples with mask and advantages, and the batch that broke a run's numbers."""

import json
import math
from pathlib import Path

import pytest
import torch

from gymtune.agents import Trajectory
from gymtune.tools.errors import ConfigError, RunError
from gymtune.trainers import train
from gymtune.trainers.debug import debug_samples, describe, whole_batch
from gymtune.trainers.experience import Experience, experiences_of


def say(ids):
    return "".join(chr(96 + i) for i in ids)  # 1 is a, 2 is b


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


# --- one episode ------------------------------------------------------------------------------------------------------


def test_an_episode_is_shown_in_pieces_of_one_mask(episode):
    one = episode((0, [1, 2]), (1, [3, 4]), (0, [5]), (1, [6]), "segment", (0, [1, 2, 7]), (1, [8]), reward=2.0)
    one.rewards = {"gt": 1.0, "format": None}
    experience = Experience.of(one, need_logprobs=True)
    experience.advantages = [0.5, -1.0, 2.0, 2.0]
    found = describe(experience, say)
    assert found["prompt"] == "ab"
    assert found["response"] == [
        {"mask": 1, "text": "cd", "advantages": [0.5, -1.0]},
        {"mask": 0, "text": "e"},
        {"mask": 1, "text": "f", "advantages": 2.0},
        {"mask": 0, "text": "abg", "segment": 1},
        {"mask": 1, "text": "h", "segment": 1, "advantages": 2.0},
    ]
    assert (found["rewards"], found["turn_rewards"]) == ({"gt": 1.0, "format": None}, [0.0, 0.0, 2.0])
    text = found["prompt"] + "".join(piece["text"] for piece in found["response"])
    assert text == say(one.tokens)  # nothing is left out


def test_an_episode_that_failed_before_its_first_token_is_shown_too():
    ids = {"trajectory_id": "t", "group_id": "g", "task_id": "k", "env_id": "E-v0", "task_index": 0}
    found = describe(Experience.of(Trajectory(**ids, error="Traceback: boom"), need_logprobs=False), say)
    assert (found["prompt"], found["response"], found["error"]) == ("", [], "Traceback: boom")


def test_the_best_the_worst_and_one_at_random(episode):
    many = [episode((0, [1]), (1, [2]), name=f"t{i}", reward=reward) for i, reward in enumerate([1, 5, -2, 5, 0])]
    many[3].error = "Traceback: boom"  # its reward is not known
    experiences = experiences_of(many, need_logprobs=True)
    drawn = set()
    for step in range(1, 30):
        found = debug_samples(step, experiences, say, seed=0)
        by = {why: line["trajectory_id"] for line in found for why in line["why"]}
        assert (by["best"], by["worst"]) == ("t1", "t2")
        assert all(line["step"] == step for line in found)
        assert len({line["trajectory_id"] for line in found}) == len(found)
        assert found == debug_samples(step, experiences, say, seed=0)
        drawn.add(by["random"])
    assert drawn == {"t0", "t1", "t2", "t3", "t4"}
    assert debug_samples(1, [], say, seed=0) == []


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_a_run_shows_samples_of_every_so_many_steps(settings, tiny_renderer):
    config = settings("grpo", max_steps=5, debug_mode=True, debug_interval=2)
    train(config)
    lines = lines_of(Path(config.output_dir) / "debug.jsonl")
    assert sorted({line["step"] for line in lines}) == [1, 3, 5]
    stored = {}
    for file in (Path(config.output_dir) / "trajectories").iterdir():
        stored |= {line["trajectory_id"]: line for line in lines_of(file)}
    for line in lines:
        one = stored[line["trajectory_id"]]
        said = [piece["text"] for piece in line["response"] if piece["mask"]]
        ids = [token for token, mask in zip(one["tokens"], one["response_mask"], strict=True) if mask]
        assert said == [tiny_renderer.tokenizer.decode(ids)]
        assert "<|im_start|>assistant" in line["prompt"]
        assert line["reward"] == one["reward"]
    best = [line for line in lines if "best" in line["why"]]
    assert all(line["response"][0]["advantages"] >= 0 for line in best)


def test_without_debug_mode_nothing_is_shown(settings, config):
    plain = settings("grpo", max_steps=2)
    train(plain)
    assert not (Path(plain.output_dir) / "debug.jsonl").exists()
    with pytest.raises(ConfigError, match="debug_interval: debug_mode is false, so no samples are written"):
        config(debug_interval=3)


# --- numbers that are not finite --------------------------------------------------------------------------------------


def test_the_batch_that_broke_the_numbers_is_written_down(trainer, monkeypatch):
    made = trainer(max_steps=3, beta=0.05)
    plain = made.algorithm.loss

    def broken(tokens):
        losses = plain(tokens)
        if made.step == 1:
            losses.loss.data.mul_(math.nan)
        return losses

    monkeypatch.setattr(made.algorithm, "loss", broken)
    kept = []
    made.on_step = lambda line: kept.append([p.detach().clone() for p in made.model.parameters()])
    with pytest.raises(RunError, match=r"the loss is nan .*; the batch is in .*nonfinite_step_000002\.jsonl"):
        made.train(Path(made.config.model))
    assert all(torch.equal(a, b) for a, b in zip(kept[-1], made.model.parameters(), strict=True))  # as after step 1
    assert [line["step"] for line in made.run.read_metrics()] == [1]
    lines = lines_of(made.run.path / "nonfinite_step_000002.jsonl")
    assert len(lines) == 16
    for line in lines:
        one = Trajectory.model_validate(line["trajectory"])
        count = one.sampled_tokens
        names = ("places", "advantages", "sampler_logprobs", "old_logprobs", "weights")
        assert [len(line[name]) for name in names] == [count] * 5
        assert line["old_logprobs"] == [value for value in one.logprobs if value is not None]
        assert line["reward"] == one.reward


def test_numbers_that_are_not_finite_are_written_as_what_they_are(episode):
    (experience,) = experiences_of([episode((0, [1]), (1, [2, 3]))], [0.5], need_logprobs=True)
    experience.old_logprobs = [math.nan, -math.inf]
    (line,) = whole_batch([experience])
    first, second = json.loads(json.dumps(line))["old_logprobs"]
    assert math.isnan(first)
    assert second == -math.inf
