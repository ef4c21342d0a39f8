"""What the floor counts is what torch counts, and what can be counted by hand."""

import pytest
import torch
from contests.counting import (
    Product,
    UpdateCount,
    attention_flops,
    backward_products,
    cache_bytes,
    causal_pairs,
    forward_products,
)
from torch.utils.flop_counter import FlopCounterMode

from gymtune.agents.models import CausalAttend, ModelConfig
from gymtune.agents.models.init import random_decoder

CONFIG = ModelConfig.from_dict({
    "model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
})  # fmt: skip
TOKENS, PREDICTED = 11, 5
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")


def counted(counter: FlopCounterMode) -> int:
    every = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in every.items() if str(op) in PRODUCTS)


def test_products_of_a_forward_and_a_backward_pass_are_those_that_torch_counts():
    model = random_decoder(CONFIG)
    ids, positions = torch.arange(TOKENS)[None], torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as forward:
        logits = model.logits(model(ids, positions, CausalAttend())[0, :PREDICTED])
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert counted(forward) == sum(product.flops for product in forward_products(CONFIG, TOKENS, PREDICTED)) > 0
    assert counted(backward) == sum(product.flops for product in backward_products(CONFIG, TOKENS, PREDICTED)) > 0


def test_attention_of_one_token_over_another_by_hand():
    # 2 layers x 4 heads x (8 multiplications with additions for the score, 8 for the value)
    assert attention_flops(CONFIG, 1) == 2 * 4 * (2 * 8 + 2 * 8)
    # 2 layers x (key and value) x 2 heads x 8 numbers of 4 bytes
    assert cache_bytes(CONFIG, 3) == 3 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("row", [1, 2, 7])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_causal_pairs_are_the_ones_of_the_mask(prefix: int, row: int):
    mask = torch.ones(row, prefix + row, dtype=torch.bool).tril_(prefix)
    assert causal_pairs(prefix, row) == int(mask.sum())


def test_an_update_counts_a_prompt_once_and_a_last_token_not_at_all():
    # prompts of 3 and 1 tokens, two rows of two sampled tokens each: the rows compute one token each
    count = UpdateCount.of_groups([3, 1], samples=2, new_tokens=2)
    assert count.tokens == 3 + 1 + 4
    assert count.predicted == 8
    assert count.pairs == (6 + 2 * (3 + 1)) + (1 + 2 * (1 + 1))


def test_flops_of_a_product():
    assert Product(2, 3, 5, times=7).flops == 2 * 2 * 3 * 5 * 7
