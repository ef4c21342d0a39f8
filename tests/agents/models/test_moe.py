from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from gymtune.agents.models import CausalAttend, Decoder, save_model
from gymtune.agents.models.moe import MoE, balance_loss, split_experts, tally

MakeDecoder = Callable[..., Decoder]

FP32_ATOL = 1e-5
FP64_ATOL = 1e-12
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


@pytest.fixture
def make_moe(make_decoder: MakeDecoder) -> MakeDecoder:
    def make(**changes: Any) -> Decoder:
        return make_decoder("qwen3_moe", **EXPERTS | changes)

    return make


def mixture(decoder: Decoder) -> MoE:
    block = decoder.model.layers[0].mlp
    assert isinstance(block, MoE)
    return block


def dense(block: MoE, x: Tensor) -> Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen."""
    scores = F.softmax(block.gate(x), -1)
    kept = scores >= scores.topk(block.chosen, -1).values[..., -1:]
    weights = scores * kept
    if block.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(block.experts))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("chosen", [1, 2, 5])
def test_sorting_by_expert_equals_every_expert_on_every_token(make_moe: MakeDecoder, chosen: int, norm: bool) -> None:
    block = mixture(make_moe(num_experts_per_tok=chosen, norm_topk_prob=norm).double())
    x = torch.randn(3, 7, 32, dtype=torch.float64, requires_grad=True)
    out, _ = block(x)
    expected = dense(block, x)
    torch.testing.assert_close(out, expected, atol=FP64_ATOL, rtol=0)
    weight = torch.randn_like(out)
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *block.parameters()], allow_unused=True)
    got = torch.autograd.grad((out * weight).sum(), [x, *block.parameters()])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=FP64_ATOL, rtol=0)


def test_one_token_and_none(make_moe: MakeDecoder) -> None:
    block = mixture(make_moe().double())
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(block(x)[0], dense(block, x), atol=FP64_ATOL, rtol=0)
        assert block(x[:, :0])[0].shape == (1, 0, 32)
    out, routed = block.train()(x[:, :0])
    assert out.shape == (1, 0, 32)
    assert routed is not None
    assert (routed == 0).all()


def test_the_work_is_that_of_the_chosen_experts(make_moe: MakeDecoder) -> None:
    """Multiply-adds of router and k MLPs a token, whatever the number of experts."""
    for number in (5, 20):
        block = mixture(make_moe(num_experts=number))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            block(torch.randn(4, 25, 32))
        assert counter.get_total_flops() == 2 * 100 * (32 * number + 2 * 3 * 32 * 12)


def test_an_expert_without_tokens_has_a_gradient_of_zero(make_moe: MakeDecoder) -> None:
    block = mixture(make_moe())
    block(torch.randn(1, 1, 32))[0].sum().backward()
    zero = [bool((e.up_proj.weight.grad == 0).all()) for e in block.experts]
    assert sorted(zero) == [False, False, True, True, True]


@pytest.mark.parametrize("norm", [True, False])
def test_gradients_and_router_loss_equal_transformers(make_moe: MakeDecoder, tmp_path: Path, norm: bool) -> None:
    ours = make_moe(norm_topk_prob=norm, mlp_only_layers=[1], num_hidden_layers=3).train()
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    ids = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 17, dtype=torch.long)
    mask[0, 9:] = mask[2, 14:] = 0
    out = theirs(ids, attention_mask=mask, output_router_logits=True)
    logits = ours.logits(ours(ids, torch.arange(17)[None], CausalAttend(), mask.bool()))
    extra = ours.router_loss()
    assert extra is not None
    torch.testing.assert_close(extra, out.aux_loss, atol=FP32_ATOL, rtol=0)
    real = mask.bool()
    torch.testing.assert_close(logits[real], out.logits[real], atol=10 * FP32_ATOL, rtol=0)
    for own, loss in ((logits, extra), (out.logits, out.aux_loss)):
        (F.cross_entropy(own[:, :-1][real[:, 1:]], ids[:, 1:][real[:, 1:]]) + 3 * loss).backward()
    wanted = {}
    for name, weight in theirs.named_parameters():
        assert weight.grad is not None
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for i in range(5):
                wanted[f"{stem}.{i}.gate_proj.weight"] = weight.grad[i, :12]
                wanted[f"{stem}.{i}.up_proj.weight"] = weight.grad[i, 12:]
        elif name.endswith("experts.down_proj"):
            wanted |= {f"{name.removesuffix('.down_proj')}.{i}.down_proj.weight": weight.grad[i] for i in range(5)}
        else:
            wanted[name] = weight.grad
    assert wanted.keys() == dict(ours.named_parameters()).keys()
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name], atol=FP32_ATOL, rtol=1e-4, msg=name)


def test_balance_loss_by_hand() -> None:
    """Four tokens, two experts, one each: shares 3/4 and 1/4, mean probabilities 0.6 and 0.4."""
    scores = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5]])
    chosen = torch.tensor([[0], [0], [0], [1], [1]])
    routed = tally(scores, chosen, torch.tensor([[True, True, True, True, False]]))
    torch.testing.assert_close(routed, torch.tensor([[3.0, 1.0], [2.4, 1.6]]))
    assert balance_loss(routed, 1).item() == pytest.approx(2 * (0.75 * 0.6 + 0.25 * 0.4))
    assert balance_loss(torch.zeros(2, 2), 1).item() == 0  # nothing but padding


def test_even_routing_gives_k_the_least(make_moe: MakeDecoder) -> None:
    scores = torch.full((6, 3), 1 / 3)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0]]).repeat(2, 1)
    assert balance_loss(tally(scores, chosen, None), 2).item() == pytest.approx(2.0)


def test_passes_add_up_until_asked(make_moe: MakeDecoder) -> None:
    """Two passes count as one over all their tokens; asking starts anew; transformers' function says the same."""
    decoder = make_moe().train()
    ids = torch.randint(0, 61, (2, 12))
    positions = torch.arange(12)[None]
    logits: list[Tensor] = []
    for layer in decoder.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: logits.append(out))
    for part in (ids[:1], ids[1:, :7]):
        decoder(part, positions[:, : part.shape[1]], CausalAttend())
    expected = load_balancing_loss_func(tuple(logits), 5, 2)
    torch.testing.assert_close(decoder.router_loss(), expected, atol=FP32_ATOL, rtol=0)
    assert decoder.router_loss() is None


