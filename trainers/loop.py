"""The loop: collect -> credit -> batch -> update -> sync -> report. Algorithms differ in credit and loss only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from ..agents.agent import ModelAgent
from ..agents.backend import derive_seed
from ..agents.models import LanguageModel, merged_state
from ..agents.scorer import Scorer
from ..agents.trajectory import Trajectory
from ..envs.chat_env import ChatEnv
from ..tools.errors import ConfigError, RunError
from .batch import Row, make_rows
from .checkpoint import load_updater, save_checkpoint, save_critic, save_pretrained, save_scorer, write_aside
from .collecting import StepSampler
from .config import TrainConfig
from .critic import make_critic
from .dataset import Dataset, GroupDataset
from .debug import debug_samples, whole_batch
from .evaluation import HeldOut, keep_best
from .experience import Experience, experiences_of
from .handoff import handoff_record
from .held_out_file import HeldOutFile
from .metrics import episode_metrics
from .mirrors import Mirrors
from .reference import load_reference, move_reference, save_reference
from .registry import ALGORITHMS
from .run_ahead import RunAhead, drop_stale
from .run_folder import HANDOFF, PREFIXES, RunFolder
from .update import NonFiniteError, Updater
from .update_stats import UpdateStats

#: Called with each line of metrics, and with each episode as it ends.
OnStep = Callable[[dict[str, Any]], None]
OnEpisode = Callable[[Trajectory], None]
#: Called with the ids of the pending episodes when none has ended for a while.
OnStall = Callable[[list[str]], None]

CRITIC = "ppo_critic"
"""Name of the finished critic."""


class Trainer:
    """One run: a policy acts in an env (or in stored trajectories) and learns from what it did.

    Args:
        config: what to do.
        model: the decoder to train, in place.
        agent: the policy that acts; its backend gets the weights after every step.
        run: where it is written.
        env: makes an env to sample in; None where episodes are read.
        dataset: stored episodes; None for a run that samples.
        reference: the frozen model of the KL term.

    The state between steps is the weights, the optimizer, a reference that moves, and `step`; tasks, seeds and order
    are functions of (`config.seed`, `step`), so a run resumed from a checkpoint repeats the uninterrupted one bit for
    bit on a CPU. `scorer` adds to the episodes of a step what the env cannot score; `held_out` is what `eval_steps`
    evaluates on.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        agent: ModelAgent,
        run: RunFolder,
        *,
        env: Callable[[], ChatEnv] | None = None,
        dataset: Dataset | None = None,
        reference: LanguageModel | None = None,
    ) -> None:
        self.config, self.model, self.agent, self.run = config, model, agent, run
        self.dataset, self.scorer = dataset, Scorer([])
        self.algorithm = ALGORITHMS[config.algo](config)
        if (env is None) == (dataset is None) or (env is not None and not self.algorithm.online):
            wanted = "an env or a dataset, one of them" if self.algorithm.online else "a dataset"
            raise ConfigError(f"algo {config.algo!r} needs {wanted}, got env {env} and dataset {dataset}")
        self.sampler = StepSampler(config, env, agent, self.scorer, run) if env is not None else None
        ahead = config.max_staleness
        self.run_ahead = RunAhead(self.sampler.sample, ahead, config.max_steps) if self.sampler is not None else None
        self.mirrors = Mirrors(config.report_to)
        assert agent.renderer is not None
        self.critic = make_critic(config, model, agent.renderer) if self.algorithm.critic else None
        longest = config.max_completion_length * self._most_turns()
        self.updater = Updater(model, self.algorithm, config, reference, longest, self.critic)
        self.held_out: HeldOut | HeldOutFile | None = None
        self.step = 0
        self.tokens_seen = 0
        self.on_step: OnStep = lambda _: None
        self.on_episode: OnEpisode = lambda _: None
        self.on_stall: OnStall = lambda _: None

    # -- the loop ------------------------------------------------------------------------------------------------

    def train(self, tokenizer_folder: Path) -> Path:
        """Run to `max_steps` and return the folder of the finished model."""
        if self.config.eval_steps > 0 and self.held_out is None:
            raise ConfigError(
                f"eval_steps is {self.config.eval_steps}, the trainer has nothing held out: set trainer.held_out"
            )
        if self.step == 0 and not self._shares_model:  # whatever the backend had before, it samples with these
            self._load_weights()
        try:
            self.mirrors.begin(self.run, self.config, self.step)
            if self.step == 0 and self.held_out is not None:
                self.run.rewind(-1)
                self._log({"step": 0} | self._evaluate(tokenizer_folder))
            while self.step < self.config.max_steps:
                self._make_step(tokenizer_folder)
        finally:
            self.mirrors.end()
        return self._finish(tokenizer_folder)

    def _make_step(self, tokenizer_folder: Path) -> None:
        began = perf_counter()
        trajectories, collected = self.collect()
        sampled = perf_counter()
        experiences = self.credit(trajectories)
        self._show(experiences)
        stats = self._learn(experiences)
        self.step += 1
        self._sync()
        metrics = self.measure(trajectories, stats, self.step) | collected
        self.tokens_seen = metrics["num_tokens"]
        metrics |= {"time/rollout": sampled - began, "step_time": perf_counter() - began}
        if self.held_out is not None and self._due(self.config.eval_steps):
            metrics |= self._evaluate(tokenizer_folder)
        if "time/eval" in metrics or self._due(self.config.logging_steps):
            self._log(metrics)
        self.on_step(metrics)
        if self._due(self.config.save_steps):
            self.save(tokenizer_folder)

    def collect(self) -> tuple[list[Trajectory], dict[str, float]]:
        """Return the trajectories of this step, sampled anew or the next ones of the dataset, and how it went."""
        config = self.config
        if self.dataset is not None:
            size = config.prompts_per_step if self.algorithm.ratios else config.batch_size
            return self.dataset.batch(self.step, size), {}
        assert self.sampler is not None
        assert self.run_ahead is not None
        sampler = self.sampler
        sampler.scorer, sampler.on_episode, sampler.on_stall = self.scorer, self.on_episode, self.on_stall
        trajectories, metrics = self.run_ahead.take(self.step)
        if config.max_staleness > 0:
            trajectories, staleness = drop_stale(trajectories, self.step, config.drop_staleness)
            metrics |= staleness
        return trajectories, metrics | self.agent.backend.metrics()

    def credit(self, trajectories: Sequence[Trajectory]) -> list[Experience]:
        """Return what the trajectories teach. In a control run the known rewards are dealt out at random first."""
        chosen = self.algorithm.choose(trajectories) if self.dataset is None else trajectories
        experiences = experiences_of(chosen, need_logprobs=self.algorithm.ratios)
        if self.config.control == "shuffle_rewards":
            known = [experience for experience in experiences if experience.reward is not None]
            rng = Random(derive_seed(self.config.seed, "control", self.step))
            dealt = rng.sample([experience.reward for experience in known], len(known))
            for experience, reward in zip(known, dealt, strict=True):
                experience.reward = reward
        self.updater.annotate(experiences)
        self.algorithm.credit(experiences)
        return experiences

    def batches(self, experiences: Sequence[Experience]) -> list[list[list[Row]]]:
        """Return, for every pass over the step's experiences, its mini-batches of rows.

        Failed and broken episodes are left out, and truncated ones when the config says so. Groups are shuffled whole;
        one is cut only where the bound of a mini-batch falls inside it.
        """
        config = self.config
        if not self.algorithm.ratios:
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
            passes.append([make_rows([one for one in part if self.algorithm.trains(one)]) for part in slices])
        return passes

    def _learn(self, experiences: Sequence[Experience]) -> UpdateStats:
        """Make the step's updates. A batch that breaks the numbers is written down before the run stops."""
        stats = UpdateStats()
        stats.note_credit(experiences, self.config.importance_sampling_correction)
        try:
            for mini_batches in self.batches(experiences):
                if not self.updater.update(mini_batches, self.step, stats):
                    break
        except NonFiniteError as error:
            file = self.run.write_nonfinite(self.step + 1, whole_batch(experiences))
            raise RunError(f"{error}; the batch is in {file}") from error
        return stats

    def measure(self, trajectories: Sequence[Trajectory], stats: UpdateStats, step: int) -> dict[str, Any]:
        """Return the metrics of step `step`, counted from 1."""
        metrics: dict[str, Any] = {"step": step, "learning_rate": self.updater.learning_rate(step - 1)}
        metrics |= stats.metrics()
        if self.algorithm.ratios or self.dataset is None:
            metrics |= episode_metrics(trajectories)
        return metrics | {"num_tokens": self.tokens_seen + sum(len(t.tokens) for t in trajectories)}

    def _show(self, experiences: Sequence[Experience]) -> None:
        """Write decoded samples of the step, where it is one of those that are looked at."""
        config, renderer = self.config, self.agent.renderer
        if config.debug_mode and self.step % config.debug_interval == 0 and renderer is not None:
            decode = partial(renderer.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self.run.log_debug(debug_samples(self.step + 1, experiences, decode, config.seed))

    def _evaluate(self, tokenizer_folder: Path) -> dict[str, Any]:
        """Return `eval/*` of the policy as it is; the best one so far is kept in RUN/best."""
        assert self.held_out is not None
        metrics = self.held_out.evaluate(self.on_stall)
        keep_best(self.run, {"step": self.step} | metrics, lambda folder: self._save_model(tokenizer_folder, folder))
        return metrics

    def _log(self, metrics: dict[str, Any]) -> None:
        self.run.log(metrics)
        self.mirrors.log(metrics)

    def _due(self, every: int) -> bool:
        """Tell whether this step is one of every so many, or the last one."""
        return self.step == self.config.max_steps or (every > 0 and self.step % every == 0)

    def _sync(self) -> None:
        """Give the step's weights to the backend and, where it is due, to a reference that follows."""
        config, reference = self.config, self.updater.reference
        self._load_weights()
        if config.sync_ref_model and reference is not None and self.step % config.ref_model_sync_steps == 0:
            move_reference(reference, self.model, config.ref_model_mixup_alpha)

    def _load_weights(self) -> None:
        """Give the backend the weights of this step; one that has a model of its own knows no adapters."""
        weights = dict(self.model.named_parameters()) if self._shares_model else merged_state(self.model)
        self.agent.backend.load_weights(self.step, weights)

    @property
    def _shares_model(self) -> bool:
        """Whether the backend samples with the very model that is trained."""
        return getattr(self.agent.backend, "model", None) is self.model

    def close(self) -> None:
        """End what samples, in this process and outside; a run that goes on needs a new trainer."""
        self.agent.backend.close()
        if self.run_ahead is not None:
            self.run_ahead.close()

    def dry_run(self) -> dict[str, Any]:
        """Return the metrics that the first step would have, without making it: no weight changes, nothing is written.

        Give it a config without `save_trajectories`, for what is sampled is written by that.
        """
        trajectories, collected = self.collect()
        experiences = self.credit(trajectories)
        stats = UpdateStats()
        stats.note_credit(experiences, self.config.importance_sampling_correction)
        self.updater.update(self.batches(experiences)[0], self.step, stats, dry=True)
        return self.measure(trajectories, stats, self.step + 1) | collected

    # -- what is left -------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """Name of the finished model's folder, as MiniMind's users know it."""
        if self.config.algo in PREFIXES:
            return PREFIXES[self.config.algo]
        if not self.algorithm.ratios:
            return self.config.algo
        with_tools = self.sampler is not None and bool(self.sampler.probe_env.toolbox.names)
        return "agent" if with_tools or getattr(self.dataset, "with_tools", False) else self.config.algo

    def _most_turns(self) -> int:
        """Return the most turns that an episode may have."""
        if self.sampler is not None:
            return self.sampler.probe_env.max_turns
        return self.dataset.most_turns if isinstance(self.dataset, GroupDataset) else 1

    def save(self, tokenizer_folder: Path) -> None:
        """Write a checkpoint and prune old ones."""
        state = {"step": self.step, "tokens_seen": self.tokens_seen}

        def fill(folder: Path) -> None:
            save_checkpoint(folder, self.updater, tokenizer_folder, state)
            if self.config.sync_ref_model and self.updater.reference is not None:
                save_reference(self.updater.reference, folder)

        write_aside(self.run.checkpoint_path(self.step), fill)
        self.run.prune(self.config.save_total_limit)

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        """Continue from a checkpoint whose weights the model already holds."""
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
        load_updater(folder, self.updater, self.step)
        if self.config.sync_ref_model and self.updater.reference is not None:
            load_reference(self.updater.reference, folder)
        self._load_weights()
        self.run.rewind(self.step)

    def _save_model(self, tokenizer_folder: Path, target: Path) -> None:
        """Write the model as it is used later: what speaks, or what scores."""
        if self.algorithm.scores:
            assert self.critic is not None
            assert self.agent.renderer is not None
            save_scorer(self.model, self.critic, tokenizer_folder, self.agent.renderer, target)
        else:
            save_pretrained(self.model, tokenizer_folder, target)

    def _finish(self, tokenizer_folder: Path) -> Path:
        """Write the finished model, its critic and what inference needs to know; return the model's folder."""
        final = self.run.path / self.prefix
        self._save_model(tokenizer_folder, final)
        if self.critic is not None and not self.algorithm.scores:
            save_critic(self.critic, tokenizer_folder, self.run.path / CRITIC)
        lines = self.run.read_metrics()
        self.run.write_json(HANDOFF, handoff_record(self.config, self.model, self.agent, self.prefix, lines))
        return final
