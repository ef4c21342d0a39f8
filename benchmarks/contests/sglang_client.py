"""What the client adds to a server's own time: ours against a bare loop over the same requests, side by side.

    python benchmarks/contests/sglang_client.py --url http://127.0.0.1:30000 --vocab-size 461

The loop is one `httpx.AsyncClient` and `asyncio.gather`: it sends the bodies, reads the JSON, checks nothing. Both
sides take turns; each round is one asyncio.run over all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from statistics import median
from time import perf_counter, process_time
from typing import Any

import httpx

from gymtune.agents import GenerateRequest, Sampling
from gymtune.agents.sglang import Servers, SGLangEngine
from gymtune.agents.sglang.wire import request_body

WANTED = 1.15  # ours to the loop's


def main() -> None:
    """Measure and print one line a side and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--requests", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=32, help="sampled a request")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    requests = [
        GenerateRequest(
            prompt_ids=[(7 * k + 3 * n) % options.vocab_size for n in range(options.prompt)],
            sampling=Sampling(temperature=1.0, max_new_tokens=options.tokens),
            stop_ids=(),
            seed=k,
            session=str(k),
        )
        for k in range(options.requests)
    ]
    engine = SGLangEngine(Servers([options.url]), vocab_size=options.vocab_size)
    sides = {
        "raw loop": lambda: asyncio.run(raw(options.url, requests)),
        "gymtune": lambda: asyncio.run(ours(engine, requests)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.rounds + 1):
        for name in list(sides) if turn % 2 else list(reversed(sides)):
            began, worked = perf_counter(), process_time()
            tokens = sides[name]()
            if turn:  # the first warms up
                seconds[name].append((perf_counter() - began) / tokens * options.requests * options.tokens)
                cpu[name].append(process_time() - worked)
    engine.close()
    for name in sides:
        print(f"{name:9} {median(seconds[name]):.3f} s a round, of the client's own CPU {median(cpu[name]):.3f} s")
    ratios = [a / b for a, b in zip(seconds["gymtune"], seconds["raw loop"], strict=True)]
    ratio = median(seconds["gymtune"]) / median(seconds["raw loop"])
    print(
        f"ratio {ratio:.3f} (median of ratios {median(ratios):.3f}, {min(ratios):.2f} to {max(ratios):.2f}); at most "
        f"{WANTED} is wanted; {options.requests} at once, {options.prompt} + {options.tokens} tokens, "
        f"{options.rounds} rounds"
    )
    sys.exit(ratio > WANTED)


async def raw(url: str, requests: list[GenerateRequest]) -> int:
    """Send the same bodies by hand and return how many tokens came back."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:

        async def one(request: GenerateRequest) -> Any:
            body = request_body(request, max_new_tokens=request.sampling.max_new_tokens)
            response = await client.post(f"{url}/generate", json=body)
            return json.loads(response.content)

        answers = await asyncio.gather(*map(one, requests))
    return sum(len(answer["output_ids"]) for answer in answers)


async def ours(engine: SGLangEngine, requests: list[GenerateRequest]) -> int:
    """Sample the same requests through the backend."""
    return sum(len(found.ids) for found in await asyncio.gather(*map(engine.generate, requests)))


if __name__ == "__main__":
    main()
