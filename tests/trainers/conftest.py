"""Episodes written down token by token, small decoders, configs, and trainers on the tiny model."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from gymtune.agents import ModelAgent, Renderer, Sampling, Trajectory, env_factory
from gymtune.agents.models import Decoder, ModelConfig, load_model
from gymtune.agents.models.init import random_decoder
from gymtune.agents.torch_engine import TorchEngine
from gymtune.trainers import Resolved, TrainConfig, Trainer
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.run_folder import RunFolder


@pytest.fixture
def episode() -> Callable[..., Trajectory]:
    """Make a trajectory of `(mask, ids)` parts; the text "segment" begins a new one. Log-probs are -0.5, -1, ..."""

    def make(*parts: Any, name: str = "t0", group: str = "g0", reward: float = 0.0, **fields: Any) -> Trajectory:
        fields = {"sampling": Sampling(temperature=1.0), "terminated": True} | fields
        trajectory = Trajectory(
            trajectory_id=name, group_id=group, task_id="task", env_id="E-v0", task_index=0, **fields
        )
        trajectory.start_segment()
        for part in parts:
            if part == "segment":
                trajectory.start_segment()
            elif part[0] == 0:
                trajectory.append_context(part[1])
            else:
                first = trajectory.sampled_tokens + 1
                trajectory.append_turn("said", "stop", part[1], [-0.5 * (first + i) for i in range(len(part[1]))])
        if trajectory.turns:
            trajectory.turns[-1].reward = reward
        return trajectory

    return make


@pytest.fixture
def decoder() -> Callable[..., Decoder]:
    """Make a float64 decoder whose every weight is far from its start value, norms too: nothing cancels."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
        config = ModelConfig.from_dict(
            {
                "model_type": "qwen3",
                "vocab_size": 31,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 4,
                "max_position_embeddings": 128,
                "eos_token_id": 0,
                "tie_word_embeddings": True,
            }
        )
        model = random_decoder(config).to(dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                spread = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.copy_(1 + 0.3 * spread if weight.dim() == 1 else 0.3 * spread)
        return model

    return make


@pytest.fixture
def config() -> Callable[..., TrainConfig]:
    """Make a config whose paths nobody opens."""

    def make(algo: str = "grpo", **changes: Any) -> TrainConfig:
        source = {"data": "unused"} if algo == "sft" else {"env": "gymtune/Arithmetic-v0"}
        return TrainConfig(algo=algo, **({"model": "unused", "output_dir": "unused"} | source | changes))

    return make


@pytest.fixture
def trainer(taught_model: Path, tiny_renderer: Renderer, tmp_path: Path) -> Callable[..., Trainer]:
    """Make a trainer of an online algorithm on one-digit sums with the taught model: 4 groups of 4."""
    numbers = count()

    def make(algo: str = "grpo", env: Any = None, **changes: Any) -> Trainer:
        small = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 4, "learning_rate": 1e-3}
        where = {"model": str(taught_model), "output_dir": str(tmp_path / f"run{next(numbers)}")}
        settings = TrainConfig(algo=algo, env="gymtune/Arithmetic-v0", **(where | small | changes))
        model = load_model(taught_model)
        sampling = Sampling(temperature=settings.temperature, max_new_tokens=settings.max_completion_length)
        agent = ModelAgent(TorchEngine(model), tiny_renderer, sampling)
        reference = load_model(taught_model) if ALGORITHMS[algo].reference_model(settings) else None
        made = env or env_factory(settings.env, agent, settings.env_args)
        run = RunFolder.create(Resolved(settings, {}))
        return Trainer(settings, model, agent, run, env=made, reference=reference)

    return make


@pytest.fixture
def settings(taught_model: Path, sums_file: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Make a config of six quick steps in which every weight moves."""

    def make(algo: str, name: str = "run", **changes: Any) -> TrainConfig:
        source: dict[str, Any] = {"data": str(sums_file), "batch_size": 8} if algo == "sft" else {}
        if algo != "sft":
            source = {"env": "gymtune/Arithmetic-v0", "prompts_per_step": 4, "num_generations": 4}
            source |= {"max_completion_length": 4, "beta": 0.05}
        base = {"model": str(taught_model), "output_dir": str(tmp_path / name), "max_steps": 6, "save_steps": 2}
        return TrainConfig(algo=algo, **(base | source | {"learning_rate": 3e-3, "warmup_steps": 2} | changes))

    return make
