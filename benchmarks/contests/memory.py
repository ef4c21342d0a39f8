"""Peak memory of log-probs over a large vocabulary: what `logprob_memory.py` finds, as a line of the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .harness import Result, Settings

PEER = "log_softmax(logits.float())"
WANTED = 8.0
_MIB = 1 << 20


def run(settings: Settings) -> list[Result]:
    """Measure once: bytes do not depend on what else runs. The ratio is the naive way's bytes to ours."""
    vocabulary, tokens, width = settings.pick(151_936, 8000), settings.pick(4096, 512), settings.pick(1024, 32)
    script = Path(__file__).parents[1] / "logprob_memory.py"
    size = ["--vocabulary", str(vocabulary), "--tokens", str(tokens), "--width", str(width)]
    done = subprocess.run([sys.executable, str(script), "--json", *size], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    ours, naive = (found[way]["bytes"] / _MIB for way in ("ours", "naive"))
    name = f"log-prob memory, V {vocabulary} x T {tokens}"
    return [Result(name, PEER, "MiB", ours, naive, found["ratio"], WANTED, detail=found)]
