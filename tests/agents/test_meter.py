"""What a progress display says, by hand."""

import pytest

from gymtune.agents import Trajectory, Turn, meter
from gymtune.agents.meter import Meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(meter, "monotonic", lambda: now[0])
    return now


def episode(reward: float, tokens: int, error: str | None = None) -> Trajectory:
    ids = dict.fromkeys(("trajectory_id", "group_id", "task_id", "env_id"), "x")
    made = Trajectory(**ids, task_index=0, error=error)
    made.start_segment()
    made.append_context([1, 2, 3])
    made.append_turn("", "stop", [0] * tokens, [0.0] * tokens)
    made.turns[0] = Turn(start=3, end=3 + tokens, text="", finish_reason="stop", reward=reward)
    return made


def test_episodes_count_sampled_tokens_and_leave_failed_ones_out_of_the_mean(clock: list[float]) -> None:
    counted = Meter(10, done=4)
    clock[0] += 2
    assert counted.episode(episode(0.0, 0, "gone")) == "reward -  0 tokens/s"
    assert counted.episode(episode(1.0, 30)) == "reward 1.000  15 tokens/s"
    clock[0] += 2
    assert counted.episode(episode(0.5, 10)) == "reward 0.750  10 tokens/s"
    assert counted.done == 7
    assert counted.seconds_left == 4.0  # 4 s for 3 episodes, 3 more to go


def test_steps_show_what_is_there_and_the_tokens_of_the_step(clock: list[float]) -> None:
    counted = Meter(40)
    line = {"reward": 0.25, "success": 0.5, "loss": -0.125, "grad_norm": 1.0}
    clock[0] += 3
    first = counted.step({"step": 10, "num_tokens": 1000, "step_time": 0.5} | line)  # resumed at step 9
    assert first == "reward 0.2500  success 0.5000  loss -0.1250  200 tokens/s"
    second = counted.step({"step": 11, "num_tokens": 1300, "step_time": 2.0, "loss": 1.5})
    assert second == "loss 1.5000  150 tokens/s"
    assert counted.seconds_left == pytest.approx(3 / 2 * 29)
