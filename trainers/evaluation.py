"""Evaluation during training: the same held-out tasks with the same seeds every time, and the best model so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from ..agents.agent import Agent
from ..agents.backend import derive_seed
from ..agents.evaluate import Evaluation
from ..agents.rollout import env_factory, plan_episodes, run_episodes
from ..agents.scorer import Scorer
from ..agents.trajectory import Trajectory
from ..envs.arguments import takes_argument
from ..envs.chat_env import ChatEnv
from ..tools.errors import ConfigError, RunError
from .checkpoint import write_aside
from .config import TrainConfig
from .run_folder import RunFolder

OnStall = Callable[[list[str]], None]

_TOLD_RIGHT = ("eval/rewards/accuracies", "eval/accuracy")  # share of pairs, of DPO's kin and of a reward model


class HeldOut:
    """The held-out tasks of a run and the agent that is tried on them, at the temperature of training.

    Args:
        env: makes envs whose first `eval_tasks` tasks are held out (`held_out_env` does).
        agent: the policy.
        config: how many tasks, and the seed of what is sampled.
        scorer: what the env cannot score, as in training.

    Raises ConfigError when the env has fewer tasks.
    """

    def __init__(
        self, env: Callable[[], ChatEnv], agent: Agent, config: TrainConfig, scorer: Scorer | None = None
    ) -> None:
        self.env, self.agent, self.config, self.scorer = env, agent, config, scorer or Scorer([])
        probe = env()
        count = len(probe.tasks)
        probe.close()
        if count < config.eval_tasks:
            raise ConfigError(
                f"eval_tasks is {config.eval_tasks}, the held-out env has {count} tasks: set eval_tasks={count}"
            )

    def evaluate(self, on_stall: OnStall = lambda _: None) -> dict[str, float]:
        """Run one episode of each task and return `eval/*`; the policy is not changed, nor what is sampled next.

        Raises RunError when no episode could be scored.
        """
        config = self.config
        specs = plan_episodes(range(config.eval_tasks), 1, run_id="eval", seed=derive_seed(config.seed, "eval"))
        began = perf_counter()
        trajectories = run_episodes(
            self.env,
            self.agent,
            specs,
            concurrency=config.prompts_per_step * config.num_generations,
            on_stall=on_stall,
        )
        self.scorer.score(trajectories)
        return evaluation_metrics(trajectories, perf_counter() - began)


def evaluation_metrics(trajectories: list[Trajectory], seconds: float) -> dict[str, float]:
    """Return what an evaluation's episodes say: success with its Wilson 95 % interval, reward and parts, length.

    Episodes that failed or could not be scored are in `eval/unscored` and nowhere else. Where no episode tells of a
    success (an env that only a reward model pays) there is none, which is not a success of 0.
    """
    try:
        found = Evaluation.of(trajectories, seconds)
    except RunError as error:
        raise RunError(f"evaluation: {error}") from error
    values: dict[str, float] = {}
    if any(trajectory.success is not None for trajectory in trajectories):
        low, high = found.interval
        values = {"eval/success": found.success_rate, "eval/success_low": low, "eval/success_high": high}
    values["eval/reward"] = found.reward
    values |= {f"eval/rewards/{name}/mean": value for name, value in found.rewards.items()}
    scored = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    values["eval/completions/mean_length"] = fmean(trajectory.sampled_tokens for trajectory in scored)
    values["eval/unscored"] = float(found.failed + found.broken)
    return values | {"time/eval": seconds}


def held_out_env(
    config: TrainConfig, agent: Agent, reward_weights: Mapping[str, float] | None = None
) -> Callable[[], ChatEnv]:
    """Return a function that makes the env of a config with its held-out tasks.

    Its arguments are `env_args`, the split `test` where the env has splits, and `eval_env_args` over both. Raises
    ConfigError when the tasks turn out to be those of training, or an argument does not fit.
    """
    assert config.env is not None
    splits = {"split": "test"} if takes_argument(config.env, "split") else {}
    make = env_factory(config.env, agent, {**config.env_args, **splits, **config.eval_env_args}, reward_weights)
    held, trained = make(), env_factory(config.env, agent, config.env_args, reward_weights)()
    first = range(min(config.eval_tasks, len(held.tasks), len(trained.tasks)))
    alike = all(held.tasks[index].messages == trained.tasks[index].messages for index in first)
    held.close()
    trained.close()
    if alike:
        raise ConfigError(
            f"eval_steps is {config.eval_steps}, but the evaluation of env {config.env!r} would see the tasks of "
            "training: give another file or seed in eval_env_args (eval_env_args.data=FILE), or set eval_steps=0"
        )
    return make


def keep_best(run: RunFolder, metrics: Mapping[str, Any], save: Callable[[Path], None]) -> bool:
    """Let `save` write RUN/best when the evaluation in `metrics` beats the best so far; tell whether it did.

    Of tasks, by success, or by reward where no success is told. Of a file, by the share of pairs that are told right,
    and of equals, or where there are no pairs, by the lowest loss. The earlier of equals stays. What is best is read
    from the folder itself, so a resumed run, which makes the same evaluations again, ends with the same one.
    """
    record = {"step": metrics["step"]} | _judged(metrics)
    best = run.read_best()
    if best is not None and _rank(record) <= _rank(best):
        return False

    def fill(folder: Path) -> None:
        save(folder)
        (folder / "best.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    write_aside(run.best, fill)
    return True


def _judged(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an evaluation is judged by."""
    if "eval/reward" in metrics:
        return {"success": metrics.get("eval/success"), "reward": metrics["eval/reward"]}
    name = next((name for name in _TOLD_RIGHT if name in metrics), "eval/loss")
    return {"by": name, "value": metrics[name], "loss": metrics["eval/loss"]}


def _rank(record: Mapping[str, Any]) -> tuple[float, float]:
    if "by" in record:
        return 0.0 if record["by"] == "eval/loss" else record["value"], -record["loss"]
    told = record["success"] is not None
    return told, record["success"] if told else record["reward"]
