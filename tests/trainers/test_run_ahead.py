"""Sampling ahead: what is sampled when, what is too old, and what comes of errors."""

import threading
from collections.abc import Callable

import pytest

from gymtune.agents.trajectory import Trajectory
from gymtune.tools.errors import ConfigError, RunError
from gymtune.trainers import TrainConfig
from gymtune.trainers.run_ahead import RunAhead, ages, drop_stale

WAIT = 10.0  # seconds until a thread that should have come is given up


def episode(*turns: tuple[int, int, list[tuple[int, int, int]]]) -> Trajectory:
    """An episode of turns (version, number of tokens, spans counted in the turn)."""
    made = Trajectory(trajectory_id="t", group_id="g", task_id="task", env_id="e", task_index=0)
    made.start_segment()
    for version, length, spans in turns:
        made.append_context([1, 2])
        made.append_turn("x", "stop", [3] * length, [-1.0] * length, policy_version=version, policy_spans=spans)
    return made


class Sampling:
    """Stands for the sampler: each step waits until it is let through, and notes when it began."""

    def __init__(self) -> None:
        self.began = {step: threading.Event() for step in range(10)}
        self.through = {step: threading.Event() for step in range(10)}
        self.order: list[int] = []

    def __call__(self, step: int):
        self.order.append(step)
        self.began[step].set()
        assert self.through[step].wait(WAIT)
        return [], {"step": float(step)}

    def let(self, *steps: int) -> None:
        for step in steps:
            self.through[step].set()


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_next_steps_are_sampled_while_one_trains_and_no_further(ahead):
    sampling = Sampling()
    runner = RunAhead(sampling, ahead, steps=5)
    sampling.let(0)
    assert runner.take(0)[1] == {"step": 0.0}
    for step in range(1, ahead + 1):  # step 0 trains now
        assert sampling.began[step].wait(WAIT)
        sampling.let(step)
    assert not sampling.began[ahead + 1].wait(0.05)
    assert runner.take(1)[1] == {"step": 1.0}
    assert sampling.began[ahead + 1].wait(WAIT)
    sampling.let(*range(10))
    assert [runner.take(step)[1]["step"] for step in (2, 3, 4)] == [2.0, 3.0, 4.0]
    runner.close()
    assert sampling.order == [0, 1, 2, 3, 4]


def test_without_running_ahead_it_is_called_in_turn_by_the_caller():
    threads = []

    def sample(step: int):
        threads.append((step, threading.current_thread()))
        return [], {}

    runner = RunAhead(sample, 0, steps=5)
    runner.take(0)
    assert threads == [(0, threading.main_thread())]
    runner.take(1)
    assert [step for step, _ in threads] == [0, 1]
    runner.close()


def test_an_error_is_raised_at_the_step_that_wanted_the_episodes():
    def sample(step: int):
        if step == 1:
            raise RunError("the servers are gone")
        return [], {}

    runner = RunAhead(sample, 2, steps=5)
    runner.take(0)
    with pytest.raises(RunError, match="the servers are gone"):
        runner.take(1)
    runner.close()


def test_closing_forgets_what_waits():
    sampling = Sampling()
    runner = RunAhead(sampling, 3, steps=10)
    sampling.let(0)
    runner.take(0)
    assert sampling.began[1].wait(WAIT)
    sampling.let(1, 2)
    runner.close()
    assert sampling.order[-1] <= 2  # one may have begun in the meantime


def test_ages_count_the_tokens_of_each_version():
    made = episode((4, 3, [(4, 0, 1), (6, 1, 3)]), (6, 2, []))
    assert ages(made, 7) == [(3, 1), (1, 2), (1, 2)]
    assert made.turns[0].policy_spans == [(4, 2, 3), (6, 3, 5)]  # counted in the trajectory's tokens


def test_episodes_with_a_token_that_is_too_old_fail():
    old, fresh = episode((4, 3, [(4, 0, 1), (6, 1, 3)])), episode((6, 2, []))
    kept, metrics = drop_stale([old, fresh], 7, 2)
    assert [one.error is not None for one in kept] == [True, False]
    assert kept[0].reward is None
    assert old.error is None  # what was written stays as it was
    assert metrics == {"staleness/mean": (3 + 2 + 2) / 5, "staleness/max": 3.0, "staleness/dropped": 1.0}
    kept, metrics = drop_stale([old, fresh], 7, None)
    assert kept == [old, fresh]
    assert metrics["staleness/dropped"] == 0


def test_nothing_sampled_is_not_stale():
    assert drop_stale([episode()], 3, 0)[1] == {"staleness/mean": 0.0, "staleness/max": 0.0, "staleness/dropped": 0.0}


SERVED = {"backend": "sglang", "sglang_url": ["http://127.0.0.1:9"]}
CORRECTED = {"importance_sampling_correction": "token_truncate"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_staleness": 1}, "backend is torch"),
        (SERVED | {"max_staleness": 1}, "importance_sampling_correction"),
        (SERVED | CORRECTED | {"max_staleness": 1, "drop_staleness": 1}, "never drops"),
        (SERVED | CORRECTED | {"trajectories": "t", "eval_steps": 1, "max_staleness": 1}, "trajectories are stored"),
        (SERVED | {"layers": "plain"}, "backend is sglang"),
        ({"backend": "sglang"}, "one of both"),
        (SERVED | {"sglang_launch": True}, "one of both"),
        (SERVED | {"sglang_python": "python3"}, "no server is started"),
        (SERVED | {"weight_sync": "adapter"}, "lora_r is none"),
        ({"sglang_url": ["http://127.0.0.1:9"]}, "backend is torch"),
    ],
)
def test_keys_of_servers_that_contradict_are_refused(config: Callable[..., TrainConfig], changes, told):
    with pytest.raises(ConfigError, match=told):
        config("grpo", **changes)


def test_keys_of_servers_that_fit(config: Callable[..., TrainConfig]):
    assert config("grpo", **SERVED, **CORRECTED, max_staleness=2, drop_staleness=1).max_staleness == 2
    assert config("dpo", **SERVED, max_staleness=1).max_staleness == 1  # its loss has no sampler in it
