from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gymtune.agents.models import CausalAttend, Decoder, ModelConfig
from gymtune.agents.models.init import random_decoder

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
}


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    def make(model_type: str = "qwen3", seed: int = 0, **changes: Any) -> Decoder:
        """A small decoder whose every weight is far from its start value, norms too: nothing cancels."""
        config = ModelConfig.from_dict(SMALL | {"model_type": model_type} | changes)
        decoder = random_decoder(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in decoder.parameters():
                spread = torch.randn(weight.shape, generator=generator)
                weight.copy_(1 + 0.3 * spread if weight.dim() == 1 else 0.2 * spread)
        return decoder

    return make


@pytest.fixture
def whole_logits() -> Callable[[Decoder, torch.Tensor], torch.Tensor]:
    def logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return decoder.logits(decoder(ids, torch.arange(ids.shape[1])[None], CausalAttend()))

    return logits
