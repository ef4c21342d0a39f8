"""One rollout file of mixed quality, eight ways to learn from it: each against its own held-out measure.

    python benchmarks/from_one_file.py                       about ten minutes on one core
    python benchmarks/from_one_file.py --start RUN/full_sft --teacher RUN/agent --steps 20

The file is what the demo's model says before it learns: right and wrong answers, groups of eight. The held-out file is
of tasks whose operands no training task has. Prints the table and writes OUT/table.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from algorithms import first_model, quietly
from demo import ENV, EVAL_TASKS, evaluation, free_folder

GROUP, TRAIN_TASKS, HELD_TASKS = 8, 300, 60
MEASURES: dict[str, tuple[str, bool, list[str]]] = {
    "sft": ("eval/loss", False, ["--best", "1", "--min-reward", "1", "--learning-rate", "1e-3"]),
    "reward": ("eval/accuracy", True, ["--pairs", "all", "--learning-rate", "1e-3", "--set", "drop_long=true"]),
    "dpo": ("eval/rewards/accuracies", True, ["--learning-rate", "1e-5"]),
    "ipo": ("eval/rewards/accuracies", True, ["--learning-rate", "1e-5"]),
    "orpo": ("eval/rewards/accuracies", True, ["--learning-rate", "3e-4", "--beta", "1"]),
    "kto": ("eval/rewards/margins", True, ["--learning-rate", "1e-5"]),
    "simpo": ("eval/rewards/accuracies", True, ["--learning-rate", "1e-5"]),
    "distill": ("eval/loss", False, ["--learning-rate", "1e-3", "--set", "distill_alpha=0"]),
}
"""Algorithm -> its measure on the held-out file, whether more is better, and its options."""


def sample(start: Path, out: Path, tasks: int, split: str) -> None:
    """Write what the starting model says to the first tasks of a split, once."""
    quietly(
        ["rollout", "--env", ENV, "--env-arg", f"split={split}", "--model", start, "-n", tasks, "--out", out,
         "--num-generations", GROUP, "--max-completion-length", 32, "--concurrency", 200, "--seed", 5],
        out.with_suffix(".log"),
    )  # fmt: skip


def teacher_of(start: Path, out: Path) -> Path:
    """Make a teacher: what GRPO makes of the starting model in 40 steps."""
    quietly(
        ["train", "--algo", "grpo", "--model", start, "--env", ENV, "--output", out / "teacher", "--max-steps", 40,
         "--prompts-per-step", 32, "--num-generations", GROUP, "--learning-rate", 3e-4, "--max-completion-length", 32,
         "--set", "averaging=token_mean", "--set", "mini_batches=2", "--set", "save_steps=0"],
        out / "teacher.log",
    )  # fmt: skip
    return out / "teacher/agent"


def learn(algo: str, start: Path, teacher: Path, out: Path, steps: int) -> dict[str, Any]:
    """Train by one algorithm and return what its measure was before and after, and the success of what it left."""
    measure, more, words = MEASURES[algo]
    run, log, began = out / algo, out / f"{algo}.log", perf_counter()
    extra = ["--teacher-model", teacher] if algo == "distill" else []
    quietly(
        ["train", "--algo", algo, "--model", start, "--data", out / "train.jsonl", "--eval-data", out / "held.jsonl",
         "--eval-steps", steps, "--max-steps", steps, "--batch-size", 32, "--output", run, "--set", "warmup_steps=5",
         "--set", "save_steps=0", *words, *extra],
        log,
    )  # fmt: skip
    minutes = (perf_counter() - began) / 60
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    told = [line[measure] for line in lines if measure in line]
    found: dict[str, Any] = {"measure": measure, "before": told[0], "after": told[-1], "minutes": minutes}
    found["improved"] = (told[-1] > told[0]) == more and told[-1] != told[0]
    if algo != "reward":
        prefix = {"sft": "full_sft", "distill": "full_dist"}.get(algo, algo)
        found["success"] = success(run / prefix, log)
    return found


def success(model: Path, log: Path) -> list[float]:
    """Return the success of a model on held-out tasks, sampled and greedy, in percent."""
    file = log.with_suffix(".json")
    quietly(
        ["eval", "--env", ENV, "-n", EVAL_TASKS, "--greedy", "--max-completion-length", 32, "--concurrency", 200,
         "--model", model, "--json", file],
        log,
    )  # fmt: skip
    return [100 * mode["success_rate"] for mode in evaluation(file)]


def main() -> None:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(description="One rollout file, eight ways to learn from it.")
    parser.add_argument("--algos", default=",".join(MEASURES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--start", type=Path, help="model that samples and learns (default: the demo's, made here)")
    parser.add_argument("--teacher", type=Path, help="model that distill learns from (default: made here by GRPO)")
    parser.add_argument("--out", type=Path, help="folder (default: the first free runs/from-one-file-N)")
    options = parser.parse_args()
    algos = options.algos.split(",")
    if unknown := set(algos) - set(MEASURES):
        parser.error(f"--algos: no {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    out = options.out or free_folder("from-one-file")
    if out.exists():
        sys.exit(f"from_one_file: {out} is there already; give another --out")
    out.mkdir(parents=True)
    start = options.start or first_model(out)
    sample(start, out / "train.jsonl", TRAIN_TASKS, "train")
    sample(start, out / "held.jsonl", HELD_TASKS, "test")
    teacher = options.teacher or (teacher_of(start, out) if "distill" in algos else start)
    before = success(start, out / "start.log")
    table = {}
    print(f"\n{ENV}: {TRAIN_TASKS} groups of {GROUP} to learn from, {HELD_TASKS} held out, {options.steps} steps of 32")
    print(f"start: success {before[0]:.1f} % sampled, {before[1]:.1f} % greedy, of {EVAL_TASKS} held-out tasks")
    print(f"\n{'':<9} {'measure on the held-out file':<30} {'before':>8} {'after':>8}  {'sampled, greedy':<16} minutes")
    for algo in algos:
        found = table[algo] = learn(algo, start, teacher, out, options.steps)
        shown = ", ".join(f"{value:.1f} %" for value in found.get("success", [])) or "-"
        verdict = "" if found["improved"] else "  NOT BETTER"
        print(
            f"{algo:<9} {found['measure']:<30} {found['before']:>8.3f} {found['after']:>8.3f}  {shown:<16} "
            f"{found['minutes']:.1f}{verdict}",
            flush=True,
        )
    (out / "table.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
