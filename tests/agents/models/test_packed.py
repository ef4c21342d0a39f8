"""Packed layers compute what the decoder computes: every family, biases, experts, adapters, numbers of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gymtune.agents.models import CausalAttend, Decoder, apply_lora
from gymtune.agents.models.packed import PackedDecoder, PackedProduct

pytestmark = [
    pytest.mark.skipif(not PackedProduct.available(), reason="this torch has no oneDNN"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

MakeDecoder = Callable[..., Decoder]
FP32_ATOL = 2e-5  # logits are of size 1 to 10
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False} | EXPERTS,
}


def scattered(decoder: Decoder) -> Decoder:
    """Give norms and biases values that matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.dim() == 1:
                weight.add_(0.4 * torch.randn(weight.shape, generator=generator))
    return decoder


@torch.no_grad()
def logits(layers: Any, count: int) -> torch.Tensor:
    ids = torch.arange(count)[None] * 3 % 50
    return layers.logits(layers(ids, torch.arange(count)[None], CausalAttend())[0])


@pytest.mark.parametrize("count", [1, 5, 33, 70])
@pytest.mark.parametrize("case", CASES)
def test_packed_layers_equal_the_decoder(make_decoder: MakeDecoder, case: str, count: int) -> None:
    decoder = scattered(make_decoder(**CASES[case]))
    assert PackedDecoder.suits(decoder)
    torch.testing.assert_close(
        logits(PackedDecoder(decoder), count), logits(decoder, count), atol=FP32_ATOL, rtol=FP32_ATOL
    )


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe"])
def test_adapters_are_merged(make_decoder: MakeDecoder, case: str) -> None:
    decoder = scattered(make_decoder(**CASES[case]))
    plain = logits(decoder, 7)
    apply_lora(decoder, r=3, alpha=6, seed=1)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    adapted = logits(decoder, 7)
    assert (adapted - plain).abs().max() > 0.1
    torch.testing.assert_close(logits(PackedDecoder(decoder), 7), adapted, atol=1e-4, rtol=1e-4)


def test_halved_and_foreign_models_are_not_packed(make_decoder: MakeDecoder) -> None:
    assert not PackedDecoder.suits(make_decoder().to(torch.bfloat16))
    assert not PackedDecoder.suits(make_decoder().double())
    assert not PackedDecoder.suits(torch.nn.Linear(2, 2))


def test_products_of_many_rows_have_few_sizes() -> None:
    """OneDNN makes code for every number of rows and keeps it."""
    assert [PackedDecoder.rows(count) for count in (1, 40, 64, 65, 128, 129)] == [1, 40, 64, 128, 128, 192]
    assert len({PackedDecoder.rows(count) for count in range(1, 4097)}) == 64 + 63
