"""Peak memory of log-probs over a large vocabulary, forward and backward: ours against the naive way.

    python benchmarks/logprob_memory.py                    151,936 ids, 4,096 tokens, width 1,024, fp32
    python benchmarks/logprob_memory.py --tokens 512 --json

Each way runs in a process of its own, which resets its peak of resident memory once the inputs are there. What is
reported is the rise above that, less the head's gradient: both ways must hold that one. The naive way's peak comes
before its head gradient exists, so that the ratio is understated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gymtune.trainers.fused_logprob import token_logprobs

MIB = 2**20


def naive(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, as most trainers do."""
    logits = F.linear(hidden, head)
    return F.log_softmax(logits.float(), dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)


def ours(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """A chunk at a time; it gives the entropy too."""
    return token_logprobs(hidden, head, targets, 1.0)[0]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": ours, "naive": naive}


def memory(field: str) -> int:
    """Return resident bytes of this process: VmRSS now, VmHWM at most since the peak was reset."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith(field))


def peak(way: str, vocabulary: int, tokens: int, width: int) -> dict[str, float]:
    """Run one way in this process; return the peak in bytes and two numbers that must agree between the ways."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = torch.randn(vocabulary, width).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    WAYS[way](hidden[:2], head[:64], targets[:2] % 64).sum().backward()  # libraries allocate at their first call
    hidden.grad = head.grad = None
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = memory("VmRSS")
    logprobs = WAYS[way](hidden, head, targets)
    logprobs.sum().backward()
    rise = memory("VmHWM") - before - head.numel() * head.element_size()
    assert hidden.grad is not None
    return {"bytes": rise, "logprob": float(logprobs.detach().mean()), "gradient": float(hidden.grad.norm())}


def compare(vocabulary: int, tokens: int, width: int) -> dict[str, dict[str, float]]:
    """Run both ways, each in a fresh process."""
    found = {}
    for way in WAYS:
        size = ["--vocabulary", str(vocabulary), "--tokens", str(tokens), "--width", str(width)]
        done = subprocess.run(
            [sys.executable, __file__, "--way", way, *size], check=True, stdout=subprocess.PIPE, text=True
        )
        found[way] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description="Peak memory of log-probs, ours against the naive way.")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    parser.add_argument("--way", choices=WAYS, help="run this way alone, in this process, and print JSON")
    options = parser.parse_args()
    shape = (options.vocabulary, options.tokens, options.width)
    if options.way:
        print(json.dumps(peak(options.way, *shape)))
        return
    found = compare(*shape)
    ratio = found["naive"]["bytes"] / found["ours"]["bytes"]
    if options.json:
        print(json.dumps({**found, "ratio": ratio}))
        return
    print("vocabulary {:,}, tokens {:,}, width {:,}, fp32, forward and backward\n".format(*shape))
    for way, seen in found.items():
        print(f"{way:<6} {seen['bytes'] / MIB:>8,.0f} MiB   mean log-prob {seen['logprob']:.6f}", end="")
        print(f"   gradient norm {seen['gradient']:.6f}")
    print(f"\nthe naive way takes {ratio:.1f} times ours (wanted: at least 8)")


if __name__ == "__main__":
    main()
