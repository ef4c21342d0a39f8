"""The same sampling requests for both sides: our engine, and `transformers.generate` on one padded batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gymtune.agents import GenerateRequest, Sampling
from gymtune.agents.torch_engine import TorchEngine


@dataclass(frozen=True)
class Wish:
    """A prompt and how many tokens to sample; nothing ends a sequence earlier."""

    prompt: list[int]
    new_tokens: int


def sample_ours(engine: TorchEngine, wishes: Sequence[Wish]) -> int:
    """Sample all wishes at once; return the number of tokens."""

    async def work() -> int:
        requests = [
            GenerateRequest(
                prompt_ids=wish.prompt, sampling=Sampling(max_new_tokens=wish.new_tokens), stop_ids=(), seed=i,
                session=str(i),
            )
            for i, wish in enumerate(wishes)
        ]  # fmt: skip
        found = await asyncio.gather(*map(engine.generate, requests))
        for request in requests:
            engine.release(request.session)
        return sum(len(generation.ids) for generation in found)

    return _expect(asyncio.run(work()), wishes)


def sample_peer(model: Any, wishes: Sequence[Wish]) -> int:
    """Sample all wishes as one batch, which goes on until the longest is done; return the tokens asked for."""
    rows = generate(model, [wish.prompt for wish in wishes], max(wish.new_tokens for wish in wishes))
    return _expect(sum(len(row[: wish.new_tokens]) for row, wish in zip(rows, wishes, strict=True)), wishes)


def generate(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Return `new_tokens` sampled ids a prompt: padded on the left, temperature 1, the full softmax."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*([0] * (width - len(p))), *p] for p in prompts])
    mask = torch.tensor([[*([0] * (width - len(p))), *([1] * len(p))] for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=new_tokens,
        )  # fmt: skip
    rows: list[list[int]] = out[:, width:].tolist()
    return rows


def _expect(tokens: int, wishes: Sequence[Wish]) -> int:
    wanted = sum(wish.new_tokens for wish in wishes)
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens were sampled, {wanted} were asked for: the sides would not do equal work")
    return tokens
