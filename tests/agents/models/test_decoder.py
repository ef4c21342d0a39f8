from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gymtune.agents.models import CausalAttend, Decoder, ModelConfig, PrefixAttend, RecordAttend
from gymtune.agents.models.decoder import RMSNorm, rope_table

MakeDecoder = Callable[..., Decoder]
WholeLogits = Callable[[Decoder, Tensor], Tensor]

FP32_ATOL = 1e-5
FP64_ATOL = 1e-10


def in_transformers(decoder: Decoder) -> torch.nn.Module:
    data = decoder.config.to_dict()
    makers = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = makers[decoder.config.model_type]
    other = model_class(config_class(**data))
    state = dict(decoder.state_dict())
    state.setdefault("lm_head.weight", decoder.head_weight)
    other.load_state_dict(state, strict=True)  # every name is theirs, none is missing
    return cast("torch.nn.Module", other.eval())


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (4, 4)])
def test_logits_and_gradients_equal_transformers(
    make_decoder: MakeDecoder, model_type: str, tied: bool, heads: int, kv_heads: int
) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "rope_theta": 5000.0}
    ours = make_decoder(model_type, tie_word_embeddings=tied, **shape)
    theirs = in_transformers(ours)
    ids = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(1))
    logits = ours.logits(ours(ids, torch.arange(17)[None], CausalAttend()))
    expected = theirs(ids).logits
    torch.testing.assert_close(logits, expected, atol=FP32_ATOL, rtol=0)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=FP32_ATOL, rtol=0, msg=name)


def test_positions_are_each_rows_own(make_decoder: MakeDecoder) -> None:
    """Rope sees differences of positions only: a row moved by 20 places gives the same, whatever its neighbours do."""
    decoder = make_decoder().double()
    ids = torch.arange(10).repeat(2, 1)
    positions = torch.stack((torch.arange(10), torch.arange(10) + 20))
    hidden = decoder(ids, positions, CausalAttend())
    # FP32: the table of angles bounds how equal the two are
    torch.testing.assert_close(hidden[0], hidden[1], atol=FP32_ATOL, rtol=0)


def test_a_gap_in_one_rows_positions_is_seen_by_that_row_alone(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder().double()
    ids = torch.arange(10).repeat(2, 1)
    plain, gap = torch.arange(10), torch.arange(10) + 7 * (torch.arange(10) >= 5)
    both = decoder(ids, torch.stack((plain, gap)), CausalAttend())
    for row, positions in enumerate((plain, gap)):
        alone = decoder(ids[:1], positions[None], CausalAttend())[0]
        torch.testing.assert_close(both[row], alone, atol=FP64_ATOL, rtol=0)
    assert torch.equal(both[0, :5], both[1, :5])
    assert (both[0, 5:] - both[1, 5:]).abs().max() > 0.01


def test_padding_on_the_right_changes_nothing(make_decoder: MakeDecoder, whole_logits: WholeLogits) -> None:
    decoder = make_decoder().double()
    ids = torch.randint(0, 61, (2, 12))
    padded = torch.cat((ids, torch.full((2, 9), 5)), 1)
    torch.testing.assert_close(
        whole_logits(decoder, padded)[:, :12], whole_logits(decoder, ids), atol=FP64_ATOL, rtol=0
    )


def test_rope_table_by_hand() -> None:
    """dim 4, theta 100: channel pairs (0, 2) and (1, 3) turn by p and p / 10."""
    table = rope_table(3, 4, 100.0)
    p = torch.tensor(2.0)
    cos, sin = [p.cos(), (p / 10).cos()], [p.sin(), (p / 10).sin()]
    expected = torch.stack([*cos, *cos, -sin[0], -sin[1], *sin])
    torch.testing.assert_close(table[2], expected, atol=1e-6, rtol=0)
    assert table.dtype == torch.float32


def test_the_rope_table_grows_and_keeps_its_start(make_decoder: MakeDecoder, whole_logits: WholeLogits) -> None:
    ids = torch.randint(0, 61, (1, 40))
    grown, long = make_decoder(max_position_embeddings=16), make_decoder(max_position_embeddings=64)
    before = whole_logits(grown, ids[:, :10])
    torch.testing.assert_close(whole_logits(grown, ids), whole_logits(long, ids), atol=0, rtol=0)
    torch.testing.assert_close(whole_logits(grown, ids[:, :10]), before, atol=0, rtol=0)


def test_a_table_made_in_inference_mode_serves_training_and_every_dtype(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    ids, positions = torch.arange(8)[None], torch.arange(8)[None]
    with torch.inference_mode():
        decoder(ids, positions, CausalAttend())
    decoder(ids, positions, CausalAttend()).sum().backward()
    again = decoder.bfloat16().float()  # rounds the weights, must not round the table
    assert torch.equal(again._rope_table(positions), rope_table(64, 8, 10_000.0))


def prefix_and_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 61, (1, 7), generator=generator), torch.randint(0, 61, (5, 11), generator=generator)


def loss_of(decoder: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(decoder.logits(hidden).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_shared_prefix_gives_the_loss_and_gradients_of_whole_rows(
    make_decoder: MakeDecoder, model_type: str, kv_heads: int
) -> None:
    prefix, rows = prefix_and_rows()
    past, new = prefix.shape[1], rows.shape[1]
    targets = rows.roll(-1, 1)
    decoder = make_decoder(model_type, num_key_value_heads=kv_heads).double()

    whole = torch.cat((prefix.expand(5, -1), rows), 1)
    hidden = decoder(whole, torch.arange(past + new)[None], CausalAttend())
    # the prefix's last state predicts each row's first token: the seam is in the loss
    expected = loss_of(decoder, hidden[:, past - 1 :], torch.cat((rows[:, :1], targets), 1))
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}

    decoder.zero_grad()
    record = RecordAttend()
    first = decoder(prefix, torch.arange(past)[None], record)[:, -1:]
    rest = decoder(rows, past + torch.arange(new)[None], PrefixAttend(record))
    joined = torch.cat((first.expand(5, -1, -1), rest), 1)
    loss = loss_of(decoder, joined, torch.cat((rows[:, :1], targets), 1))
    loss.backward()

    torch.testing.assert_close(loss, expected, atol=FP64_ATOL, rtol=0)
    assert len(wanted) == len(list(decoder.parameters()))
    for name, weight in decoder.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name], atol=FP64_ATOL, rtol=0, msg=name)


