"""What a step samples: tasks drawn by seed and step, their groups run and scored, dull groups replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean

from ..agents.agent import Agent
from ..agents.backend import derive_seed
from ..agents.rollout import Limits, plan_episodes, run_episodes
from ..agents.scorer import Scorer
from ..agents.trajectory import Trajectory
from ..envs.chat_env import ChatEnv
from ..tools.errors import RunError
from .config import TrainConfig
from .run_folder import RunFolder

#: Called with each episode as it ends, and with the ids of the pending ones when none has ended for a while.
OnEpisode = Callable[[Trajectory], None]
OnStall = Callable[[list[str]], None]

Group = list[Trajectory]


class StepSampler:
    """Samples the episodes of a step; which, is a function of `config.seed` and the step alone.

    Args:
        config: how many, from which seed.
        env: makes an env.
        agent: the policy that acts.
        scorer: adds what the env cannot score.
        run: where the episodes are written, and the id that they bear.

    With `dynamic_sampling` (DAPO, arXiv:2503.14476) a group that teaches nothing, for its known rewards are all equal,
    gives way to one of a new task, in at most `max_resampling` rounds.
    """

    def __init__(
        self, config: TrainConfig, env: Callable[[], ChatEnv], agent: Agent, scorer: Scorer, run: RunFolder
    ) -> None:
        self.config, self.env, self.agent, self.scorer, self.run = config, env, agent, scorer, run
        self.probe_env = env()
        self.on_episode: OnEpisode = lambda _: None
        self.on_stall: OnStall = lambda _: None

    def sample(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        """Return the episodes of step `step` (0-based), group after group, and what there is to say of their sampling.

        Raises RunError when no episode has a reward, naming the cause.
        """
        config, rounds = self.config, 0
        rng = Random(derive_seed(config.seed, "tasks", step))
        groups = self._sample_groups(step, rng, 0, config.prompts_per_step)
        if not config.dynamic_sampling:
            return self._finished(step, groups), {}
        while rounds < config.max_resampling and _known(groups):
            dull = config.prompts_per_step - sum(teaches(group, config) for group in groups)
            if not dull:
                break
            groups += self._sample_groups(step, rng, len(groups), dull)
            rounds += 1
        best = sorted(groups, key=lambda group: (teaches(group, config), bool(_known([group]))), reverse=True)
        best = best[: config.prompts_per_step]
        kept = self._finished(step, best)
        metrics = {
            "dynamic_sampling/rounds": float(rounds),
            "dynamic_sampling/kept": float(sum(teaches(group, config) for group in best)),
            "dynamic_sampling/sampled": float(len(groups)),
            "dynamic_sampling/reward": fmean(_known(groups)),
        }
        return kept, metrics

    def _sample_groups(self, step: int, rng: Random, first: int, count: int) -> list[Group]:
        """Run and score `count` groups of newly drawn tasks, numbered from `first`."""
        config = self.config
        tasks = [self.probe_env.draw_task(rng, step / config.max_steps) for _ in range(count)]
        size = config.num_generations
        specs = plan_episodes(tasks, size, run_id=self.run.run_id, seed=config.seed, version=step, first=first)
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
        return [trajectories[start : start + size] for start in range(0, len(trajectories), size)]

    def _finished(self, step: int, groups: Sequence[Group]) -> list[Trajectory]:
        """Write the episodes of a step and return them. Raises RunError when none of them has a reward."""
        trajectories = [trajectory for group in groups for trajectory in group]
        if self.config.save_trajectories:
            self.run.write_trajectories(step + 1, trajectories)
        if not _known(groups):
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


def teaches(group: Group, config: TrainConfig) -> bool:
    """Whether enough rewards of a group are known and differ; with credit by turn, whether those of any turn do."""
    known = [trajectory for trajectory in group if trajectory.reward is not None]
    by_turn = config.credit == "turn"
    earned = {tuple(turn.reward for turn in one.turns) if by_turn else one.reward for one in known}
    return len(known) >= config.min_group_size and len(earned) > 1


def _known(groups: Sequence[Group]) -> list[float]:
    """Return the rewards that are known."""
    return [t.reward for group in groups for t in group if t.reward is not None]
