"""Single turns of 16 to 256 tokens, 32 at once, against `transformers.generate`, which waits for the longest."""

from __future__ import annotations

from random import Random

from gymtune.agents import Renderer
from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.messages import user

from .generation import Wish, sample_ours, sample_peer
from .harness import Result, Settings, compete, rate
from .shapes import SMOLLM2, folder_of, open_ours, open_peer, question

PEER = "transformers.generate, one batch"
WANTED = {PEER: 2.0}
_AT_ONCE = 32
_PROMPTS = (32, 96)  # tokens
_LENGTHS = (16, 256)


def run(settings: Settings) -> list[Result]:
    """Measure."""
    folder = folder_of(SMOLLM2, settings)
    (model, renderer), peer = open_ours(folder), open_peer(folder)
    engine = TorchEngine(model, max_sequences=_AT_ONCE)
    wishes = ragged(renderer, settings.pick(_AT_ONCE, 4), settings.pick(_LENGTHS[1], 24))
    return compete(
        "ragged single turns, 32 at once", "tokens/s",
        {"gymtune": rate(lambda: sample_ours(engine, wishes)), PEER: rate(lambda: sample_peer(peer, wishes))},
        settings,
        wanted=WANTED,
        detail={"model": SMOLLM2.name, "new_tokens": [w.new_tokens for w in wishes]},
    )  # fmt: skip


def ragged(renderer: Renderer, count: int, longest: int) -> list[Wish]:
    """Return wishes whose lengths are evenly spread, in mixed order; prompts differ in length too."""
    shortest = _LENGTHS[0]
    lengths = [shortest + (longest - shortest) * i // (count - 1) for i in range(count)]
    rng = Random(0)
    rng.shuffle(lengths)
    return [
        Wish(renderer.prompt([user(question(renderer, rng.randint(*_PROMPTS), seed))]), length)
        for seed, length in enumerate(lengths)
    ]
