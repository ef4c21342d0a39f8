"""The main job, in the steps a user would type: a tiny model learns to use a tool, on a laptop, in minutes.

    make demo
    .venv/bin/python benchmarks/demo.py --algo cispo --out runs/cispo
    .venv/bin/python benchmarks/demo.py --control      # rewards dealt out at random: it must not learn

Each command is printed before it runs; what this file adds is the table at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

ENV = "gymtune/Calculator-v0"
GYMTUNE = Path(sys.executable).with_name("gymtune")
EVAL_TASKS = 400


def gymtune(*words: object, threads: int | None = 1) -> None:
    """Print a command, then run it; stop when it fails. A tiny model has nothing to share between threads."""
    arguments = [str(word) for word in words]
    print(f"\n$ gymtune {shlex.join(arguments)}", flush=True)
    few = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([GYMTUNE, *arguments], check=False, env=few | os.environ)
    if done.returncode != 0:
        sys.exit(done.returncode)


def free_folder(name: str) -> Path:
    """Return the first of runs/NAME-1, runs/NAME-2, ... that is not there yet."""
    return next(path for number in count(1) if not (path := Path(f"runs/{name}-{number}")).exists())


def evaluation(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sampled and the greedy evaluation of the one model in an eval file."""
    (modes,) = json.loads(file.read_text(encoding="utf-8"))["models"].values()
    return modes["sampled"], modes["greedy"]


def percent(found: dict[str, Any]) -> str:
    """Success with its interval, and the counts behind it."""
    low, high = found["interval"]
    counts = f"{found['successes']}/{found['episodes']}"
    return f"{100 * found['success_rate']:5.1f} % [{100 * low:4.1f}, {100 * high:4.1f}]  {counts}"


def table(rows: dict[str, Path]) -> None:
    """Print success before and after, and how the tool was used."""
    print(f"\n{'':<12} {'sampled at T = 1':<30} {'greedy':<30} {'calls/episode':<14} failed calls")
    for name, file in rows.items():
        sampled, greedy = evaluation(file)
        failures = ", ".join(f"{outcome} {n}" for outcome, n in sampled["tool_failures"].items()) or "none"
        print(f"{name:<12} {percent(sampled):<30} {percent(greedy):<30} {sampled['tool_calls']:<14.2f} {failures}")


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="A tool-using agent learns on a laptop.")
    parser.add_argument("--algo", choices=["grpo", "cispo"], default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="deal the rewards out at random within the batch")
    parser.add_argument("--out", type=Path, help="folder (default: the first free runs/demo-N)")
    options = parser.parse_args()
    out = options.out or free_folder("demo")
    if out.exists():
        sys.exit(f"demo: {out} is there already; give another --out")
    began = perf_counter()
    seed = ("--seed", options.seed)
    evaluate = ("eval", "--env", ENV, "-n", EVAL_TASKS, "--greedy", "--max-completion-length", 32, "--concurrency", 200)

    gymtune("models", "init", "--out", out / "base", "--env", ENV, *seed)
    gymtune("rollout", "--env", ENV, "--agent", "scripted", "-n", 6000, "--out", out / "expert.jsonl")
    gymtune(
        "train", "--algo", "sft", "--model", out / "base", "--data", out / "expert.jsonl", "--output", out / "sft",
        "--max-steps", 130, "--batch-size", 64, "--learning-rate", 2e-3, "--set", "warmup_steps=10",
        "--set", "lr_scheduler_type=constant", *seed,
    )  # fmt: skip
    gymtune(*evaluate, "--model", out / "sft/full_sft", "--json", out / "eval_sft.json")
    control = ("--control", "shuffle_rewards") if options.control else ()
    loss = ("--epsilon-high", 0.28, "--set", "averaging=token_mean") if options.algo == "grpo" else ()
    gymtune(
        "train", "--algo", options.algo, "--model", out / "sft/full_sft", "--env", ENV, "--output", out / options.algo,
        "--max-steps", 120, "--prompts-per-step", 32, "--num-generations", 8, "--learning-rate", 3e-4,
        "--set", "warmup_steps=5", "--set", "mini_batches=2", *loss, "--max-completion-length", 32,
        "--set", "save_trajectories=false", *seed, *control,
    )  # fmt: skip
    gymtune(*evaluate, "--model", out / options.algo / "agent", "--json", out / f"eval_{options.algo}.json")

    title = f"{options.algo}{' with shuffled rewards' if options.control else ''}"
    print(f"\n{ENV}, {EVAL_TASKS} held-out tasks, 95 % intervals; {title}, seed {options.seed}")
    table({"after sft": out / "eval_sft.json", f"after {options.algo}": out / f"eval_{options.algo}.json"})
    print(f"\ncurve  {out / options.algo / 'curve.png'}\ntook   {(perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
