"""The loop: collect -> credit -> batch -> update -> sync -> report. Algorithms differ in credit and loss only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from ..agents.agent import ModelAgent
from ..agents.backend import derive_seed
from ..agents.models import LanguageModel, merged_state
from ..agents.rollout import Limits, plan_episodes, run_episodes
from ..agents.scorer import Scorer
from ..agents.trajectory import Trajectory
from ..envs.chat_env import ChatEnv
from ..tools.errors import ConfigError, RunError
from .algorithm import Algorithm
from .batch import Row, make_rows
from .checkpoint import load_optimizer, save_checkpoint, save_pretrained
from .cispo import CISPO
from .config import TrainConfig
from .dataset import TrajectoryDataset
from .experience import Experience, experiences_of
from .grpo import GRPO
from .metrics import episode_metrics
from .run_folder import RunFolder
from .sft import SFT
from .update import Updater, UpdateStats

ALGORITHMS: dict[str, type[Algorithm]] = {"sft": SFT, "grpo": GRPO, "cispo": CISPO}

#: Called with each line of metrics, and with each episode as it ends.
OnStep = Callable[[dict[str, Any]], None]
OnEpisode = Callable[[Trajectory], None]
#: Called with the ids of the pending episodes when none has ended for a while.
OnStall = Callable[[list[str]], None]


class Trainer:
    """One run: a policy acts in an env (or in stored trajectories) and learns from what it did.

    Args:
        config: what to do.
        model: the decoder to train, in place.
        agent: the policy that acts; its backend gets the weights after every step.
        env: makes an env; None for algorithms that learn from a file.
        dataset: the file's trajectories; None for algorithms that sample.
        reference: the frozen model of the KL term.
        run: where it is written.

    The state between steps is the weights, the optimizer and `step`; tasks, seeds and order are functions of
    (`config.seed`, `step`), so a run resumed from a checkpoint repeats the uninterrupted one bit for bit on a CPU.
    `scorer` adds to the episodes of a step what the env cannot score.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        agent: ModelAgent,
        run: RunFolder,
        *,
        env: Callable[[], ChatEnv] | None = None,
        dataset: TrajectoryDataset | None = None,
        reference: LanguageModel | None = None,
    ) -> None:
        self.config, self.model, self.agent, self.run = config, model, agent, run
        self.env, self.dataset, self.scorer = env, dataset, Scorer([])
        self.algorithm = ALGORITHMS[config.algo](config)
        if (env if self.algorithm.online else dataset) is None:
            wanted = "an env" if self.algorithm.online else "a dataset"
            raise ConfigError(f"algo {config.algo!r} needs {wanted}, got None")
        self.probe_env = env() if env is not None else None
        turns = self.probe_env.max_turns if self.probe_env is not None else 1
        self.updater = Updater(model, self.algorithm, config, reference, config.max_completion_length * turns)
        self.step = 0
        self.tokens_seen = 0
        self.on_step: OnStep = lambda _: None
        self.on_episode: OnEpisode = lambda _: None
        self.on_stall: OnStall = lambda _: None

    # -- the loop ------------------------------------------------------------------------------------------------

    def train(self, tokenizer_folder: Path) -> Path:
        """Run to `max_steps` and return the folder of the finished model."""
        while self.step < self.config.max_steps:
            began = perf_counter()
            trajectories = self.collect()
            sampled = perf_counter()
            experiences = self.credit(trajectories)
            stats = UpdateStats()
            for mini_batches in self.batches(experiences):
                self.updater.update(mini_batches, self.step, stats)
            self.step += 1
            self._sync()
            seconds = {"time/rollout": sampled - began, "step_time": perf_counter() - began}
            self.report(trajectories, stats, seconds)
            if self._checkpoint_due():
                self.save(tokenizer_folder)
        final = self.run.path / self.prefix
        save_pretrained(self.model, tokenizer_folder, final)
        return final

    def collect(self) -> list[Trajectory]:
        """Return the trajectories of this step: sampled anew, or the next ones of the dataset."""
        config, step = self.config, self.step
        if self.dataset is not None:
            return self.dataset.batch(step, config.batch_size)
        assert self.env is not None
        assert self.probe_env is not None
        rng = Random(derive_seed(config.seed, "tasks", step))
        progress = step / config.max_steps
        tasks = [self.probe_env.draw_task(rng, progress) for _ in range(config.prompts_per_step)]
        specs = plan_episodes(tasks, config.num_generations, run_id=self.run.run_id, seed=config.seed, version=step)
        trajectories = run_episodes(
            self.env,
            self.agent,
            specs,
            limits=Limits(),
            concurrency=len(specs),
            on_finish=self.on_episode,
            on_stall=self.on_stall,
        )
        self.scorer.score(trajectories)
        if config.save_trajectories:
            self.run.write_trajectories(step + 1, trajectories)
        if all(trajectory.reward is None for trajectory in trajectories):
            raise RunError(f"step {step + 1}: {self._why_no_reward(trajectories)}")
        return trajectories

    def _why_no_reward(self, trajectories: Sequence[Trajectory]) -> str:
        errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
        if len(errors) == len(trajectories):
            last_line = errors[0].strip().splitlines()[-1]
            return f"all {len(errors)} episodes failed, the first one with: {last_line}"
        broken = sorted({name for trajectory in trajectories for name in trajectory.broken})
        cause = f" ({self.scorer.fault})" if self.scorer.fault else ""
        return f"no episode has a reward, for {' and '.join(broken)} broke in every one{cause}; nothing can be learnt"

    def credit(self, trajectories: Sequence[Trajectory]) -> list[Experience]:
        """Return what the trajectories teach. In a control run the known rewards are dealt out at random first."""
        experiences = experiences_of(trajectories, need_logprobs=self.algorithm.online)
        if self.config.control == "shuffle_rewards":
            known = [experience for experience in experiences if experience.reward is not None]
            rng = Random(derive_seed(self.config.seed, "control", self.step))
            dealt = rng.sample([experience.reward for experience in known], len(known))
            for experience, reward in zip(known, dealt, strict=True):
                experience.reward = reward
        if self.algorithm.online:
            self.updater.annotate(experiences)
        self.algorithm.credit(experiences)
        return experiences

    def batches(self, experiences: Sequence[Experience]) -> list[list[list[Row]]]:
        """Return, for every pass over the step's experiences, its mini-batches of rows.

        Failed and broken episodes are left out, and truncated ones when the config says so. Groups are shuffled whole;
        one is cut only where the bound of a mini-batch falls inside it.
        """
        config = self.config
        if not self.algorithm.online:
            return [[make_rows(experiences)]]
        groups: dict[str, list[Experience]] = {}
        for experience in experiences:
            groups.setdefault(experience.trajectory.group_id, []).append(experience)
        size = -(-len(experiences) // config.mini_batches)
        passes = []
        for iteration in range(config.passes):
            names = list(groups)
            Random(derive_seed(config.seed, "order", self.step, iteration)).shuffle(names)
            order = [experience for name in names for experience in groups[name]]
            slices = [order[first : first + size] for first in range(0, len(order), size)]
            passes.append([make_rows([one for one in part if self._trains(one)]) for part in slices])
        return passes

    def _trains(self, experience: Experience) -> bool:
        cut = self.config.mask_truncated_completions and experience.trajectory.truncated
        return experience.reward is not None and not cut

    def report(self, trajectories: Sequence[Trajectory], stats: UpdateStats, seconds: dict[str, float]) -> None:
        """Write the step's line of metrics and hand it to whoever draws progress."""
        self.tokens_seen += sum(len(t.tokens) for t in trajectories)
        metrics: dict[str, Any] = {"step": self.step, "learning_rate": self.updater.learning_rate(self.step - 1)}
        metrics |= stats.metrics()
        if self.config.beta > 0:
            metrics["kl"] = stats.kl / max(stats.tokens, 1)
        if self.algorithm.online:
            metrics |= episode_metrics(trajectories)
        metrics |= {"num_tokens": self.tokens_seen} | seconds
        if self.step % self.config.logging_steps == 0 or self.step == self.config.max_steps:
            self.run.log(metrics)
        self.on_step(metrics)

    def _sync(self) -> None:
        """Give the backend the weights of this step; one that has a model of its own knows no adapters."""
        shared = getattr(self.agent.backend, "model", None) is self.model
        weights = dict(self.model.named_parameters()) if shared else merged_state(self.model)
        self.agent.backend.load_weights(self.step, weights)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """Name of the finished model's folder, as MiniMind's users know it."""
        if self.config.algo == "sft":
            return "full_sft"
        with_tools = self.probe_env is not None and bool(self.probe_env.toolbox.names)
        return "agent" if with_tools else self.config.algo

    def _checkpoint_due(self) -> bool:
        every = self.config.save_steps
        return self.step == self.config.max_steps or (every > 0 and self.step % every == 0)

    def save(self, tokenizer_folder: Path) -> None:
        """Write a checkpoint and prune old ones."""
        state = {"step": self.step, "tokens_seen": self.tokens_seen}
        target = self.run.checkpoint_path(self.step)
        save_checkpoint(target, self.model, tokenizer_folder, self.updater.optimizer, state)
        self.run.prune(self.config.save_total_limit)

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        """Continue from a checkpoint whose weights the model already holds."""
        load_optimizer(folder, self.model, self.updater.optimizer)
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
        self._sync()
        self.run.rewind(self.step)
