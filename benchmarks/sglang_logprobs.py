"""Are the sampler's log-probs the trainer's? Before and after each sync, by every way, on a real server.

    python benchmarks/sglang_logprobs.py --url http://127.0.0.1:30000 --model FOLDER
    python benchmarks/sglang_logprobs.py --url ... --model FOLDER --syncs 3 --way disk --json

The server must serve FOLDER in float32 (`gymtune serve --model FOLDER`), and see the same file system as this process.
Before each sync the server samples with the weights that it has, and after it with the new ones; each sampled token's
log-prob is compared with that of the trainer's model. Half of the prompts are the same every time, so that a cache that
was not flushed would show. In the last rows the weights change while requests run: each span of a turn is compared with
the weights that its version names. The weights move by noise that shifts log-probs by far more than the tolerance.
At the end the server has FOLDER's weights again.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

import torch
from torch import nn

from gymtune.agents.backend import GenerateRequest, Generation
from gymtune.agents.models import load_any, merged_state
from gymtune.agents.sglang import Servers, SGLangEngine
from gymtune.agents.sglang.parity import Parity, score_with
from gymtune.agents.sglang.weights import WeightSync, make_way
from gymtune.agents.trajectory import Sampling

WAYS = ("disk", "tensor", "distributed")
TEMPERATURES = (1.0, 0.7)
PROMPTS, TOKENS, LONG = 16, 48, 300
STEP = 0.02


def requests(vocab_size: int, temperature: float, seed: int, tokens: int) -> list[GenerateRequest]:
    """Return turns to sample; the first half has the same prompts whatever the seed."""
    asked = []
    for number in range(PROMPTS):
        draw = Random(number if number < PROMPTS // 2 else 1000 * seed + number)
        ids = [draw.randrange(vocab_size) for _ in range(draw.randint(3, 40))]
        sampling = Sampling(temperature=temperature, max_new_tokens=tokens)
        asked.append(GenerateRequest(ids, sampling, (), 0, str(number)))
    return asked


async def sample(engine: SGLangEngine, asked: Sequence[GenerateRequest]) -> list[Generation]:
    """Sample all turns at once."""
    return list(await asyncio.gather(*(engine.generate(one) for one in asked)))


def gaps(model: nn.Module, asked: GenerateRequest, got: Generation) -> list[float]:
    """Return how far each sampled token's log-prob is from the model's."""
    start = len(asked.prompt_ids) - 1
    scores = score_with(model, asked.sampling.temperature)([*asked.prompt_ids, *got.ids])[start:]
    return [abs(sampled - scored) for sampled, scored in zip(got.logprobs, scores, strict=True)]


class Bench:
    """One server, one model, and the table that comes of them."""

    def __init__(self, url: str, folder: Path) -> None:
        self.servers, self.folder = Servers([url]), folder
        self.model = load_any(folder)
        self.version = 0
        self.rows: list[dict[str, object]] = []

    def run(self, way: str, syncs: int) -> None:
        """Add the rows of a way."""
        with tempfile.TemporaryDirectory() as place:
            parity = Parity(score_with(self.model), self.model.config.vocab_size, 1.0)
            sync = WeightSync(self.servers, make_way(way, self.servers, folder=Path(place), start=self.folder), parity)
            engine = SGLangEngine(self.servers, vocab_size=self.model.config.vocab_size, sync=sync)
            self.push(engine, move=False)
            found: dict[tuple[float, str], list[float]] = {}
            seconds = []
            for _ in range(syncs):
                self.compare(engine, found, "before")
                self.push(engine)
                seconds.append(sync.metrics["sync/seconds"])
                self.compare(engine, found, "after")
            for (temperature, when), differences in found.items():
                self.add(way, temperature, when, differences, median(seconds))
            for temperature in TEMPERATURES:
                self.swap(engine, way, temperature)
            sync.close()

    def compare(self, engine: SGLangEngine, found: dict[tuple[float, str], list[float]], when: str) -> None:
        """Sample at every temperature and note the differences."""
        for temperature in TEMPERATURES:
            asked = requests(self.model.config.vocab_size, temperature, self.version, TOKENS)
            for one, got in zip(asked, asyncio.run(sample(engine, asked)), strict=True):
                assert (got.policy_version, got.spans) == (self.version, ())
                found.setdefault((temperature, when), []).extend(gaps(self.model, one, got))

    def swap(self, engine: SGLangEngine, way: str, temperature: float) -> None:
        """Change the weights twice while turns are sampled and compare each span with its own weights."""
        models = {self.version: copy.deepcopy(self.model)}

        async def work() -> list[Generation]:
            running = asyncio.create_task(sample(engine, asked))
            for _ in range(2):
                await asyncio.sleep(0.3)
                await asyncio.to_thread(self.push, engine)
                models[self.version] = copy.deepcopy(self.model)
            return await running

        asked = requests(self.model.config.vocab_size, temperature, self.version, LONG)
        differences, swapped = [], 0
        for one, got in zip(asked, asyncio.run(work()), strict=True):
            spans = got.spans or ((got.policy_version, 0, len(got.ids)),)
            swapped += len(spans) > 1
            for version, start, end in spans:
                differences += gaps(models[version], one, got)[start:end]
        self.add(way, temperature, f"{swapped} turns swapped", differences, None)

    def push(self, engine: SGLangEngine, *, move: bool = True) -> None:
        """Move the weights, as a step would, and bring them to the server."""
        self.version += 1
        with torch.no_grad():
            for weight in self.model.parameters() if move else ():
                weight.add_(STEP * torch.randn_like(weight))
        engine.load_weights(self.version, merged_state(self.model))

    def add(self, way: str, temperature: float, when: str, differences: list[float], seconds: float | None) -> None:
        """Add a row."""
        row = {"way": way, "temperature": temperature, "when": when, "tokens": len(differences)}
        self.rows.append(row | {"largest": max(differences), "seconds": seconds})

    def close(self) -> None:
        """Give the server its own weights back."""
        url = self.servers.urls[0]
        body = {"model_path": str(self.folder.resolve()), "weight_version": "default"}
        self.servers.post(url, "/update_weights_from_disk", body)
        self.servers.close()


def table(rows: Sequence[dict[str, object]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| way | temperature | sampled | tokens | largest difference | seconds a sync |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.2f}"
        cells = (row["way"], row["temperature"], row["when"], row["tokens"], f"{row['largest']:.1e}", seconds)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--syncs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(given.url, given.model)
    facts = bench.servers.facts(given.url)
    try:
        for way in given.way or WAYS:
            bench.run(way, given.syncs)
    finally:
        bench.close()
    if given.json:
        print(json.dumps(bench.rows))
        return
    print(f"SGLang {facts.version}, {facts.model_type}, {given.syncs} syncs a way\n\n{table(bench.rows)}")


if __name__ == "__main__":
    main()
