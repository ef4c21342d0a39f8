"""Share of the counted floor: the time that FLOPs and bytes cost at this machine's ceilings, over the time it took.

`ratio` is the share; `detail` says what the time went to, by the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from gymtune.agents import Sampling, Trajectory
from gymtune.agents.models import Decoder, ModelConfig
from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.messages import user
from gymtune.trainers import TrainConfig
from gymtune.trainers.batch import make_rows
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.grpo import GRPO
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

from .ceilings import COLD_BYTES, Ceilings
from .counting import (
    ADAMW_NUMBERS,
    FP32,
    Product,
    UpdateCount,
    attention_flops,
    backward_products,
    cache_bytes,
    forward_products,
)
from .generation import Wish, sample_ours
from .groups import GROUPS, NEW_TOKENS, PROMPTS, SAMPLES
from .harness import Result, Settings
from .shapes import SMOLLM2, folder_of, open_ours, question

WANTED = 0.6
_AT_ONCE = 32
_ROWS = 1024  # a product of more rows runs at the rate of one of these many
_PEER = "counted floor"


class TimedEngine(TorchEngine):
    """An engine that notes the seconds of every step."""

    seconds: list[float]

    def step(self) -> None:
        """Step, with a clock."""
        began = perf_counter()
        super().step()
        self.seconds.append(perf_counter() - began)


def run(settings: Settings) -> list[Result]:
    """Measure decoding and updates."""
    ceilings = Ceilings(settings.pick(5, 1), cold_bytes=settings.pick(COLD_BYTES, 1 << 20))
    found = [_decode(settings, ceilings)]
    return found + [_update(settings, ceilings, tokens) for tokens in PROMPTS]


def decode_floor(config: ModelConfig, ceilings: Ceilings, contexts: Sequence[int]) -> float:
    """Return the least seconds of a step in which sequences of these lengths get one token each."""
    rows = len(contexts)
    products = sum(ceilings.seconds(product) for product in forward_products(config, rows, rows))
    by_flops = attention_flops(config, sum(contexts)) / ceilings.flops_per_second
    return products + max(by_flops, cache_bytes(config, sum(contexts)) / ceilings.bytes_per_second)


def update_floor(config: ModelConfig, ceilings: Ceilings, count: UpdateCount, parameters: int) -> float:
    """Return the least seconds of an optimizer step: forward, backward, AdamW."""
    products = [
        *forward_products(config, count.tokens, count.predicted),
        *backward_products(config, count.tokens, count.predicted),
    ]
    seconds = sum(_scaled(ceilings, product) for product in products)
    attention = 3 * attention_flops(config, count.pairs) / ceilings.flops_per_second
    return seconds + attention + ADAMW_NUMBERS * FP32 * parameters / ceilings.bytes_per_second


def _scaled(ceilings: Ceilings, product: Product) -> float:
    """Measure a product of many rows, or of a weight's gradient with many terms, at `_ROWS` of them, and scale."""
    rows, inner = min(product.rows, _ROWS), product.inner
    smaller = Product(rows, inner, product.columns, product.times)
    return ceilings.seconds(smaller) * product.rows / rows


def _decode(settings: Settings, ceilings: Ceilings) -> Result:
    model, renderer = open_ours(folder_of(SMOLLM2, settings))
    engine = TimedEngine(model, max_sequences=_AT_ONCE)
    new_tokens = settings.pick(NEW_TOKENS, 4)
    prompts = [renderer.prompt([user(question(renderer, PROMPTS[0], seed))]) for seed in range(_AT_ONCE)]

    def work() -> float:
        engine.seconds = []
        sample_ours(engine, [Wish(prompt, new_tokens) for prompt in prompts])
        return median(engine.seconds[1:])  # the first step is the prefill

    work()
    taken = [work() for _ in range(settings.rounds)]
    contexts = [PROMPTS[0] + new_tokens // 2] * _AT_ONCE
    floor = decode_floor(model.config, ceilings, contexts)
    return _share(f"decode step at {_AT_ONCE}, {SMOLLM2.name}", taken, floor, ceilings, profile(work))


def _update(settings: Settings, ceilings: Ceilings, prompt: int) -> Result:
    model, _ = open_ours(folder_of(SMOLLM2, settings))
    samples, new_tokens = settings.pick(SAMPLES, 2), settings.pick(NEW_TOKENS, 4)
    trajectories = made_up(model, [prompt] * GROUPS, samples, new_tokens)
    advantages = [1.0 if t.sample % 2 else -1.0 for t in trajectories]
    rows = make_rows(experiences_of(trajectories, advantages, need_logprobs=True))
    config = TrainConfig(algo="grpo", model="-", output_dir="-", env="-", learning_rate=1e-6)
    updater = Updater(model, GRPO(config), config)

    def work() -> float:
        began = perf_counter()
        updater.update([rows], 0, UpdateStats())
        return perf_counter() - began

    work()
    taken = [work() for _ in range(settings.rounds)]
    count = UpdateCount.of_groups([prompt] * GROUPS, samples, new_tokens)
    floor = update_floor(model.config, ceilings, count, sum(p.numel() for p in model.parameters()))
    name = f"update, {GROUPS} prompts of {prompt} x {samples}"
    return _share(name, taken, floor, ceilings, profile(work))


def made_up(model: Decoder, prompts: Sequence[int], samples: int, new_tokens: int) -> list[Trajectory]:
    """Return trajectories of random tokens in groups: prompts of these lengths, log-probs of a uniform policy."""
    rng, size = Random(0), model.config.vocab_size
    guess = -float(torch.tensor(float(size)).log())
    found = []
    for number, length in enumerate(prompts):
        prompt = rng.choices(range(size), k=length)
        for sample in range(samples):
            trajectory = Trajectory(
                trajectory_id=f"{number}/{sample}", group_id=str(number), task_id=str(number), env_id="-",
                task_index=number, sample=sample, sampling=Sampling(),
            )  # fmt: skip
            trajectory.start_segment()
            trajectory.append_context(prompt)
            trajectory.append_turn("", "length", rng.choices(range(size), k=new_tokens), [guess] * new_tokens)
            found.append(trajectory)
    return found


def _share(name: str, taken: Sequence[float], floor: float, ceilings: Ceilings, spent: dict[str, float]) -> Result:
    ratios = [floor / seconds for seconds in taken]
    note = ", ".join(f"{what} {share:.0%}" for what, share in list(spent.items())[:4])
    detail: dict[str, Any] = {"spent": spent, "ceilings": ceilings.record()}
    milliseconds = 1e3 * median(taken)
    return Result(
        name, _PEER, "ms", milliseconds, 1e3 * floor, median(ratios), WANTED, ratios, note=note, detail=detail
    )


def profile(work: Callable[[], object], shown: int = 10) -> dict[str, float]:
    """Return what one run of `work` is spent on: the costliest ops, `the rest`, and `outside of ops` (Python)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        began = perf_counter()
        work()
        wall = 1e6 * (perf_counter() - began)  # microseconds, as the profiler's
    ops = sorted(
        ((event.key.removeprefix("aten::"), event.self_cpu_time_total) for event in profiler.key_averages()),
        key=lambda op: op[1],
        reverse=True,
    )
    spent = {name: seconds / wall for name, seconds in ops[:shown]}
    spent["the rest"] = sum(seconds for _, seconds in ops[shown:]) / wall
    spent["outside of ops"] = max(0.0, 1 - sum(spent.values()))
    return spent
