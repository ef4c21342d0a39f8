"""An optimizer step on expert trajectories, against the usual way: padded rows, logits at every place."""

from __future__ import annotations

import torch

from gymtune.agents import ScriptedAgent, rollout
from gymtune.trainers import TrainConfig
from gymtune.trainers.batch import make_rows
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.sft import SFT
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

from .env_steps import ENV
from .harness import Result, Settings, compete, rate
from .shapes import SMOLLM2, TINY, Shape, folder_of, open_ours, open_peer

PEER = "transformers, padded, all logits"


def run(settings: Settings) -> list[Result]:
    """Measure, for a tiny model and for a small one."""
    found = _contest(settings, TINY, settings.pick(64, 4))
    return found + _contest(settings, SMOLLM2, settings.pick(16, 4))


def _contest(settings: Settings, shape: Shape, count: int) -> list[Result]:
    folder = folder_of(shape, settings)
    (model, renderer), peer = open_ours(folder), open_peer(folder)
    trajectories = rollout(ENV, ScriptedAgent(renderer), count)
    rows = make_rows(experiences_of(trajectories, [1.0] * count, need_logprobs=False))
    config = TrainConfig(algo="sft", model="-", output_dir="-", data="-")
    updater = Updater(model, SFT(config), config)
    tokens = sum(len(t.tokens) for t in trajectories)
    width = max(len(t.tokens) for t in trajectories)
    ids = torch.tensor([t.tokens + [0] * (width - len(t.tokens)) for t in trajectories])
    mask = torch.tensor([[1] * len(t.tokens) + [0] * (width - len(t.tokens)) for t in trajectories])
    trained = torch.tensor([t.response_mask + [0] * (width - len(t.tokens)) for t in trajectories])
    labels = ids.masked_fill(trained == 0, -100)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=config.learning_rate)
    peer.train()

    def ours() -> int:
        updater.update([rows], 0, UpdateStats())
        return tokens

    def padded() -> int:
        optimizer.zero_grad()
        peer(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), config.max_grad_norm)
        optimizer.step()
        return tokens

    name = f"update, {count} episodes, {shape.name}"
    return compete(name, "tokens/s", {"gymtune": rate(ours), PEER: rate(padded)}, settings)
