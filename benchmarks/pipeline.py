"""The whole pipeline on a laptop: SFT, a reward model, DPO, PPO paid by that model, GRPO paid by the verifier.

    python benchmarks/pipeline.py                     minutes on one core
    python benchmarks/pipeline.py --quick             seconds: every stage once, nothing is learnt

A model of random weights learns to use a calculator. Each stage after SFT starts from the SFT model, so that the table
at the end compares what each of them adds. Each command is printed before it runs; they are what
`gymtune plan --pipeline` prints, with the sizes of this task.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a tiny model has nothing to share between threads

from demo import ENV, evaluation, free_folder, percent

from gymtune import cli

READS, EPISODE = 4096, 1024
"""What the models read, and how long an episode of PPO and GRPO may be: a reward model also reads the tool's last, long
answer, which ended the episode."""
STAGES = ("sft", "dpo", "ppo", "grpo")
MODELS = {"sft": "sft/full_sft", "reward": "reward/reward", "dpo": "dpo/dpo", "ppo": "ppo/ppo_actor"}
FULL: Mapping[str, Any] = {
    "env": ENV, "last": "grpo/agent", "width": 128, "experts": 6000, "sft": 130, "sft_rate": 2e-3, "groups": 400,
    "held_out": 100, "reward": 60, "dpo": 40, "ppo": 60, "grpo": 60, "pairs": 32, "prompts": 32, "eval": 400,
}  # fmt: skip
QUICK: Mapping[str, Any] = {
    "env": "gymtune/Arithmetic-v0", "last": "grpo/grpo", "width": 32, "experts": 400, "sft": 30, "sft_rate": 1e-2,
    "groups": 24, "held_out": 24, "reward": 2, "dpo": 2, "ppo": 2, "grpo": 2, "pairs": 4, "prompts": 2, "eval": 16,
}  # fmt: skip


def gymtune(*words: object) -> None:
    """Print a command and run it, here in this process; stop when it fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ gymtune {shlex.join(arguments)}", flush=True)
    sys.argv = ["gymtune", *arguments]
    try:
        cli.main()
    except SystemExit as ended:
        if ended.code:
            raise


