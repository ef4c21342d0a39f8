"""Evaluation in training: held-out tasks, the same numbers for the same weights, the best model, nothing disturbed."""

import json
from pathlib import Path

import pytest

from gymtune.agents import ScriptedAgent
from gymtune.envs import make_env
from gymtune.envs.arithmetic import held_out
from gymtune.tools.errors import ConfigError, RunError
from gymtune.trainers import train
from gymtune.trainers.evaluation import HeldOut, evaluation_metrics, held_out_env, keep_best
from gymtune.trainers.run_folder import RunFolder

CLOCK = {"step_time", "time/rollout", "time/eval"}
FP64 = 1e-12


def lines_of(run):
    lines = (json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


# --- what the episodes say --------------------------------------------------------------------------------------------


@pytest.fixture
def scored(episode):
    """Return a function: episodes of these successes, of 1, 2, 3, ... sampled tokens, that earned 1 for a success."""

    def make(*successes):
        found = []
        for number, success in enumerate(successes, 1):
            one = episode((0, [3]), (1, [5] * number), name=f"t{number}", reward=float(success is True))
            one.success = success
            one.rewards = {"gt": float(success is True)}
            found.append(one)
        return found

    return make


def test_success_has_its_interval_and_what_was_not_scored_is_left_out(scored):
    episodes = scored(True, False, True, False, True, True)
    episodes[3].error, episodes[5].rewards = "Traceback: boom", {"gt": None}
    found = evaluation_metrics(episodes, 1.5)
    p, n, z = 3 / 4, 4, 1.959963984540054  # of 1, 2, 3 and 5 tokens; Wilson's interval, written out
    centre, half = (p + z * z / (2 * n)) / (1 + z * z / n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    half /= 1 + z * z / n
    assert found == {
        "eval/success": p,
        "eval/success_low": pytest.approx(centre - half, abs=FP64),
        "eval/success_high": pytest.approx(centre + half, abs=FP64),
        "eval/reward": p,
        "eval/rewards/gt/mean": p,
        "eval/completions/mean_length": (1 + 2 + 3 + 5) / 4,
        "eval/unscored": 2.0,
        "time/eval": 1.5,
    }


def test_no_success_is_told_where_no_episode_tells_one(scored):
    found = evaluation_metrics(scored(None, None), 0.0)
    assert not [name for name in found if "success" in name]
    assert found["eval/reward"] == 0


def test_an_evaluation_in_which_everything_failed_is_an_error(scored):
    episodes = scored(True, True)
    for one in episodes:
        one.error = "Traceback\nZeroDivisionError: boom"
    with pytest.raises(RunError, match="evaluation: none of 2 episodes could be scored, the first one: ZeroDivision"):
        evaluation_metrics(episodes, 0.0)


# --- which tasks ------------------------------------------------------------------------------------------------------


def operands(make, n):
    env = make()
    return [env.tasks[index].metadata["operands"] for index in range(n)]


def test_an_env_with_splits_is_tried_on_its_test_tasks(config):
    make = held_out_env(config(eval_steps=1, env_args={"levels": [2], "split": "train"}), ScriptedAgent())
    assert all(held_out(*pair) for pair in operands(make, 30))
    assert max(max(pair) for pair in operands(make, 30)) > 9  # env_args hold but for the split


def test_eval_env_args_lie_over_both(config):
    settings = config(
        eval_steps=1, env_args={"levels": [2]}, eval_env_args={"levels": [1], "split": "train", "seed": 7}
    )
    make = held_out_env(settings, ScriptedAgent())
    assert max(max(pair) for pair in operands(make, 30)) <= 9
    assert not any(held_out(*pair) for pair in operands(make, 30))


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "gymtune/ToolUse-v0", "eval_tasks": 2},  # has no splits
        {"eval_env_args": {"split": "train"}},
    ],
)
def test_tasks_of_training_are_not_held_out(config, changes):
    with pytest.raises(
        ConfigError, match=r"would see the tasks of training: give another file or seed in eval_env_arg"
    ):
        held_out_env(config(eval_steps=3, **changes), ScriptedAgent())


def test_more_tasks_than_there_are_is_an_error_with_the_number(config):
    settings = config(eval_steps=1, eval_tasks=65, eval_env_args={"size": 60})
    with pytest.raises(ConfigError, match="eval_tasks is 65, the held-out env has 60 tasks: set eval_tasks=60"):
        HeldOut(held_out_env(settings, ScriptedAgent()), ScriptedAgent(), settings)


def test_a_trainer_without_held_out_tasks_says_so(trainer):
    made = trainer(eval_steps=1)
    with pytest.raises(ConfigError, match=r"eval_steps is 1, the trainer has nothing held out: set trainer\.held_out"):
        made.train(Path(made.config.model))


