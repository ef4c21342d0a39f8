"""Groups of 8 samples of one prompt, 45 or 680 tokens long, against `transformers.generate`, which prefills each."""

from __future__ import annotations

from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.messages import user

from .generation import Wish, sample_ours, sample_peer
from .harness import Result, Settings, compete, rate
from .shapes import SMOLLM2, folder_of, open_ours, open_peer, question

PROMPTS = (45, 680)
"""Tokens of a plain question, and of one that brings tool schemas."""

GROUPS, SAMPLES, NEW_TOKENS = 2, 8, 64
PEER = "transformers.generate, one batch"


def run(settings: Settings) -> list[Result]:
    """Measure both lengths."""
    folder = folder_of(SMOLLM2, settings)
    (model, renderer), peer = open_ours(folder), open_peer(folder)
    engine = TorchEngine(model, max_sequences=GROUPS * SAMPLES)
    samples, new_tokens = settings.pick(SAMPLES, 2), settings.pick(NEW_TOKENS, 4)
    found = []
    for tokens in PROMPTS:
        prompts = [renderer.prompt([user(question(renderer, tokens, seed))]) for seed in range(GROUPS)]
        wishes = [Wish(prompt, new_tokens) for prompt in prompts for _ in range(samples)]

        def ours(wishes: list[Wish] = wishes) -> int:
            return sample_ours(engine, wishes)

        def theirs(wishes: list[Wish] = wishes) -> int:
            return sample_peer(peer, wishes)

        name = f"groups, {GROUPS} prompts of {tokens} x {samples}"
        found += compete(name, "tokens/s", {"gymtune": rate(ours), PEER: rate(theirs)}, settings)
    return found