@dataclass
class Pipeline:
    """The stages, in one folder; `minutes` is what each took of one core, without its evaluation."""

    out: Path
    size: Mapping[str, Any]
    seed: int
    minutes: dict[str, float] = field(default_factory=dict)

    def model(self, stage: str) -> Path:
        """Return the folder of a stage's finished model."""
        return self.out / (MODELS | {"grpo": self.size["last"]})[stage]

    def run(self) -> None:
        """Run them all."""
        for stage in ("sft", "reward", "dpo", "ppo", "grpo"):
            began = process_time()  # all of it is one thread of this process: other programs do not count
            getattr(self, stage)()
            self.minutes[stage] = (process_time() - began) / 60
            if stage in STAGES:
                self.evaluate(stage)

    def sft(self) -> None:
        """A model of random weights imitates the script that knows the gold."""
        out, size = self.out, self.size
        shape = ("--hidden-size", size["width"], "--intermediate-size", 3 * size["width"])
        shape = (*shape, "--max-position-embeddings", READS)
        gymtune("models", "init", "--out", out / "base", "--env", size["env"], "--seed", self.seed, *shape)
        gymtune(
            "rollout", "--env", size["env"], "--agent", "scripted", "-n", size["experts"], "--out", out / "expert.jsonl"
        )
        self.train(
            "sft", out / "base", "--data", out / "expert.jsonl", "--batch-size", 64,
            "--learning-rate", size["sft_rate"],
            "--set", "warmup_steps=10", "--set", "lr_scheduler_type=constant",
        )  # fmt: skip

    def reward(self) -> None:
        """A reward model learns which of two episodes of a group the checker found right; held-out pairs measure it."""
        out, size = self.out, self.size
        sample = ("rollout", "--env", size["env"], "--model", self.model("sft"), "--num-generations", 8)
        sample = (*sample, "--max-completion-length", 32, "--concurrency", 256)
        gymtune(*sample, "-n", size["groups"], "--out", out / "groups.jsonl", "--seed", self.seed)
        gymtune(*sample, "-n", size["held_out"], "--out", out / "held_out.jsonl", "--env-arg", "split=test")
        self.train(
            "reward", self.model("sft"), "--data", out / "groups.jsonl", "--pairs", "all",
            "--eval-data", out / "held_out.jsonl", "--eval-steps", size["reward"], "--learning-rate", 3e-4,
            "--batch-size", size["pairs"],
        )  # fmt: skip

    def dpo(self) -> None:
        """The policy learns from the same pairs."""
        self.train(
            "dpo", self.model("sft"), "--data", self.out / "groups.jsonl", "--pairs", "all",
            "--learning-rate", 5e-5, "--beta", 1.0, "--batch-size", self.size["pairs"],
        )  # fmt: skip

    def ppo(self) -> None:
        """The policy acts, and the reward model alone pays."""
        self.train(
            "ppo", self.model("sft"), "--env", self.size["env"], "--reward-model", self.model("reward"),
            "--reward", "gt=0", "--prompts-per-step", 8 * self.size["prompts"], "--learning-rate", 3e-4, "--lam", 1.0,
            "--set", "critic_learning_rate=1e-3", "--set", "mini_batches=2", "--max-completion-length", 32,
            "--set", f"max_model_length={EPISODE}", "--set", "save_trajectories=false",
        )  # fmt: skip

    def grpo(self) -> None:
        """The policy acts, and the checker pays."""
        self.train(
            "grpo", self.model("sft"), "--env", self.size["env"], "--prompts-per-step", self.size["prompts"],
            "--num-generations", 8, "--learning-rate", 3e-4, "--epsilon-high", 0.28, "--set", "averaging=token_mean",
            "--set", "mini_batches=2", "--max-completion-length", 32, "--set", f"max_model_length={EPISODE}",
            "--set", "save_trajectories=false",
        )  # fmt: skip

    def train(self, algo: str, model: Path, *words: object) -> None:
        """Train with an algorithm into a folder of its name."""
        steps = ("--max-steps", self.size[algo], "--seed", self.seed, "--save-steps", 0)
        gymtune("train", "--algo", algo, "--model", model, "--output", self.out / algo, *steps, *words)

    def evaluate(self, stage: str) -> None:
        """Measure the stage's model on held-out tasks, sampled and greedy."""
        gymtune(
            "eval", "--env", self.size["env"], "-n", self.size["eval"], "--greedy", "--max-completion-length", 32,
            "--concurrency", 256, "--model", self.model(stage), "--json", self.out / f"eval_{stage}.json",
        )  # fmt: skip

    def table(self) -> dict[str, Any]:
        """Print success after each stage, and what the reward model told of pairs that it had not seen."""
        print(f"\n{'':<12} {'sampled at T = 1':<30} {'greedy':<30} {'calls/episode':<14} minutes of a core")
        told: dict[str, Any] = {"minutes": self.minutes}
        for stage in STAGES:
            sampled, greedy = evaluation(self.out / f"eval_{stage}.json")
            told[stage] = {"sampled": sampled["success_rate"], "greedy": greedy["success_rate"]}
            cells = f"{percent(sampled):<30} {percent(greedy):<30} {sampled['tool_calls']:<14.2f}"
            print(f"after {stage:<6} {cells} {self.minutes[stage]:.1f}")
        measured = [line for line in self.metrics("reward") if "eval/accuracy" in line]
        told["reward"] = measured[-1]["eval/accuracy"]
        print(f"\nreward model: {100 * told['reward']:.1f} % of held-out pairs in the right order;", end=" ")
        print(f"{self.minutes['reward']:.1f} minutes of a core, its samples included")
        last = self.metrics("ppo")[-1]
        print(f"ppo: in its last step a mean score of {last['reward']:.2f}, and {100 * last['success']:.1f} % right")
        return told

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """Return the lines of a run's metrics."""
        text = (self.out / stage / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    """Run the pipeline."""
    parser = argparse.ArgumentParser(description="SFT, reward model, DPO, PPO, GRPO: the whole pipeline.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: every stage once, nothing is learnt")
    parser.add_argument("--out", type=Path, help="folder (default: the first free runs/pipeline-N)")
    options = parser.parse_args()
    out = options.out or free_folder("pipeline")
    if out.exists():
        sys.exit(f"pipeline: {out} is there already; give another --out")
    began = perf_counter()
    pipeline = Pipeline(out, QUICK if options.quick else FULL, options.seed)
    pipeline.run()
    print(f"\n{pipeline.size['env']}, {pipeline.size['eval']} held-out tasks, 95 % intervals; seed {options.seed}")
    told = pipeline.table() | {"total": (perf_counter() - began) / 60}
    (out / "table.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(f"took   {told['total']:.1f} minutes; all of it is in {out}")


if __name__ == "__main__":
    main()