def test_only_training_counts(make_moe: MakeDecoder, make_decoder: MakeDecoder) -> None:
    decoder = make_moe()
    ids, positions = torch.arange(6)[None], torch.arange(6)[None]
    with torch.no_grad():
        decoder.train()(ids, positions, CausalAttend())
    with torch.inference_mode():
        decoder(ids, positions, CausalAttend())
    decoder.eval()(ids, positions, CausalAttend())
    assert decoder.router_loss() is None
    dense_one = make_decoder("qwen3").train()
    dense_one(ids, positions, CausalAttend())
    assert dense_one.router_loss() is None


def test_a_layer_recomputed_in_the_backward_pass_counts_once(make_moe: MakeDecoder) -> None:
    decoder = make_moe().train()
    ids, positions = torch.randint(0, 61, (2, 9)), torch.arange(9)[None]
    decoder(ids, positions, CausalAttend())
    plain = decoder.router_loss()
    assert plain is not None
    plain.backward()
    wanted = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    for layer in decoder.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    decoder(ids, positions, CausalAttend())
    again = decoder.router_loss()
    assert again is not None
    torch.testing.assert_close(again, plain, atol=0, rtol=0)
    again.backward()
    assert decoder.router_loss() is None  # the second computation left nothing behind
    for name, weight in decoder.named_parameters():
        if name in wanted:
            torch.testing.assert_close(weight.grad, wanted[name], atol=FP32_ATOL, rtol=0, msg=name)


def test_what_is_real_changes_the_loss_alone(make_moe: MakeDecoder) -> None:
    decoder = make_moe().train()
    ids, positions = torch.randint(0, 61, (2, 9)), torch.arange(9)[None]
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 4:] = False
    every = decoder(ids, positions, CausalAttend())
    all_loss = decoder.router_loss()
    some = decoder(ids, positions, CausalAttend(), real)
    assert torch.equal(every, some)
    assert decoder.router_loss() != all_loss


def test_fused_experts_are_split_by_name_and_others_left() -> None:
    fused = torch.arange(2 * 6 * 4).view(2, 6, 4)
    parts = split_experts("model.layers.3.mlp.experts.gate_up_proj", fused)
    stem = "model.layers.3.mlp.experts"
    assert set(parts) == {f"{stem}.{i}.{p}_proj.weight" for i in (0, 1) for p in ("gate", "up")}
    assert torch.equal(parts[f"{stem}.1.gate_proj.weight"], fused[1, :3])
    assert torch.equal(parts[f"{stem}.0.up_proj.weight"], fused[0, 3:])
    down = split_experts(f"{stem}.down_proj", fused)
    assert torch.equal(down[f"{stem}.1.down_proj.weight"], fused[1])
    for name, tensor in ((f"{stem}.down_proj", fused[0]), (f"{stem}.0.down_proj.weight", fused[0])):
        assert list(split_experts(name, tensor)) == [name]
