"""Speed and memory side by side with peers, in one run: same weights, prompts, lengths, threads and dtype (fp32).

    make bench                                             everything, about an hour on two cores
    python benchmarks/bench.py --only ragged,tiny          some of it
    python benchmarks/bench.py --quick                     toy sizes: does it run? The figures mean nothing
    python benchmarks/bench.py --peer-python VENV/bin/python --json FILE

Contestants alternate, figures are medians over the rounds after one to warm up, ratios are taken round by round. The
models have known shapes and random weights, so nothing is downloaded. TRL is compared where it is installed, here or
in an environment of its own (`pip install 'trl==1.16.*'`) whose interpreter is named.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from contests.harness import HEADER, Result, Settings, line

CONTESTS = {
    "grpo": "grpo_step",
    "env": "env_steps",
    "tiny": "tiny",
    "ragged": "ragged",
    "groups": "groups",
    "episodes": "episodes",
    "update": "padded_update",
    "memory": "memory",
    "floor": "floor",
}
"""Name on the command line -> module in `contests/`, in the order in which they run: the peer's step with long prompts
needs most of a laptop's memory, so it comes before we have kept any."""


def machine() -> dict[str, Any]:
    """Say what the figures depend on."""
    import torch
    import transformers

    info = Path("/proc/cpuinfo")
    names = [row.partition(":")[2].strip() for row in info.read_text().splitlines() if row.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "load_before": round(os.getloadavg()[0], 2),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "-"),
        "spin_count": os.environ.get("GOMP_SPINCOUNT", "-"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """Run the contests that were asked for."""
    parser = argparse.ArgumentParser(description="Speed and memory side by side with peers.")
    parser.add_argument("--only", help=f"some of: {','.join(CONTESTS)}")
    parser.add_argument("--json", type=Path, help="file for every round's figures")
    parser.add_argument("--rounds", type=int, help="measured rounds (default 5; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="toy sizes: to see that everything runs")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides (default: torch's choice)")
    parser.add_argument("--peer-python", help="interpreter with TRL (default: this one, where it has TRL)")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CONTESTS)
    if unknown := sorted(set(names) - set(CONTESTS)):
        parser.error(f"--only: no contest {', '.join(unknown)}; there are {', '.join(CONTESTS)}")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `gymtune` on a quiet machine; the peer's process inherits it
    from gymtune.agents.threads import oversubscribed, use_threads

    use_threads(options.threads)
    about = machine()
    print("  ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    if warning := oversubscribed():
        print(f"bench: {warning}", file=sys.stderr)
    if options.quick:
        print("quick: toy sizes, the figures mean nothing")
    print(HEADER)
    found: list[Result] = []
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(
            Path(scratch), options.rounds or (1 if options.quick else 5), options.quick, about["threads"],
            options.peer_python,
        )  # fmt: skip
        for name in names:
            began = perf_counter()
            run: Callable[[Settings], list[Result]] = import_module(f"contests.{CONTESTS[name]}").run
            for result in run(settings):
                print(line(result), flush=True)
                found.append(result)
            gc.collect()  # optimizers and caches of the last contest
            seconds[name] = perf_counter() - began
            if options.json:  # after each contest: an interrupted run keeps what it has
                record = {"quick": options.quick, "machine": about, "rounds": settings.rounds, "seconds": seconds}
                options.json.parent.mkdir(parents=True, exist_ok=True)
                results = [result.record() for result in found]
                options.json.write_text(json.dumps({**record, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
