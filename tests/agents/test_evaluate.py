"""Evaluation: counts by hand, the interval against published values and against the test it inverts."""

import json
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtune.agents import FunctionAgent, ScriptedAgent, Trajectory, Turn, env_factory
from gymtune.agents.evaluate import Evaluation, evaluate, wilson_interval, write_evaluations
from gymtune.agents.trajectory import ToolUse
from gymtune.envs import make_env
from gymtune.tools.errors import ConfigError, RunError

CALCULATOR = "gymtune/Calculator-v0"
Z = 1.959963984540054
EXACT = 1e-12
FOUR_DIGITS = 5e-5  # the published values are rounded


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),  # z^2 / (n + z^2) = 3.8415 / 13.8415
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (1, 29, 0.0061, 0.1718),  # Newcombe, Statist. Med. 17 (1998), table I, method 3
        (15, 148, 0.0624, 0.1605),  # the same table
        (81, 263, 0.2553, 0.3662),  # the same table
        (0, 20, 0.0, 0.1611),  # the same table
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_has_the_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=FOUR_DIGITS)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_each_bound_is_where_the_score_test_just_rejects(case: tuple[int, int]) -> None:
    successes, n = case
    low, high = wilson_interval(successes, n)
    p = successes / n
    assert 0 <= low <= p + EXACT
    assert p - EXACT <= high <= 1
    for bound in (low, high):
        assert abs(p - bound) == pytest.approx(Z * sqrt(max(bound * (1 - bound), 0) / n), abs=1e-7)
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=EXACT)


def episode(
    rewards: dict[str, float | None], *, turns: int = 1, outcomes: tuple[str, ...] = (), **fields
) -> Trajectory:
    """A finished episode whose last turn earned all of `gt` and made all calls."""
    made = [Turn(start=0, end=0, text="", finish_reason="stop") for _ in range(turns)]
    made[-1].reward = rewards.get("gt") or 0.0
    made[-1].tools = [ToolUse(name="calculator", outcome=outcome) for outcome in outcomes]
    ids = dict.fromkeys(("trajectory_id", "group_id", "task_id", "env_id"), "x")
    return Trajectory(**ids, task_index=0, turns=made, rewards=rewards, **fields)


def test_every_number_by_hand() -> None:
    found = Evaluation.of(
        [
            episode({"gt": 1.0, "failed_calls": -1.0}, turns=3, outcomes=("ok", "parse_error"), success=True),
            episode({"gt": 0.0}, turns=2, outcomes=("truncated", "parse_error", "timeout"), success=False),
            episode({"unfinished": -1.0}, truncated=True),
            episode({"gt": 1.0}, success=True, turns=2),
            episode({"gt": None}),  # the checker broke: left out
            episode({"gt": 1.0}, success=True, error="Traceback\nRuntimeError: gone"),  # left out
        ],
        seconds=2.5,
    )
    assert (found.episodes, found.successes, found.failed, found.broken, found.seconds) == (4, 2, 1, 1, 2.5)
    assert (found.success_rate, found.reward, found.turns, found.truncated) == (0.5, 0.5, 2.0, 0.25)
    assert found.rewards == {"gt": 0.5, "failed_calls": -0.25, "unfinished": -0.25}
    assert found.tool_calls == 5 / 4
    assert found.tool_failures == {"parse_error": 2, "timeout": 1}
    assert found.interval == wilson_interval(2, 4)
    assert found.percent == "50.0 [15.0, 85.0]"  # (0.5 + 0.4802 -+ 1.96 sqrt(0.0625 + 0.06003)) / 1.9604


def test_nothing_to_score_is_an_error_with_its_cause() -> None:
    with pytest.raises(RunError, match="none of 1 episodes could be scored, the first one: RuntimeError: gone"):
        Evaluation.of([episode({}, error="Traceback\nRuntimeError: gone")], 1.0)
    with pytest.raises(RunError, match="none of 1 episodes could be scored, the first one: the checker could not tell"):
        Evaluation.of([episode({"gt": None})], 1.0)


def test_the_gold_agent_succeeds_with_the_calls_that_are_needed() -> None:
    env = make_env(CALCULATOR)
    needed = [env.tasks[index].metadata["calls_needed"] for index in range(30)]
    seen = []
    found = evaluate(CALCULATOR, ScriptedAgent(), 30, on_finish=seen.append)
    assert (found.episodes, found.successes, found.success_rate, found.reward) == (30, 30, 1.0, 1.0)
    assert found.tool_calls == sum(needed) / 30
    assert found.turns == sum(calls + 1 for calls in needed) / 30
    assert found.tool_failures == {}
    assert sorted(t.task_index for t in seen) == list(range(30))


def test_an_agent_that_crashes_on_some_tasks_is_scored_on_the_others() -> None:
    def answer(messages) -> str:
        if "-" in messages[-1]["content"]:
            raise RuntimeError("no minus")
        return "no idea"

    found = evaluate("gymtune/Arithmetic-v0", FunctionAgent(answer), 10)
    assert (found.episodes, found.failed, found.successes) == (10, 0, 0)
    make = env_factory("gymtune/Arithmetic-v0", FunctionAgent(answer), {"levels": [2]})
    found = evaluate(make, FunctionAgent(answer), 40)
    minus = sum("-" in str(make().tasks[index].messages) for index in range(40))
    assert 0 < minus < 40
    assert (found.episodes, found.failed) == (40 - minus, minus)


def test_more_tasks_than_there_are_is_refused() -> None:
    make = env_factory(CALCULATOR, ScriptedAgent(), {"size": 5})
    with pytest.raises(ConfigError, match="6 tasks are wanted, the env has 5"):
        evaluate(make, ScriptedAgent(), 6)


def test_a_model_evaluated_twice_gives_the_same_numbers_and_another_seed_others(tiny_model: Path) -> None:
    from gymtune.agents.loading import load_agent, make_sampling

    agent = load_agent(tiny_model, make_sampling(max_new_tokens=6))

    def texts(seed: int) -> list[str]:
        seen = []
        evaluate("gymtune/Arithmetic-v0", agent, 8, seed=seed, on_finish=seen.append)
        return [t.turns[0].text for t in sorted(seen, key=lambda t: t.task_index)]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)
    agent.sampling = make_sampling(max_new_tokens=6, temperature=0.0)
    assert texts(0) == texts(1)


def test_evaluations_are_written_as_json(tmp_path: Path) -> None:
    found = evaluate(CALCULATOR, ScriptedAgent(), 4)
    write_evaluations(tmp_path / "new" / "e.json", {"env": CALCULATOR}, {"gold": {"sampled": found}})
    written = json.loads((tmp_path / "new" / "e.json").read_text())
    assert written["env"] == CALCULATOR
    assert written["models"]["gold"]["sampled"] == found.to_dict()
    with pytest.raises(ConfigError, match="cannot write"):
        write_evaluations(tmp_path / "new" / "e.json" / "below", {}, {})
