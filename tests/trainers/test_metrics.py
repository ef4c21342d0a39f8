"""Metrics of a step, counted by hand."""

import pytest

from gymtune.agents import ToolUse
from gymtune.trainers.metrics import episode_metrics


@pytest.fixture
def step(episode):
    """Two groups of two, and one episode that failed: 1, 2, 4 and 1 sampled tokens; calls in two episodes."""
    made = [
        episode((0, [3]), (1, [5]), name="a0", group="a", reward=1.0, success=True),
        episode((0, [3]), (1, [5, 0]), name="a1", group="a", reward=0.0, success=False),
        episode((0, [3]), (1, [5, 6]), (0, [7]), (1, [5, 0]), name="b0", group="b", reward=2.0, success=True),
        episode((0, [3]), (1, [5]), name="b1", group="b", reward=2.0, truncated=True),
        episode((0, [3]), (1, [5] * 9), name="x", group="b", reward=50.0, error="Traceback"),
    ]
    for trajectory, gt in zip(made, (1.0, 0.0, 1.0, None, 1.0), strict=True):
        trajectory.rewards = {"gt": gt}
    made[0].rewards["form"] = 0.5
    made[2].turns[0].tools = [ToolUse(name="calc", outcome=outcome) for outcome in ("ok", "truncated", "timeout")]
    made[0].turns[0].tools = [ToolUse(name="calc", outcome="parse_error")]
    made[4].turns[0].tools = [ToolUse(name="calc", outcome="exception")]
    return made


def test_by_hand(step):
    assert episode_metrics(step) == pytest.approx(
        {
            "episodes/failed": 1.0,
            "episodes/broken": 1.0,
            "reward": 1.0,  # of 1, 0 and 2: b1 is broken, x failed
            "reward_std": 0.5**0.5,  # of the one group with two known rewards, 1 and 0
            "frac_reward_zero_std": 0.5,
            "rewards/gt/mean": 2 / 3,
            "rewards/gt/std": (2 / 9) ** 0.5,
            "rewards/form/mean": 0.125,  # what did not fire counts 0
            "rewards/form/std": (3 * 0.125**2 + 0.375**2) ** 0.5 / 2,
            "success": 0.5,
            "completions/mean_length": 2.0,
            "completions/min_length": 1.0,
            "completions/max_length": 4.0,
            "completions/clipped_ratio": 0.25,
            "episodes/mean_turns": 1.25,
            "tools/call_frequency": 1.0,
            "tools/failure_frequency": 0.5,
            "tools/timeout": 0.25,
            "tools/parse_error": 0.25,
        },
        rel=1e-12,
    )


def test_unknown_rewards_are_no_rewards(step):
    metrics = episode_metrics([step[3]])
    assert metrics["episodes/broken"] == 1.0
    assert not {"reward", "reward_std", "rewards/gt/mean"} & metrics.keys()


def test_without_calls_nothing_failed(step):
    assert episode_metrics([step[1]])["tools/failure_frequency"] == 0.0


def test_all_failed(step):
    assert episode_metrics([step[4]]) == {"episodes/failed": 1.0}
