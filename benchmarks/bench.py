"""Speed side by side, in one run, on the same weights and tasks: env steps, sampling, multi-turn episodes, the update.

    make bench          prints a table and writes runs/bench.json

The model is the demo's shape with random weights, so every peer does the same arithmetic. Contestants alternate; each
figure is the median of `ROUNDS` rounds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gymtune.agents import ModelAgent, Renderer, Sampling, ScriptedAgent, rollout
from gymtune.agents.models import init_model, load_model
from gymtune.agents.tokenizer_texts import tokenizer_texts
from gymtune.agents.torch_engine import TorchEngine
from gymtune.envs import make_env
from gymtune.envs.tasks import gold_texts
from gymtune.trainers import TrainConfig
from gymtune.trainers.batch import make_rows
from gymtune.trainers.sft import SFT
from gymtune.trainers.update import Updater, UpdateStats

ENV = "gymtune/Calculator-v0"
ROUNDS = 5
NEW_TOKENS = 32
REPORT = Path("runs/bench.json")

Contest = dict[str, Callable[[], int]]


def compete(name: str, unit: str, contest: Contest) -> dict[str, Any]:
    """Let the contestants alternate; each returns how many units it did. Returns and prints median units a second."""
    rates: dict[str, list[float]] = {who: [] for who in contest}
    for _ in range(ROUNDS):
        for who, work in contest.items():
            began = perf_counter()
            done = work()
            rates[who].append(done / (perf_counter() - began))
    medians = {who: median(found) for who, found in rates.items()}
    ours = next(iter(medians.values()))
    for who, rate in medians.items():
        ratio = "" if rate == ours else f"   ours is {ours / rate:.1f} times as fast"
        print(f"{name:<28} {who:<44} {rate:>10.0f} {unit}{ratio}", flush=True)
    return {"name": name, "unit": unit, "median": medians}


def env_steps() -> int:
    """Step gold episodes of 300 tasks; no model."""
    env = make_env(ENV)
    steps = 0
    for index in range(300):
        env.reset(options={"task_index": index})
        assert env.task is not None
        for text in gold_texts(env.task.gold or (), env.chat_format):
            env.step(text)
            steps += 1
    return steps


def ours_single(agent: ModelAgent, n: int) -> int:
    """Sample one turn of `n` tasks at once: the env ends after it."""
    trajectories = rollout(ENV, agent, n, env_args={"max_turns": 1})
    return sum(t.sampled_tokens for t in trajectories)


def peer_single(model: Any, renderer: Renderer, n: int) -> int:
    """The same with `transformers.generate`: one padded batch, which waits for its longest."""
    env = make_env(ENV)
    prompts = []
    for index in range(n):
        messages, info = env.reset(options={"task_index": index})
        prompts.append(renderer.prompt(messages, info["tools"]))
    return _generate(model, renderer, prompts)


def peer_episodes(model: Any, renderer: Renderer, n: int) -> int:
    """Episodes one after the other, batch 1, history rendered and prefilled again each turn."""
    env = make_env(ENV)
    tokens = 0
    for index in range(n):
        _, info = env.reset(options={"task_index": index})
        over = False
        while not over:
            assert env.episode is not None
            prompt = renderer.prompt(env.episode.messages, info["tools"])
            ids = _sample(model, renderer, [prompt])[0]
            tokens += len(ids)
            *_, terminated, truncated, _ = env.step(renderer.decode(ids))
            over = terminated or truncated
    return tokens


def _generate(model: Any, renderer: Renderer, prompts: list[list[int]]) -> int:
    return sum(len(ids) for ids in _sample(model, renderer, prompts))


def _sample(model: Any, renderer: Renderer, prompts: list[list[int]]) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS,
            eos_token_id=list(renderer.stop_ids), pad_token_id=0,
        )  # fmt: skip
    stop = renderer.stop_ids[0]
    rows = out[:, width:].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


def main() -> None:
    """Run every contest."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        init_model(folder, texts=tokenizer_texts(ENV, 300))
        renderer = Renderer.from_folder(folder)
        model, peer = load_model(folder), AutoModelForCausalLM.from_pretrained(str(folder)).eval()
        agent = ModelAgent(TorchEngine(model, max_sequences=64), renderer, Sampling(max_new_tokens=NEW_TOKENS))
        print(f"{torch.get_num_threads()} threads, {sum(p.numel() for p in model.parameters()):,} parameters, fp32\n")
        found = [
            compete("env steps, gold episodes", "steps/s", {"gymtune": env_steps}),
            compete(
                "one turn, 64 at once", "tokens/s",
                {
                    "gymtune": lambda: ours_single(agent, 64),
                    "transformers.generate, one batch": lambda: peer_single(peer, renderer, 64),
                },
            ),
            compete(
                "tool episodes, 4 turns", "tokens/s",
                {
                    "gymtune, 64 at once": lambda: sum(t.sampled_tokens for t in rollout(ENV, agent, 64)),
                    "transformers.generate, batch 1, turn by turn": lambda: peer_episodes(peer, renderer, 4),
                },
            ),
            compete("update, 64 trajectories", "tokens/s", update_contest(model, peer, renderer)),
        ]  # fmt: skip
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"\n-> {REPORT}")


def update_contest(model: Any, peer: Any, renderer: Renderer) -> Contest:
    """One optimizer step on 64 expert trajectories: ours, and the padded way with logits at every place."""
    trajectories = rollout(ENV, ScriptedAgent(renderer), 64)
    rows = make_rows(trajectories, [1.0] * len(trajectories), need_logprobs=False)
    config = TrainConfig(algo="sft", model="-", output_dir="-", data="-")
    updater = Updater(model, SFT(config), config)
    tokens = sum(len(row.tokens) for row in rows)
    width = max(len(row.tokens) for row in rows)
    ids = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows])
    labels = torch.full_like(ids, -100)
    for index, row in enumerate(rows):
        for place in row.places:
            labels[index, place] = row.tokens[place]
    optimizer = torch.optim.AdamW(peer.parameters(), lr=config.learning_rate)

    def ours() -> int:
        updater.update([rows], 0, UpdateStats())
        return tokens

    def padded() -> int:
        optimizer.zero_grad()
        peer(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        return tokens

    return {"gymtune": ours, "transformers, padded, all logits": padded}


if __name__ == "__main__":
    main()
