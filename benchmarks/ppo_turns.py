"""PPO where every turn is paid: three requests an episode, each right answer earns a third.

    python benchmarks/ppo_turns.py

A tiny model is taught by guesses, then learns by PPO. Printed are, over the steps, how much of the returns the critic
explains and how many episodes succeed; then the last episode in which a turn went wrong, token by token, with
the finished critic's values, and its advantages as `gae` gives them beside the sum that one would write by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import gymnasium
import torch

from gymtune.agents import FunctionAgent, Renderer, Trajectory, TrajectoryWriter, read_trajectories, rollout
from gymtune.agents.models import init_model, load_model
from gymtune.envs import ChatEnv, Task
from gymtune.rewards.components import Component
from gymtune.rewards.episode import Episode
from gymtune.tools.messages import Message, user
from gymtune.trainers import Listeners, TrainConfig, train
from gymtune.trainers.annotate import token_numbers
from gymtune.trainers.critic import make_critic
from gymtune.trainers.experience import Experience
from gymtune.trainers.gae import gae, token_rewards

ENV = "gymtune-test/ThreeTurns-v0"
TURNS, TASKS, GUESSED = 3, 40, 0.3
PPO: dict[str, Any] = {
    "algo": "ppo",
    "env": ENV,
    "max_steps": 40,
    "prompts_per_step": 48,
    "max_completion_length": 3,
    "learning_rate": 3e-3,
    "mini_batches": 2,
}
"""What this file and the test of learning train with."""


class ThreeTurns(ChatEnv):
    """Say one digit, then another, then a third; success is all three right."""

    def __init__(self, **options: Any) -> None:
        rng = Random(0)
        digits = [tuple(rng.randrange(10) for _ in range(TURNS)) for _ in range(TASKS)]
        tasks = [Task(f"turns/{i}", (user(f"Say {said[0]}."),), said) for i, said in enumerate(digits)]
        super().__init__(
            tasks, [Component("right", "turn", self.right), Component("gt", "end", self.all_right)], max_turns=TURNS,
            **options,
        )  # fmt: skip

    def right(self, episode: Episode) -> float:
        """A third for a turn whose answer is its digit."""
        return (episode.answer.strip() == str(episode.gt[episode.turn - 1])) / TURNS

    def all_right(self, episode: Episode) -> float:
        """Note the success."""
        said = [turn.content.strip() for turn in episode.turns]
        episode.success = said == [str(digit) for digit in episode.gt]
        return float(episode.success)

    def user_reply(self, episode: Episode) -> str | None:
        """Ask for the next digit."""
        return f"Say {episode.gt[episode.turn]}." if episode.turn < TURNS else None


if ENV not in gymnasium.registry:
    gymnasium.register(ENV, entry_point=ThreeTurns)


def make_guesser(folder: Path, seed: int = 0) -> Path:
    """Train a model of one layer in `folder` that is right about four times in ten; return its own folder."""
    torch.set_num_threads(1)
    rng = Random(seed)

    def guess(messages: Sequence[Message]) -> str:
        named = messages[-1]["content"][len("Say ")]
        return named if rng.random() < GUESSED else str(rng.randrange(10))

    with TrajectoryWriter(folder / "guesses.jsonl") as writer:
        for trajectory in rollout(ENV, FunctionAgent(guess), TASKS, num_generations=15):
            writer.append(trajectory)
    texts = [*(f"Say {d}." for d in range(10)), "user", "assistant"] * 2
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "max_position_embeddings": 128}
    init_model(folder / "fresh", texts=texts, vocab_size=300, seed=seed, **sizes)
    return train(
        TrainConfig(
            algo="sft", model=str(folder / "fresh"), data=str(folder / "guesses.jsonl"), seed=seed,
            output_dir=str(folder / "sft"), max_steps=100, learning_rate=1e-2, warmup_steps=10, save_steps=0,
        )
    )  # fmt: skip


def show_gae(run: Path, config: TrainConfig) -> None:
    """Print one episode with its rewards, values and advantages: the last whole one in which a turn went wrong."""
    files = sorted((run / "trajectories").glob("*.jsonl"), reverse=True)
    episode = next(e for file in files for e in read_trajectories(file) if e.terminated and not e.success)
    renderer = Renderer.from_folder(run / "ppo_actor")
    experience = critic_values(run, config, renderer, episode)
    rewards, values = token_rewards(experience, config), experience.values
    advantages, returns = gae(rewards, values, 0.0, config.gamma, config.lam)
    following = [*values[1:], 0.0]
    errors = [r + config.gamma * v - own for r, v, own in zip(rewards, following, values, strict=True)]
    fade = config.gamma * config.lam
    print(
        f"\nthe GAE of {episode.task_id}: gamma {config.gamma}, lambda {config.lam}; by hand, sum of {fade}^k d_(t+k)"
    )
    print(" t  turn token           reward   value       d  by hand      gae  return")
    for t, place in enumerate(experience.places):
        by_hand = sum(fade**k * error for k, error in enumerate(errors[t:]))
        token = repr(renderer.tokenizer.decode([episode.tokens[place]]))
        print(
            f"{t:>2} {experience.turns[t]:>5} {token:<14} {rewards[t]:>7.3f} {values[t]:>7.3f} {errors[t]:>7.3f} "
            f"{by_hand:>8.4f} {advantages[t]:>8.4f} {returns[t]:>7.3f}"
        )


def critic_values(run: Path, config: TrainConfig, renderer: Renderer, episode: Trajectory) -> Experience:
    """Look at an episode with the values of the finished critic."""
    policy = load_model(run / "ppo_actor")
    critic = make_critic(config.model_copy(update={"critic_model": str(run / "ppo_critic")}), policy, renderer)
    experience = Experience.of(episode, need_logprobs=True)
    (experience.values,) = token_numbers([experience], lambda b: critic.values(b, policy), 4096, torch.device("cpu"))
    return experience


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="PPO on an env of three turns, each with a reward.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder to keep (default: a temporary one)")
    options = parser.parse_args()
    if options.out is not None and options.out.exists():
        sys.exit(f"ppo_turns: {options.out} is there already; give another --out")
    with TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        began = perf_counter()
        model = make_guesser(out, options.seed)
        config = TrainConfig(model=str(model), output_dir=str(out / "ppo"), save_steps=0, seed=options.seed, **PPO)
        print(f"{'step':>4} {'explained variance':>19} {'turns right':>12} {'success':>8} {'KL of the step':>15}")

        def show(line: dict[str, Any]) -> None:
            if line["step"] == 1 or line["step"] % 4 == 0:
                explained = line.get("val/explained_variance", float("nan"))
                print(
                    f"{line['step']:>4} {explained:>19.3f} {line['reward']:>12.3f} {line['success']:>8.3f} "
                    f"{line['policy/approxkl_avg']:>15.4f}"
                )

        train(config, listeners=Listeners(on_step=show))
        print(f"took {perf_counter() - began:.0f} seconds")
        show_gae(out / "ppo", config)


if __name__ == "__main__":
    main()
