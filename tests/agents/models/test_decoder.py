from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gymtune.agents.models import CausalAttend, Decoder, ModelConfig
from gymtune.agents.models.decoder import RMSNorm

MakeDecoder = Callable[..., Decoder]
WholeLogits = Callable[[Decoder, Tensor], Tensor]

FP32_ATOL = 1e-5
FP64_ATOL = 1e-10


#: of each dense family; the one with experts is in test_moe
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
]


def in_transformers(decoder: Decoder) -> torch.nn.Module:
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**decoder.config.to_dict()))
    state = dict(decoder.state_dict())
    state.setdefault("lm_head.weight", decoder.head_weight)
    other.load_state_dict(state, strict=True)  # every name is theirs, none is missing
    return cast("torch.nn.Module", other.eval())


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (4, 4)])
def test_logits_and_gradients_equal_transformers(
    make_decoder: MakeDecoder, model_type: str, changes: dict[str, Any], tied: bool, heads: int, kv_heads: int
) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "rope_theta": 5000.0, **changes}
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


def prefix_and_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 61, (1, 7), generator=generator), torch.randint(0, 61, (5, 11), generator=generator)


def loss_of(decoder: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(decoder.logits(hidden).flatten(0, 1), targets.flatten())


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


def test_biases_stand_where_the_family_has_them() -> None:
    expected = {
        "llama": "",
        "mistral": "",
        "qwen2": "qkv",
        "qwen3": "",
        "llama attention_bias": "qkvo",
        "qwen3 attention_bias": "qkvo",
        "qwen3_moe attention_bias": "qkvo",
        "mistral attention_bias": "",  # a key that the family does not read, in transformers as here
        "qwen2 attention_bias": "qkv",
        "llama mlp_bias": "gate up down",
        "qwen3 mlp_bias": "",
    }
    shape: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8, "vocab_size": 8}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": None, "num_experts": 8}
    for case, names in expected.items():
        model_type, *keys = case.split()
        config = ModelConfig.from_dict({"model_type": model_type, **shape, **dict.fromkeys(keys, True)})
        found = [name.split(".")[-2] for name in Decoder(config).state_dict() if name.endswith(".bias")]
        assert found == [f"{name}_proj" for name in (names.split() if " " in names else names)], case


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
