"""What a step samples: tasks and seeds by step, groups that teach nothing replaced, faults told before any update."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gymtune.agents import TextAgent, Trajectory, derive_seed, env_factory, read_trajectories
from gymtune.agents.scorer import Scorer, function_part
from gymtune.envs import make_env
from gymtune.envs.chat_env import ChatEnv
from gymtune.tools.errors import ConfigError, RunError
from gymtune.trainers.collecting import StepSampler, teaches
from gymtune.trainers.run_folder import RunFolder

ENV = "gymtune/Arithmetic-v0"
PROMPTS, SAMPLES = 5, 4


class Pupil(TextAgent):
    """Answers a task as `knows(task_index, sample)` says; an unknown answer is None and crashes."""

    def __init__(self, knows: Callable[[int, int], bool | None]) -> None:
        super().__init__()
        self.knows = knows

    def write(self, trajectory: Trajectory, env: ChatEnv) -> str:
        knows = self.knows(trajectory.task_index, trajectory.sample)
        if knows is None:
            raise RuntimeError("no connection")
        return str(trajectory.gt) if knows else "none"


def mixed(task: int, sample: int) -> bool:
    """One task in three divides its group: 0 is never right, 1 always, 2 for every other sample."""
    return (False, True, sample % 2 == 0)[task % 3]


@pytest.fixture
def sampler(config: Any, tmp_path: Path) -> Callable[..., StepSampler]:
    """Make a sampler of 5 groups of 4; what `knows` says is what the agent answers."""

    def make(
        knows: Callable[[int, int], bool | None] = mixed, scorer: Scorer | None = None, env: Any = None, **changes: Any
    ) -> StepSampler:
        settings = config(prompts_per_step=PROMPTS, num_generations=SAMPLES, **changes)
        agent = Pupil(knows)
        run = RunFolder(tmp_path / "run")
        run.path.mkdir(exist_ok=True)
        (run.path / "run_id").write_text("run")
        return StepSampler(settings, env or env_factory(ENV, agent), agent, scorer or Scorer([]), run)

    return make


def drawn(seed: int, step: int) -> Any:
    """Yield the tasks of a step, one after the other, without the sampler."""
    rng, env = Random(derive_seed(seed, "tasks", step)), make_env(ENV)
    while True:
        yield env.draw_task(rng, 0.0)


def groups_of(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.values())


def seen(trajectories: list[Trajectory]) -> list[tuple[Any, ...]]:
    return [(t.trajectory_id, t.seed, t.task_index, t.reward) for t in trajectories]


# --- which episodes -------------------------------------------------------------------------------------------------


def test_a_step_is_whole_groups_of_the_tasks_that_its_seed_draws(sampler: Any) -> None:
    made = sampler()
    heard: list[Trajectory] = []
    made.on_episode = heard.append
    trajectories, metrics = made.sample(2)
    tasks = drawn(0, 2)
    assert [group[0].task_index for group in groups_of(trajectories)] == [next(tasks) for _ in range(PROMPTS)]
    assert [[t.sample for t in group] for group in groups_of(trajectories)] == [[0, 1, 2, 3]] * PROMPTS
    assert metrics == {}
    assert {t.trajectory_id for t in heard} == {t.trajectory_id for t in trajectories}
    stored = list(read_trajectories(made.run.path / "trajectories" / "step_000003.jsonl"))
    assert seen(stored) == seen(trajectories)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_a_function_of_seed_and_step(sampler: Any, dynamic: bool) -> None:
    first = sampler(dynamic_sampling=dynamic)
    again = sampler(dynamic_sampling=dynamic)
    steps = [seen(first.sample(step)[0]) for step in (0, 1)]
    assert seen(again.sample(1)[0]) == steps[1]  # without the step before it
    assert steps[0] != steps[1]
    assert seen(sampler(dynamic_sampling=dynamic, seed=1).sample(1)[0]) != steps[1]


def test_progress_of_the_run_is_told_to_the_env(sampler: Any) -> None:
    told = []

    def watched() -> ChatEnv:
        env = make_env(ENV)
        plain = env.draw_task
        env.draw_task = lambda rng, progress: told.append(progress) or plain(rng, progress)
        return env

    made = sampler(env=watched, max_steps=8)
    for step in (0, 6):
        made.sample(step)
    assert told == [0.0] * PROMPTS + [0.75] * PROMPTS


# --- dynamic sampling -----------------------------------------------------------------------------------------------


def test_groups_that_teach_nothing_give_way_to_new_tasks(sampler: Any) -> None:
    """Against a loop that keeps the books task by task."""
    for step in range(6):
        trajectories, metrics = sampler(dynamic_sampling=True, max_resampling=20).sample(step)
        tasks, sampled, kept, rounds = drawn(0, step), [], [], -1
        while len(kept) < PROMPTS:
            new = [next(tasks) for _ in range(PROMPTS - len(kept))]
            sampled += new
            kept += [task for task in new if task % 3 == 2]
            rounds += 1
        assert [group[0].task_index for group in groups_of(trajectories)] == kept
        assert len({t.trajectory_id for t in trajectories}) == PROMPTS * SAMPLES
        assert len({group[0].seed for group in groups_of(trajectories)}) == PROMPTS
        reward = sum((0, 1, 0.5)[task % 3] for task in sampled) / len(sampled)
        assert metrics == {
            "dynamic_sampling/rounds": rounds,
            "dynamic_sampling/kept": PROMPTS,
            "dynamic_sampling/sampled": len(sampled),
            "dynamic_sampling/reward": pytest.approx(reward),
        }


def test_what_teaches_at_once_is_sampled_once(sampler: Any) -> None:
    def divided(task: int, sample: int) -> bool:
        return sample == 0

    trajectories, metrics = sampler(divided, dynamic_sampling=True).sample(0)
    assert seen(trajectories) == seen(sampler(divided).sample(0)[0])
    assert (metrics["dynamic_sampling/rounds"], metrics["dynamic_sampling/sampled"]) == (0, PROMPTS)


def test_where_nothing_teaches_the_rounds_end_and_the_shape_stays(sampler: Any) -> None:
    trajectories, metrics = sampler(lambda task, sample: True, dynamic_sampling=True, max_resampling=2).sample(0)
    assert seen(trajectories) == seen(sampler(lambda task, sample: True).sample(0)[0])  # those of the first round
    assert metrics["dynamic_sampling/rounds"] == 2
    assert metrics["dynamic_sampling/kept"] == 0
    assert metrics["dynamic_sampling/sampled"] == 3 * PROMPTS


def test_too_few_that_teach_stand_before_those_that_do_not(sampler: Any) -> None:
    def one_in_nine(task: int, sample: int) -> bool | None:
        return None if task % 2 else sample == 0 and task % 9 == 0

    made = sampler(one_in_nine, dynamic_sampling=True, max_resampling=1)
    for step in range(8):
        trajectories, metrics = made.sample(step)
        groups = groups_of(trajectories)
        assert len(groups) == PROMPTS
        kinds = [
            "teaches" if g[0].task_index % 18 == 0 else "failed" if g[0].task_index % 2 else "dull" for g in groups
        ]
        assert kinds == sorted(kinds, key=["teaches", "dull", "failed"].index)
        assert metrics["dynamic_sampling/kept"] == kinds.count("teaches") < PROMPTS


def test_what_a_group_teaches(config: Any, episode: Any) -> None:
    def group(*rewards: float | None) -> list[Trajectory]:
        made = [episode((0, [1]), (1, [2]), name=f"t{i}", reward=r or 0.0) for i, r in enumerate(rewards)]
        for trajectory, reward in zip(made, rewards, strict=True):
            trajectory.error = "crash" if reward is None else None
        return made

    assert teaches(group(0.0, 1.0, 1.0), config())
    assert not teaches(group(1.0, 1.0, 1.0), config())
    assert not teaches(group(1.0, None, 1.0), config())  # a crash is no reward of 0
    assert not teaches(group(1.0, None, None), config())
    assert teaches(group(0.0, None, 1.0), config())
    assert not teaches(group(0.0, None, 1.0), config(min_group_size=3))
    assert not teaches(group(None, None), config())


def test_with_credit_by_turn_the_turns_are_compared(config: Any, episode: Any) -> None:
    early, late = (episode((0, [1]), (1, [2]), (0, [3]), (1, [4]), name=name) for name in "ab")
    early.turns[0].reward = late.turns[1].reward = 1.0
    assert not teaches([early, late], config())
    assert teaches([early, late], config(credit="turn"))
    assert not teaches([early, early], config(credit="turn"))


def test_groups_are_scored_before_they_are_compared(sampler: Any) -> None:
    """The env's rewards are equal, the function's are not."""
    calls = []

    def halves(completions: list[Any]) -> list[float]:
        calls.append(len(completions))
        return [float(place % 2) for place in range(len(completions))]

    scorer = Scorer([function_part("halves", 1.0, halves)])
    trajectories, metrics = sampler(lambda task, sample: True, scorer, dynamic_sampling=True).sample(0)
    assert calls == [PROMPTS * SAMPLES]
    assert metrics["dynamic_sampling/kept"] == PROMPTS
    assert [t.reward for t in trajectories] == [1.0, 2.0] * (PROMPTS * SAMPLES // 2)


# --- faults ---------------------------------------------------------------------------------------------------------


def returns(value: Any) -> Scorer:
    def wrong(completions: list[Any]) -> Any:
        if value == "crash":
            raise KeyError("lost")
        return [value] * len(completions) if value != "three" else [0.0] * 3

    return Scorer([function_part("wrong", 1.0, wrong)])


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            float("nan"),
            RunError,
            r"step 1: no episode has a reward, for wrong broke in every one \(wrong: ValueError: a ",
        ),
        ("0.5", RunError, r"wrong broke in every one \(wrong: ValueError: a score must be a finite number .*'0\.5'\)"),
        ("crash", RunError, r"wrong broke in every one \(wrong: KeyError: 'lost'\); nothing can be learnt"),
        ("three", ConfigError, r"reward function 'wrong' must return 20 scores, got 3"),
    ],
)
def test_a_function_that_returns_something_else_stops_the_step(
    sampler: Any, value: Any, error: type[Exception], message: str
) -> None:
    for dynamic in (False, True):
        heard: list[Trajectory] = []
        made = sampler(mixed, returns(value), dynamic_sampling=dynamic)
        made.on_episode = heard.append
        with pytest.raises(error, match=message):
            made.sample(0)
        assert len(heard) == PROMPTS * SAMPLES  # nothing is sampled anew where nobody has a reward


def test_episodes_that_all_fail_stop_the_step_and_leave_the_reason(sampler: Any) -> None:
    made = sampler(lambda task, sample: None, dynamic_sampling=True)
    with pytest.raises(
        RunError, match="step 1: all 20 episodes failed, the first one with: RuntimeError: no connection"
    ):
        made.sample(0)
    (first, *_) = read_trajectories(made.run.path / "trajectories" / "step_000001.jsonl")
    assert "no connection" in (first.error or "")
