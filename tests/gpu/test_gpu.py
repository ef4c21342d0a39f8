"""What only a device can show: that it gives the CPU's numbers. Every number itself is tested on the CPU."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gymtune.agents import GenerateRequest, Generation, Renderer, Sampling, ScriptedAgent, rollout
from gymtune.agents.models import Decoder, load_model
from gymtune.agents.torch_engine import TorchEngine
from gymtune.trainers import Listeners, TrainConfig, train
from gymtune.trainers.batch import make_rows, micro_batches
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.policy import policy_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

DEVICE = "cuda"
FP32 = 1e-3  # two devices' order of summation, in float32
BF16 = 0.05  # two devices' rounding, in weights and activations of 8 bits


def loud(folder: Path, device: str) -> Decoder:
    """Load the model with weights large enough for peaked distributions: no two tokens are nearly as likely."""
    model = load_model(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3, generator=generator)
    return model.to(device)


def generate(model: Decoder, sampling: Sampling) -> list[Generation]:
    """Sample six prompts of unlike lengths with four slots, so that sequences wait, join and leave."""
    engine = TorchEngine(model, max_sequences=4)
    prompts = [list(range(10, 10 + length)) for length in (3, 20, 7, 33, 1, 12)]
    requests = [GenerateRequest(p, sampling, (), 17 * i + 1, str(i)) for i, p in enumerate(prompts)]

    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_engine_samples_what_the_cpu_samples(tiny_model: Path, temperature: float):
    sampling = Sampling(temperature=temperature, max_new_tokens=16)
    here, there = (generate(loud(tiny_model, device), sampling) for device in ("cpu", DEVICE))
    assert [g.ids for g in there] == [g.ids for g in here]
    for left, right in zip(here, there, strict=True):
        assert right.logprobs == pytest.approx(left.logprobs, abs=FP32)


def test_bfloat16_weights_give_float32_log_probs(tiny_model: Path):
    episodes = rollout("gymtune/Calculator-v0", ScriptedAgent(Renderer.from_folder(tiny_model)), 4)
    rows = make_rows(experiences_of(episodes, [1.0] * len(episodes), need_logprobs=False))
    found = []
    for device in ("cpu", DEVICE):
        model = load_model(tiny_model, dtype=torch.bfloat16, device=device)
        (batch,) = micro_batches(rows, 100_000, torch.device(device))
        with torch.no_grad():
            logprobs, entropy = policy_logprobs(model, batch)
        assert logprobs.dtype == entropy.dtype == torch.float32
        assert not torch.equal(logprobs, logprobs.bfloat16().float())  # computed in float32, not merely stored in it
        found.append(logprobs.cpu())
    assert torch.allclose(found[0], found[1], rtol=0, atol=BF16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_step_of_grpo(taught_model: Path, tmp_path: Path, dtype: str):
    lines: list[dict[str, Any]] = []
    config = TrainConfig(
        algo="grpo", model=str(taught_model), output_dir=str(tmp_path / "run"), env="gymtune/Arithmetic-v0",
        max_steps=1, prompts_per_step=16, max_completion_length=4, beta=0.01, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    finished = train(config, listeners=Listeners(on_step=lines.append))
    (metrics,) = lines
    assert metrics["reward_std"] > 0  # or there is nothing to learn from, and nothing is shown
    assert math.isfinite(metrics["loss"])
    assert 0 < metrics["grad_norm"] < math.inf
    assert metrics["sampling/sampling_logp_difference/mean"] < (FP32 if dtype == "float32" else BF16)
    assert load_model(finished).head_weight.isfinite().all()
