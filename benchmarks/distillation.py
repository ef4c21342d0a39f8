"""A small student with a teacher and without one: the same data, the same steps, several seeds.

    python benchmarks/distillation.py                 minutes on one core
    python benchmarks/distillation.py --quick         everything once, nothing is learnt

A teacher of four layers learns sums with a calculator from the expert. What it then says, right or wrong, is the file
of a student of two layers, which learns from it by cross-entropy alone (`distill_alpha` 1), and by cross-entropy and
the teacher's distributions (0.5). The student of cross-entropy goes on by on-policy distillation, where the teacher
judges what the student says, and beside it by as many more steps on its file. Writes OUT/table.json and prints the
table; minutes are of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a tiny model has nothing to share between threads

from demo import ENV, evaluation, free_folder

from gymtune import cli

TASK = ("--env", ENV, "--env-arg", "levels=[1]")
WAYS: Mapping[str, str] = {
    "CE alone": "start",
    "CE + KL": "both",
    "CE alone, then CE": "more",
    "CE alone, then opd (sampled)": "opd-sampled",
    "CE alone, then opd (full)": "opd-full",
}
"""How a student learns -> the name of its folder."""
FULL: Mapping[str, int] = {
    "expert": 6000, "said": 1000, "teacher": 150, "student": 180, "warm": 10, "on": 40, "batch": 48, "prompts": 64,
    "eval": 300,
}  # fmt: skip
QUICK: Mapping[str, int] = {
    "expert": 64, "said": 32, "teacher": 2, "student": 2, "warm": 1, "on": 1, "batch": 8, "prompts": 4,
    "eval": 8,
}  # fmt: skip


class Bench:
    """One folder with everything in it; `minutes` of CPU by the name of a model, without its evaluation."""

    def __init__(self, out: Path, size: Mapping[str, int]) -> None:
        self.out, self.size = out, size
        self.minutes: dict[str, float] = {}

    def gymtune(self, *words: object) -> None:
        """Run a command in this process; it and what it prints are in OUT/log.txt."""
        sys.argv = ["gymtune", *map(str, words)]
        with (self.out / "log.txt").open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
            log.write(f"$ {shlex.join(sys.argv)}\n")
            try:
                cli.main()
            except SystemExit as ended:
                if ended.code:
                    raise RuntimeError(f"`gymtune {words[0]}` ended with {ended.code}: {log.name} says why") from ended

    def prepare(self) -> None:
        """Make the files and the teacher."""
        expert = self.out / "expert.jsonl"
        self.gymtune("rollout", *TASK, "--agent", "scripted", "-n", self.size["expert"], "--out", expert)
        self.gymtune("models", "init", "--out", self.out / "teacher-base", "--env", ENV, "--layers", 4)
        self.train("teacher", "sft", "teacher-base", self.size["teacher"], *self.learning(expert))
        self.gymtune(
            "rollout", *TASK, "--model", self.out / "teacher", "-n", self.size["said"], "--max-completion-length", 32,
            "--out", self.out / "said.jsonl",
        )  # fmt: skip

    def learning(self, file: Path, rate: float = 2e-3) -> tuple[object, ...]:
        """Return the options of learning from a file."""
        return "--data", file, "--batch-size", self.size["batch"], "--learning-rate", rate

    def train(self, name: str, algo: str, start: str, steps: int, *more: object) -> None:
        """Train a model from that of another folder, and evaluate it."""
        run, began = self.out / f"{name}-run", process_time()
        self.gymtune(
            "train", "--algo", algo, "--model", self.out / start, "--output", run, "--max-steps", steps,
            "--set", f"warmup_steps={self.size['warm']}", "--set", "save_steps=0", *more,
        )  # fmt: skip
        self.minutes[name] = (process_time() - began) / 60
        (model,) = (folder for folder in run.iterdir() if folder.name in ("full_sft", "full_dist", "agent"))
        model.rename(self.out / name)
        self.gymtune(
            "eval", *TASK, "-n", self.size["eval"], "--greedy", "--max-completion-length", 32,
            "--concurrency", 200, "--model", self.out / name, "--json", self.out / f"{name}.json",
        )  # fmt: skip
        print(f"{name}: sampled and greedy {self.rates(name)}, {self.minutes[name]:.1f} minutes", flush=True)

    def student(self, seed: int) -> None:
        """Let one student learn in every way."""
        base, start = f"base-{seed}", f"start-{seed}"
        self.gymtune(
            "models", "init", "--out", self.out / base, "--env", ENV, "--layers", 2, "--hidden-size", 96,
            "--intermediate-size", 288, "--seed", seed,
        )  # fmt: skip
        teacher = ("--teacher-model", self.out / "teacher", "--seed", seed)
        said = self.out / "said.jsonl"
        kept = ("--set", "distill_top_k=32", "--set", f"teacher_cache={self.out / 'cache'}")
        learning = self.learning(said)
        for name, alpha in (("start", 1.0), ("both", 0.5)):
            weight = ("--set", f"distill_alpha={alpha}")
            self.train(f"{name}-{seed}", "distill", base, self.size["student"], *teacher, *learning, *kept, *weight)
        self.train(f"more-{seed}", "sft", start, self.size["on"], "--seed", seed, *self.learning(said, 5e-4))
        acting = (
            *TASK, "--prompts-per-step", self.size["prompts"], "--num-generations", 1,
            "--max-completion-length", 32, "--learning-rate", 5e-4, "--set", "save_trajectories=false",
        )  # fmt: skip
        for how in ("sampled", "full"):
            judged = ("--set", f"opd_loss={how}")
            self.train(f"opd-{how}-{seed}", "opd", start, self.size["on"], *teacher, *acting, *judged)

    def rates(self, name: str) -> tuple[float, float]:
        """Return the success of a model in percent, sampled and greedy."""
        sampled, greedy = evaluation(self.out / f"{name}.json")
        return 100 * sampled["success_rate"], 100 * greedy["success_rate"]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="A student with a teacher and without one.")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--quick", action="store_true", help="everything once, to see that it runs")
    parser.add_argument("--out", type=Path, help="folder (default: the first free runs/distillation-N)")
    options = parser.parse_args()
    out, size = options.out or free_folder("distillation"), QUICK if options.quick else FULL
    if out.exists():
        sys.exit(f"distillation: {out} is there already; give another --out")
    out.mkdir(parents=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    bench = Bench(out, size)
    bench.prepare()
    for seed in seeds:
        bench.student(seed)
    table: dict[str, Any] = {"teacher": bench.rates("teacher")}
    print(f"\n{ENV} level 1, {size['eval']} held-out tasks, seeds {seeds}; percent of them right")
    print(f"{'':<29} {'sampled, by seed':<20} {'mean':<6} {'greedy, by seed':<20} {'mean':<6} minutes")
    teacher = [f"{rate:.1f}" for rate in table["teacher"]]
    print(f"{'teacher':<29} {'':<20} {teacher[0]:<6} {'':<20} {teacher[1]:<6} {bench.minutes['teacher']:.1f}")
    for way, name in WAYS.items():
        sampled, greedy = zip(*(bench.rates(f"{name}-{seed}") for seed in seeds), strict=True)
        table[way] = {"sampled": sampled, "greedy": greedy}
        texts = [" ".join(f"{value:5.1f}" for value in values) for values in (sampled, greedy)]
        taken = fmean(bench.minutes[f"{name}-{seed}"] for seed in seeds)
        print(f"{way:<29} {texts[0]:<20} {fmean(sampled):<6.1f} {texts[1]:<20} {fmean(greedy):<6.1f} {taken:.1f}")
    (out / "table.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    print(f"\ntook  {process_time() / 60:.1f} minutes of one core")


if __name__ == "__main__":
    main()