def test_a_record_holds_the_latest_pass_and_one_prefix_serves_rows_of_any_length(make_decoder: MakeDecoder) -> None:
    prefix, rows = prefix_and_rows()
    decoder = make_decoder().double()
    record = RecordAttend()
    decoder(rows[:1], torch.arange(11)[None], record)
    decoder(prefix, torch.arange(7)[None], record)
    assert [k.shape for k, _ in record.keys_values] == [(1, 2, 7, 8)] * 2
    attend = PrefixAttend(record)
    for new in (11, 1, 4):
        got = decoder(rows[:, :new], 7 + torch.arange(new)[None], attend)
        whole = torch.cat((prefix.expand(5, -1), rows[:, :new]), 1)
        expected = decoder(whole, torch.arange(7 + new)[None], CausalAttend())[:, 7:]
        torch.testing.assert_close(got, expected, atol=FP64_ATOL, rtol=0)


def test_norms_are_computed_in_fp32_for_bf16() -> None:
    """Against float64 the error is bf16's last rounding, half of 2^-7 of the value; bf16 squares would double it."""
    norm = RMSNorm(512, 1e-6).bfloat16()
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert ((norm(x).double() - exact).abs() <= exact.abs() * 2**-8 * 1.01).all()


def test_bf16_weights_give_fp32_logits_near_those_of_fp32(make_decoder: MakeDecoder, whole_logits: WholeLogits) -> None:
    decoder = make_decoder()
    ids = torch.randint(0, 61, (2, 9))
    exact = whole_logits(decoder, ids)
    rounded = whole_logits(decoder.bfloat16(), ids)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.1 * exact.std() + 0.1


def test_parameter_names_of_a_layer_are_those_of_hugging_face_files() -> None:
    shape: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = ModelConfig.from_dict({"model_type": "qwen3", **shape, **heads})
    layer = "self_attn.{q,k,v,o}_proj self_attn.{q,k}_norm mlp.{gate,up,down}_proj"
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for group in layer.split():
        before, inside, after = group.replace("{", "|").replace("}", "|").split("|")
        expected |= {f"model.layers.0.{before}{x}{after}.weight" for x in inside.split(",")}
    expected |= {f"model.layers.0.{x}_layernorm.weight" for x in ("input", "post_attention")}
    assert set(Decoder(config).state_dict()) == expected
