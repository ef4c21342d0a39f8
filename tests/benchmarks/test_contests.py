"""Every contest runs at toy sizes, and both of its sides do the same work. What they took is not asked here."""

import json
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from contests import episodes, grpo_step, ragged
from contests.generation import generate
from contests.harness import Settings
from contests.shapes import MINIMIND, SMOLLM2, folder_of, open_ours, open_peer, question

from gymtune.agents import ModelAgent, Sampling
from gymtune.agents.rollout import env_factory, plan_episodes, run_episodes
from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.messages import user

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench.py"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(tmp_path_factory.mktemp("bench"), rounds=1, quick=True)


@pytest.fixture(scope="module")
def sides(settings: Settings):
    folder = folder_of(MINIMIND, settings)
    return *open_ours(folder), open_peer(folder)


def test_the_vocabulary_is_full_and_its_words_are_one_token_each(sides):
    model, renderer, _ = sides
    vocabulary = renderer.tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(model.config.vocab_size))
    assert renderer.stop_ids == model.config.eos_token_ids == (vocabulary["<|im_end|>"],)
    words = list(range(600, 640))
    assert renderer.tokenizer.encode(renderer.decode(words), add_special_tokens=False) == words


@pytest.mark.parametrize("tokens", [45, 680])
def test_a_question_has_the_tokens_it_is_asked_to_have(sides, tokens: int):
    renderer = sides[1]
    first, second = (renderer.prompt([user(question(renderer, tokens, seed))]) for seed in (1, 2))
    assert len(first) == len(second) == tokens
    assert first != second


def test_a_question_shorter_than_the_template_is_refused(sides):
    with pytest.raises(ValueError, match="shorter than the bare template"):
        question(sides[1], 2, 0)


def test_ragged_wishes_are_spread_evenly_from_16_to_the_longest(sides):
    lengths = sorted(wish.new_tokens for wish in ragged.ragged(sides[1], 32, 256))
    steps = {b - a for a, b in pairwise(lengths)}
    assert (lengths[0], lengths[-1], len(lengths)) == (16, 256, 32)
    assert steps <= {7, 8}


def test_nothing_ends_what_the_peer_samples(sides):
    peer = sides[2]
    rows = generate(peer, [[600, 601, 602], [700]], 40)
    assert [len(row) for row in rows] == [40, 40]
    assert peer.generation_config.eos_token_id is None


def test_episodes_of_both_sides_have_three_turns_of_the_same_lengths_that_end_by_the_stop_token(sides):
    model, renderer, peer = sides

    def turns(backend) -> list[list[int]]:
        planned = episodes.PlannedTurns(backend, renderer.stop_ids[0], (4, 9))
        agent = ModelAgent(planned, renderer, Sampling(max_new_tokens=9))
        make = env_factory(lambda: episodes.ToolEpisodes(238, renderer, 8), agent)
        found = run_episodes(make, agent, plan_episodes(range(4), 1, run_id="x", seed=0), concurrency=2)
        for trajectory in found:
            assert trajectory.error is None
            assert trajectory.turns[0].start == 238
            assert all(trajectory.tokens[turn.end - 1] == renderer.stop_ids[0] for turn in trajectory.turns)
            assert '"result": "34"' in trajectory.messages[3]["content"]
        return [[turn.end - turn.start for turn in trajectory.turns] for trajectory in found]

    ours = turns(TorchEngine(model))
    assert ours == turns(episodes.GenerateLoop(peer, 1)) == turns(episodes.GenerateLoop(peer, 2))
    assert {len(lengths) for lengths in ours} == {3}
    assert len({length for lengths in ours for length in lengths}) > 1
    assert {length for lengths in ours for length in lengths} <= set(range(4, 10))


def test_a_step_of_ours_samples_trains_and_moves_the_weights(settings: Settings):
    folder = folder_of(SMOLLM2, settings)
    renderer = open_ours(folder)[1]
    ours = grpo_step.Ours(folder, [question(renderer, 45, seed) for seed in range(4)], samples=4, new_tokens=5)
    before = ours.trainer.model.head_weight.clone()
    step = ours.step()
    assert step["tokens"] == [2 * 4 * 45, 2 * 4 * 5]
    assert 0 < step["rollout"] < step["seconds"]
    assert not ours.trainer.model.head_weight.equal(before)


@pytest.mark.parametrize("name", ["env_steps", "tiny", "ragged", "groups", "episodes", "padded_update", "floor"])
def test_contest_runs(settings: Settings, name: str):
    results = import_module(f"contests.{name}").run(settings)
    assert results
    for result in results:
        assert result.ours is not None
        assert result.ours > 0
        json.dumps(result.record(), allow_nan=False)


def test_without_a_peer_the_contest_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpo_step, "find_peer", lambda asked: None)
    results = grpo_step.run(settings)
    assert [result.ours is None for result in results] == [False, True] * 2
    assert "--peer-python" in results[1].note


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCH), *arguments], capture_output=True, text=True, check=False)


def test_the_command_writes_what_it_prints(tmp_path: Path):
    done = bench("--quick", "--only", "env", "--json", str(tmp_path / "new" / "bench.json"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert [result["contest"] for result in record["results"]] == ["env steps, gold episodes"]
    assert record["quick"] is True
    assert "env steps, gold episodes" in done.stdout


def test_an_unknown_contest_is_named():
    done = bench("--only", "ragged,raged")
    assert done.returncode == 2
    assert "no contest raged" in done.stderr
