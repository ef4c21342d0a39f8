"""Every RL algorithm on the demo's task, from the same SFT model, with the same number of episodes; several seeds.

    python benchmarks/algorithms.py --seeds 0,1,2 --jobs 2      hours on one core, as many as there are jobs
    python benchmarks/algorithms.py --seeds 0 --steps 40

Writes OUT/table.json and OUT/algorithms.png, and prints the table: success on held-out tasks, sampled and greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from demo import ENV, EVAL_TASKS, GYMTUNE, evaluation, free_folder, gymtune

EPISODES = 256  # of a step
GROUP = 8
OPTIONS: dict[str, list[str]] = {
    "grpo": ["--epsilon-high", "0.28", "--set", "averaging=token_mean"],
    "dr_grpo": ["--epsilon-high", "0.28"],
    "dapo": [],
    "gspo": ["--set", "epsilon=0.02", "--set", "epsilon_high=0.03"],
    "cispo": [],
    "rloo": ["--set", "beta=0"],
    "reinforce++": ["--set", "beta=0"],
    "ppo": ["--lam", "1.0", "--set", "critic_learning_rate=1e-3", "--set", "critic_warmup_steps=3"],
}
"""What each is given beside its preset: all without a reference, so that they differ in credit and loss alone."""


def train(algo: str, seed: int, start: Path, out: Path, steps: int) -> float:
    """Train one of them from `start`, quietly, and evaluate it; return the minutes of training."""
    run = out / f"{algo}-{seed}"
    group = 1 if algo == "ppo" else GROUP
    words = [
        "train", "--algo", algo, "--model", start, "--env", ENV, "--output", run, "--max-steps", steps,
        "--prompts-per-step", EPISODES // group, "--num-generations", group, "--learning-rate", "3e-4",
        "--set", "warmup_steps=5", "--set", "mini_batches=2", "--max-completion-length", 32, "--seed", seed,
        "--set", "save_trajectories=false", "--set", "save_steps=0", *OPTIONS[algo],
    ]  # fmt: skip
    began = perf_counter()
    quietly(words, run.with_suffix(".log"))
    minutes = (perf_counter() - began) / 60
    (model,) = (path for path in (run / "agent", run / "ppo_actor") if path.exists())
    quietly(
        ["eval", "--env", ENV, "-n", EVAL_TASKS, "--greedy", "--max-completion-length", 32, "--concurrency", 200,
         "--model", model, "--json", run.with_suffix(".json")],
        run.with_suffix(".log"),
    )  # fmt: skip
    print(f"{algo} seed {seed}: {minutes:.1f} minutes", flush=True)
    return minutes


def quietly(words: list[Any], log: Path) -> None:
    """Run a command with its output in a file; stop when it fails."""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ gymtune {' '.join(map(str, words))}\n")
        file.flush()
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([GYMTUNE, *map(str, words)], check=False, env=env, stdout=file, stderr=file)
    if done.returncode != 0:
        raise RuntimeError(f"`gymtune {words[0]}` ended with {done.returncode}: {log} says why")


def curve(run: Path, name: str) -> list[tuple[int, float]]:
    """Return a metric of a run over its steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


def draw(algos: list[str], seeds: list[int], out: Path) -> Path:
    """Draw success over the steps, one panel an algorithm, one line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, -(-len(algos) // 2), sharex=True, sharey=True, squeeze=False).flatten()
    for panel, algo in zip(panels, algos, strict=False):
        for seed in seeds:
            panel.plot(*zip(*curve(out / f"{algo}-{seed}", "success"), strict=True), lw=0.9)
        panel.set_title(algo, loc="left", fontsize=10)
        panel.grid(alpha=0.3)
    figure.suptitle("success of the episodes of a step (Calculator-v0)", fontsize=11)
    path = out / "algorithms.png"
    figure.savefig(path)
    return path


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description="Every RL algorithm on the demo's task.")
    parser.add_argument("--algos", default=",".join(OPTIONS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each on one thread")
    parser.add_argument("--start", type=Path, help="model to start from (default: the demo's, made here)")
    parser.add_argument("--out", type=Path, help="folder (default: the first free runs/algorithms-N)")
    options = parser.parse_args()
    algos, seeds = options.algos.split(","), [int(seed) for seed in options.seeds.split(",")]
    if unknown := set(algos) - set(OPTIONS):
        parser.error(f"--algos: no {', '.join(sorted(unknown))}; there are {', '.join(OPTIONS)}")
    out = options.out or free_folder("algorithms")
    if out.exists():
        sys.exit(f"algorithms: {out} is there already; give another --out")
    out.mkdir(parents=True)
    start = options.start or first_model(out)
    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = {(a, s): pool.submit(train, a, s, start, out, options.steps) for s in seeds for a in algos}
        minutes = {key: task.result() for key, task in tasks.items()}
    table: dict[str, Any] = {}
    print(f"\n{ENV}, {EVAL_TASKS} held-out tasks, {options.steps} steps of {EPISODES} episodes, seeds {seeds}")
    print(f"{'':<13} {'sampled, by seed':<24} {'mean':<7} {'greedy, by seed':<24} {'mean':<7} minutes")
    for algo in algos:
        found = [evaluation(out / f"{algo}-{seed}.json") for seed in seeds]
        sampled, greedy = ([100 * modes[i]["success_rate"] for modes in found] for i in (0, 1))
        taken = fmean(minutes[algo, seed] for seed in seeds)
        table[algo] = {"sampled": sampled, "greedy": greedy, "minutes": taken}
        texts = [" ".join(f"{value:5.1f}" for value in values) for values in (sampled, greedy)]
        print(f"{algo:<13} {texts[0]:<24} {fmean(sampled):<7.1f} {texts[1]:<24} {fmean(greedy):<7.1f} {taken:.1f}")
    (out / "table.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    print(f"\npicture  {draw(algos, seeds, out)}")


def first_model(out: Path) -> Path:
    """Make the demo's model: from scratch, taught by the expert as the demo does it."""
    gymtune("models", "init", "--out", out / "base", "--env", ENV, "--seed", 0)
    gymtune("rollout", "--env", ENV, "--agent", "scripted", "-n", 6000, "--out", out / "expert.jsonl")
    gymtune(
        "train", "--algo", "sft", "--model", out / "base", "--data", out / "expert.jsonl", "--output", out / "sft",
        "--max-steps", 130, "--batch-size", 64, "--learning-rate", 2e-3, "--set", "warmup_steps=10",
        "--set", "lr_scheduler_type=constant", "--seed", 0,
    )  # fmt: skip
    return out / "sft/full_sft"


if __name__ == "__main__":
    main()