def test_the_same_weights_have_the_same_numbers(trainer):
    """Tasks and seeds are the same at every evaluation, whatever was sampled between."""
    made = trainer(eval_steps=1, eval_tasks=16)
    held = HeldOut(held_out_env(made.config, made.agent), made.agent, made.config)
    first = held.evaluate()
    made.collect()
    again = held.evaluate()
    assert {**first, "time/eval": 0} == {**again, "time/eval": 0}
    assert 0 < first["eval/completions/mean_length"] <= 4
    other = HeldOut(held_out_env(made.config, made.agent), made.agent, made.config.model_copy(update={"seed": 1}))
    assert other.evaluate()["eval/completions/mean_length"] != first["eval/completions/mean_length"]


# --- the best model ---------------------------------------------------------------------------------------------------


def offer(run, step, success, reward=0.0):
    told = {} if success is None else {"eval/success": success}
    metrics = {"step": step, "eval/reward": reward} | told
    return keep_best(run, metrics, lambda folder: (folder / "model").write_text(f"weights of step {step}"))


def test_the_best_by_success_stays_and_the_earlier_of_equals(tmp_path):
    run = RunFolder(tmp_path)
    kept = [offer(run, step, success) for step, success in enumerate([0.2, 0.1, 0.5, 0.5, 0.4])]
    assert kept == [True, False, True, False, False]
    assert (run.best / "model").read_text() == "weights of step 2"
    assert run.read_best() == {"step": 2, "success": 0.5, "reward": 0.0}
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_reward_decides_where_no_success_is_told(tmp_path):
    run = RunFolder(tmp_path)
    kept = [offer(run, 0, None, 1.0), offer(run, 1, None, 2.0), offer(run, 2, 0.0, 0.0), offer(run, 3, None, 9.0)]
    assert kept == [True, True, True, False]
    assert run.read_best() == {"step": 2, "success": 0.0, "reward": 0.0}


def test_a_torn_record_is_named(tmp_path):
    run = RunFolder(tmp_path)
    run.best.mkdir()
    (run.best / "best.json").write_text("{")
    with pytest.raises(RunError, match=r"best\.json: cannot read: .*; remove .*best"):
        offer(run, 1, 0.5)


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_a_run_is_evaluated_before_between_and_after_and_keeps_its_best(settings):
    config = settings("grpo", max_steps=5, eval_steps=2, eval_tasks=24, save_steps=1, save_total_limit=None)
    train(config)
    lines = {line["step"]: line for line in lines_of(config.output_dir)}
    evaluated = {step: line["eval/success"] for step, line in lines.items() if "eval/success" in line}
    assert list(evaluated) == [0, 2, 4, 5]
    assert set(lines[0]) == {name for name in lines[2] if name.startswith("eval/")} | {"step"}
    run = RunFolder(Path(config.output_dir))
    best = max(evaluated, key=evaluated.get)
    assert run.read_best() == {"step": best, "success": evaluated[best], "reward": lines[best]["eval/reward"]}
    source = run.checkpoint_path(best) if best else Path(config.model)
    files = [folder / "model.safetensors" for folder in (run.best, source)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (run.best / "tokenizer_config.json").is_file()


def test_an_evaluation_changes_nothing_of_the_training(settings):
    plain, tried = settings("grpo", "plain"), settings("grpo", "tried", eval_steps=1, eval_tasks=8)
    finished = [train(config) / "model.safetensors" for config in (plain, tried)]
    assert finished[0].read_bytes() == finished[1].read_bytes()
    seen = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines_of(tried.output_dir)[1:]]
    assert seen == lines_of(plain.output_dir)


def test_lines_between_are_written_where_there_is_an_evaluation(settings):
    config = settings("grpo", max_steps=4, eval_steps=2, eval_tasks=4, logging_steps=3)
    train(config)
    assert [line["step"] for line in lines_of(config.output_dir)] == [0, 2, 3, 4]


def test_the_scorer_pays_in_evaluations_too(trainer):
    from gymtune.agents.scorer import Scorer, function_part

    made = trainer(eval_steps=1, eval_tasks=4)
    scorer = Scorer([function_part("three", 2.0, lambda prompts, completions, **_: [3.0] * len(prompts))])
    held = HeldOut(lambda: make_env("gymtune/Arithmetic-v0"), made.agent, made.config, scorer)
    found = held.evaluate()
    assert found["eval/rewards/three/mean"] == 3.0
    assert found["eval/reward"] == pytest.approx(found["eval/rewards/gt/mean"] + 6.0, abs=FP64)
