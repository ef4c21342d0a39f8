"""Each family against transformers' own model, made and saved by transformers; `-s` prints the table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gymtune.agents import GenerateRequest, Sampling
from gymtune.agents.models import CausalAttend, Decoder, ModelConfig, load_model, save_model
from gymtune.agents.torch_engine import TorchEngine

RELATIVE = 1e-4
"""Largest difference of logits, fp32, in proportion to the largest logit."""

VOCABULARY, LENGTH, NEW = 61, 48, 12
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MINIMIND = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "num_hidden_layers": 3}


def rope(kind: str, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)

CASES: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "Llama, one kv head": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 6},
    "Llama, all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "Llama 3.1 (rope llama3)": {"model_type": "llama", **LLAMA3},
    "Llama, rope linear": {"model_type": "llama", **rope("linear", factor=2.0)},
    "Llama, rope dynamic": {"model_type": "llama", "max_position_embeddings": 32, **rope("dynamic", factor=2.0)},
    "SmolLM2 (tied)": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1, **rope("default")},
    "Mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "Mistral, wide window": {"model_type": "mistral", "sliding_window": 64, **rope("yarn", factor=2.0)},
    "Qwen2 (tied)": {"model_type": "qwen2", "tie_word_embeddings": True, **rope("default", 1e6)},
    "Qwen2, untied, yarn": {"model_type": "qwen2", **YARN},
    "Qwen3": {"model_type": "qwen3", "head_dim": 16, **rope("default", 1e6)},
    "Qwen3, biases, tied, yarn": {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True, **YARN},
    "Qwen3-MoE": {"model_type": "qwen3_moe", **MOE, **rope("default", 1e6)},
    "Qwen3-MoE, biases, dense layers": {
        "model_type": "qwen3_moe",
        **MOE,
        "num_hidden_layers": 4,
        "attention_bias": True,
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        **YARN,
    },
    "MiniMind": {"model_type": "qwen3", "head_dim": 8, **MINIMIND, **rope("default", 1e6)},
    "MiniMind-MoE": {
        "model_type": "qwen3_moe",
        **MOE,
        **MINIMIND,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
        **rope("default", 1e6),
    },
}


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, str]]]:
    """What was found, by family and check; printed at the end."""
    found: dict[str, dict[str, str]] = {}
    yield found
    checks = list(dict.fromkeys(check for row in found.values() for check in row))
    print(f"\n| family | {' | '.join(checks)} |\n|---|{'---|' * len(checks)}")
    for family, row in found.items():
        print(f"| {family} | {' | '.join(row.get(check, '-') for check in checks)} |")


def foreign(case: str) -> torch.nn.Module:
    """The model of transformers, every weight random and far from its start value."""
    data = {"head_dim": 8, **SHAPE, **CASES[case]}
    config = AutoConfig.for_model(**data)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for weight in model.parameters():
            spread = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * spread if weight.dim() == 1 else 0.2 * spread)
    return cast("torch.nn.Module", model)


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def our_logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    return decoder.logits(decoder(tokens, torch.arange(tokens.shape[1])[None], CausalAttend()))


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def greedy(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once through the engine that samples in training."""
    sampling = Sampling(temperature=0, max_new_tokens=NEW)

    async def run() -> list[list[int]]:
        engine = TorchEngine(decoder)
        requests = [GenerateRequest(prompt, sampling, (), 0, str(i)) for i, prompt in enumerate(prompts)]
        return [done.ids for done in await asyncio.gather(*map(engine.generate, requests))]

    return asyncio.run(run())


@pytest.mark.parametrize("case", CASES)
def test_a_family_equals_transformers(case: str, table: dict[str, dict[str, str]], tmp_path: Path) -> None:
    row = table.setdefault(case, {})
    theirs, tokens = foreign(case), ids()
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(tokens).logits
    ours = load_model(tmp_path / "theirs")
    logits = our_logits(ours, tokens)
    error = difference(logits, expected)
    row["logits"] = f"{error:.0e}"
    assert error < RELATIVE

    save_model(ours, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)  # the same weights, the same config: the same bits
    row["saved, in transformers"] = "equal"
    back = load_model(tmp_path / "ours")
    assert back.config == ours.config
    assert torch.equal(our_logits(back, tokens), logits)
    row["reloaded"] = "equal"

    prompts = [tokens[0, :9].tolist(), tokens[1, :14].tolist(), tokens[0, 20:21].tolist()]
    settings = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": None}
    wanted = [again.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in prompts]
    assert greedy(back, prompts) == wanted
    row["greedy tokens"] = f"{NEW * len(prompts)} equal"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_half_precision_errs_no_more_than_transformers(
    case: str, dtype: torch.dtype, table: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """Saved by transformers in that dtype, read and run in it, logits in fp32; the error is that against fp32."""
    theirs, tokens = foreign(case), ids()
    with torch.no_grad():
        exact = theirs(tokens).logits
        rounded = theirs.to(dtype)(tokens).logits.float()
    theirs.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, dtype)
    assert {p.dtype for p in decoder.parameters()} == {dtype}
    logits = our_logits(decoder, tokens)
    assert logits.dtype == torch.float32
    ours, wanted = (float((x - exact).square().mean().sqrt()) for x in (logits, rounded))
    table.setdefault(case, {})[f"error in {str(dtype).removeprefix('torch.')} / theirs"] = f"{ours / wanted:.2f}"
    if "MoE" not in case:  # a router near a tie may choose otherwise when rounded
        assert 0 < ours < 1.5 * wanted


def test_the_table_has_every_family() -> None:
    from gymtune.agents.models.families import FAMILIES

    assert {case["model_type"] for case in CASES.values()} == set(FAMILIES)
    kinds = {ModelConfig.from_dict(SHAPE | case).rope_scaling for case in CASES.values()}
    assert {scaling.rope_type for scaling in kinds if scaling} == {"linear", "dynamic", "yarn", "llama3"}
