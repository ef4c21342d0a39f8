"""A decode step of a tiny model at batch 32: what the code around the arithmetic costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.messages import user

from .generation import Wish, sample_ours, sample_peer
from .harness import Contender, Result, Settings, compete
from .shapes import TINY, folder_of, open_ours, open_peer, question

PEER = "transformers.generate"
WANTED = {PEER: 5.0}
_AT_ONCE = 32
_PROMPT = 45


def run(settings: Settings) -> list[Result]:
    """Measure."""
    folder = folder_of(TINY, settings)
    (model, renderer), peer = open_ours(folder), open_peer(folder)
    engine = TorchEngine(model, max_sequences=_AT_ONCE)
    prompts = [renderer.prompt([user(question(renderer, _PROMPT, seed))]) for seed in range(_AT_ONCE)]
    long = settings.pick(129, 9)
    parameters = sum(p.numel() for p in model.parameters())
    return compete(
        "tiny model, decode step at 32", "steps/s",
        {
            "gymtune": decode_steps(lambda wishes: sample_ours(engine, wishes), prompts, long),
            PEER: decode_steps(lambda wishes: sample_peer(peer, wishes), prompts, long),
        },
        settings,
        wanted=WANTED,
        detail={"model": TINY.name, "parameters": parameters},
    )  # fmt: skip


def decode_steps(
    sample: Callable[[Sequence[Wish]], int], prompts: Sequence[list[int]], long: int, short: int = 1
) -> Contender:
    """Return a contender that gives decode steps a second: what `long` tokens cost over `short` ones.

    Prefill, set-up and the first sampled token are in both and cancel.
    """

    def seconds(new_tokens: int) -> float:
        began = perf_counter()
        sample([Wish(prompt, new_tokens) for prompt in prompts])
        return perf_counter() - began

    def contender() -> float:
        more = seconds(long) - seconds(short)
        return (long - short) / max(more, 1e-9)  # a quick look's few steps may drown in noise

    return contender
