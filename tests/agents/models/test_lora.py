from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gymtune.agents.backend import GenerateRequest
from gymtune.agents.models import CausalAttend, Decoder, load_model, save_model
from gymtune.agents.models.lora import (
    adapter_off,
    apply_lora,
    has_adapter,
    load_adapter,
    merged_state,
    save_adapter,
    trainable_parameters,
)
from gymtune.agents.torch_engine import TorchEngine
from gymtune.agents.trajectory import Sampling
from gymtune.tools.errors import ConfigError, ModelError

# peft reads an attribute of transformers' models that transformers calls old
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # of fused experts
]

MakeDecoder = Callable[..., Decoder]
WholeLogits = Callable[[Decoder, Tensor], Tensor]

FP32_ATOL = 1e-5
IDS = torch.arange(20)[None] * 3
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"tie_word_embeddings": False} | EXPERTS,
}
MATRICES = {"llama": 2 * 7, "qwen2": 2 * 7, "qwen3": 2 * 7, "qwen3_moe": 2 * (4 + 1 + 3 * 3)}


def adapted(decoder: Decoder, **options: Any) -> Decoder:
    """Give a decoder an adapter whose B is far from 0, so that it changes every logit."""
    apply_lora(decoder, **({"r": 3, "alpha": 6, "seed": 1} | options))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return decoder


def bits(model: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


# -- putting it on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODELS)
def test_a_fresh_adapter_changes_no_bit_and_is_all_that_can_be_trained(
    make_decoder: MakeDecoder, whole_logits: WholeLogits, model_type: str
) -> None:
    model = make_decoder(model_type, **MODELS[model_type])
    before = whole_logits(model, IDS)
    apply_lora(model, r=3, alpha=6, seed=0)
    assert torch.equal(whole_logits(model, IDS), before)
    names = {name: tuple(p.shape) for name, p in trainable_parameters(model).items()}
    assert len(names) == 2 * MATRICES[model_type]  # A and B
    assert names["model.layers.0.self_attn.k_proj.lora_A.default.weight"] == (3, 32)
    assert names["model.layers.0.self_attn.k_proj.lora_B.default.weight"] == (16, 3)
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_adapter_gets_a_gradient_and_nothing_else_does(make_decoder: MakeDecoder, model_type: str) -> None:
    model = adapted(make_decoder(model_type, **MODELS[model_type]))
    model.logits(model(IDS, torch.arange(20)[None], CausalAttend())).logsumexp(-1).sum().backward()
    got = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert got == trainable_parameters(model).keys()


def test_the_seed_decides_and_the_global_generator_is_left_alone(make_decoder: MakeDecoder) -> None:
    models = [make_decoder() for _ in range(3)]
    state = torch.random.get_rng_state()
    for model, seed in zip(models, (5, 5, 6), strict=True):
        apply_lora(model, r=2, alpha=4, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second, third = map(bits, models)
    assert same(first, second)
    assert not same(first, third)


def test_target_modules_are_ends_of_names(make_decoder: MakeDecoder) -> None:
    model = make_decoder()
    apply_lora(model, r=2, alpha=4, target_modules=("q_proj", "layers.1.mlp.up_proj"), seed=0)
    wanted = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    assert {name.partition(".lora_")[0] for name in trainable_parameters(model)} == wanted


def test_dropout_acts_in_training_mode_only(make_decoder: MakeDecoder, whole_logits: WholeLogits) -> None:
    model, plain = adapted(make_decoder(), dropout=0.5), adapted(make_decoder())
    assert torch.equal(whole_logits(model.eval(), IDS), whole_logits(plain, IDS))
    assert not torch.equal(whole_logits(model.train(), IDS), whole_logits(plain, IDS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r is 0, wanted at least 1"),
        ({"alpha": 0}, "alpha is 0, wanted more than 0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"dropout": 1.0}, "dropout is 1.0, wanted from 0 to below 1"),
        ({"target_modules": ("q_proj", "v_porj")}, "named 'v_porj'. Did you mean 'v_proj'"),
        ({"target_modules": "q_prj"}, "named 'q_prj'. Did you mean 'q_proj'"),
        ({"target_modules": ()}, "came no target module. Known: down_proj, gate_proj"),
        ({"target_modules": ("lm_head",)}, "no matrix of the layers is named 'lm_head'"),
        ({"target_modules": ("embed_tokens",)}, "no matrix of the layers is named 'embed_tokens'"),
        ({"target_modules": ("proj",)}, "no matrix of the layers is named 'proj'"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_stays(
    make_decoder: MakeDecoder, options: dict[str, Any], message: str
) -> None:
    model = make_decoder(tie_word_embeddings=False)
    before = bits(model)
    with pytest.raises(ConfigError, match=message):
        apply_lora(model, **({"r": 2, "alpha": 4, "seed": 0} | options))
    assert same(bits(model), before)
    assert all(p.requires_grad for p in model.parameters())


def test_a_second_adapter_and_a_model_of_others_are_refused(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    model = adapted(make_decoder())
    save_adapter(model, tmp_path, "base")
    before = bits(model)
    for put_on in (lambda other: apply_lora(other, r=2, alpha=4, seed=0), lambda other: load_adapter(other, tmp_path)):
        with pytest.raises(ConfigError, match="has adapters already"):
            put_on(model)
        with pytest.raises(ConfigError, match="our own decoder runs, this is a Linear"):
            put_on(torch.nn.Linear(2, 2))
    assert same(bits(model), before)


def test_without_peft_the_extra_is_named(make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'gymtune\[lora\]'"):
        apply_lora(make_decoder(), r=2, alpha=4, seed=0)
    assert not has_adapter(make_decoder())  # asking needs no peft


# -- PEFT's format -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODELS)
def test_peft_opens_what_we_save(
    make_decoder: MakeDecoder, whole_logits: WholeLogits, tmp_path: Path, model_type: str
) -> None:
    model = make_decoder(model_type, **MODELS[model_type])
    save_model(model, tmp_path / "base")
    plain = whole_logits(model, IDS)
    logits = whole_logits(adapted(model), IDS)
    save_adapter(model, tmp_path / "adapter", tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    with torch.no_grad():
        found = theirs(IDS).logits
    torch.testing.assert_close(found, logits, atol=FP32_ATOL, rtol=0)
    assert (logits - plain).abs().max() > 0.1  # the adapter is in what was compared


def test_the_files_are_those_that_peft_writes(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    model = make_decoder()
    save_model(model, tmp_path / "base")
    save_adapter(adapted(model, target_modules=("q_proj", "down_proj")), tmp_path / "ours", tmp_path / "base")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    theirs.save_pretrained(tmp_path / "theirs")
    records, shapes = [], []
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        record = json.loads((folder / "adapter_config.json").read_text())
        if folder.name == "ours":  # the same bytes from every process, which a set would not give
            assert record["target_modules"] == sorted(record["target_modules"])
        records.append(record | {"target_modules": sorted(record["target_modules"])})
        weights = load_file(folder / "adapter_model.safetensors")
        shapes.append({name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()})
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert records[0] == records[1]
    assert shapes[0] == shapes[1]
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in shapes[0]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.down_proj"]])
def test_we_open_what_peft_saves(
    make_decoder: MakeDecoder, whole_logits: WholeLogits, tmp_path: Path, targets: Any
) -> None:
    save_model(make_decoder(tie_word_embeddings=False), tmp_path / "base")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )  # B is random too
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_model(tmp_path / "base")
    plain = whole_logits(ours, IDS)
    load_adapter(ours, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(whole_logits(ours, IDS), theirs(IDS).logits, atol=FP32_ATOL, rtol=0)
    assert (whole_logits(ours, IDS) - plain).abs().max() > 0.1


def test_saved_and_loaded_is_the_same_to_the_bit(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    model = adapted(make_decoder(), dropout=0.25)
    save_adapter(model, tmp_path / "one", "base")
    back = make_decoder()
    load_adapter(back, tmp_path / "one")
    assert same(bits(back), bits(model))
    assert trainable_parameters(back).keys() == trainable_parameters(model).keys()
    save_adapter(back, tmp_path / "two", "base")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def config_with(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def torn(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def renamed(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    save_file({name.replace("model.layers", "layers"): weights.pop(name)} | weights, file)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("adapter_config.json"), "adapter_config.json missing"),
        (without("adapter_model.safetensors"), "adapter_model.safetensors missing"),
        (torn, "not a whole safetensors file"),
        (renamed, "wanted nothing found"),
        (config_with(peft_type="IA3"), "peft_type is 'IA3'"),
        (config_with(use_dora=True), "use_dora is True: only plain LoRA"),
        (config_with(rank_pattern={"q_proj": 7}), "rank_pattern is"),
        (config_with(modules_to_save=["lm_head"]), "modules_to_save is"),
        (config_with(bias="all"), "bias is 'all'"),
        (config_with(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
        (config_with(from_the_future=3), "from_the_future is 3"),
        (config_with(r=10**9), r"lora_A.weight wanted \(1000000000, 32\) found \(3, 32\)"),
        (config_with(r="8"), "r is '8'"),
        (config_with(lora_alpha=None), "lora_alpha is None"),
        (config_with(target_modules=[["q_proj"]]), "target_modules is"),
        (config_with(target_modules=["w1"]), "belongs to another model: LoRA: no matrix of the layers is named 'w1'"),
        (config_with(target_modules=["q_proj"]), "wanted nothing found .*; and 14 more"),
    ],
)
def test_a_folder_that_is_no_adapter_of_this_model_leaves_it_as_it_was(
    make_decoder: MakeDecoder, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    save_adapter(adapted(make_decoder()), tmp_path, "base")
    spoil(tmp_path)
    model = make_decoder()
    before = bits(model)
    with pytest.raises(ModelError, match=message):
        load_adapter(model, tmp_path)
    assert same(bits(model), before)
    assert all(p.requires_grad for p in model.parameters())


def test_an_adapter_of_a_wider_model_is_refused(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_adapter(adapted(make_decoder(hidden_size=48)), tmp_path, "base")
    with pytest.raises(ModelError, match=r"q_proj.lora_A.weight wanted \(3, 32\) found \(3, 48\)"):
        load_adapter(make_decoder(), tmp_path)


# -- merging and switching off -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODELS)
def test_merged_weights_fit_the_base_and_compute_the_same(
    make_decoder: MakeDecoder, whole_logits: WholeLogits, model_type: str
) -> None:
    base = make_decoder(model_type, **MODELS[model_type])
    assert same(merged_state(base), bits(base))  # without an adapter: the weights themselves
    model = adapted(make_decoder(model_type, **MODELS[model_type]))
    before, logits = bits(model), whole_logits(model, IDS)
    merged = merged_state(model)
    assert same(bits(model), before)
    assert list(merged) == list(base.state_dict())
    changed = {name for name in merged if not torch.equal(merged[name], base.state_dict()[name])}
    assert len(changed) == MATRICES[model_type]
    assert changed == {f"{name.partition('.lora_')[0]}.weight" for name in trainable_parameters(model)}
    base.load_state_dict(merged)
    torch.testing.assert_close(whole_logits(base, IDS), logits, atol=FP32_ATOL, rtol=0)


def test_peft_merges_to_the_same_weights(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    model = make_decoder()
    save_model(model, tmp_path / "base")
    save_adapter(adapted(model), tmp_path / "adapter", tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    ).merge_and_unload()
    found = theirs.state_dict()
    for name, tensor in merged_state(model).items():
        torch.testing.assert_close(tensor, found[name], atol=1e-6, rtol=0)


def test_half_precision_models_have_float32_adapters_and_round_once_when_merged(make_decoder: MakeDecoder) -> None:
    model = adapted(make_decoder().bfloat16())
    assert {p.dtype for p in trainable_parameters(model).values()} == {torch.float32}
    assert model(IDS, torch.arange(20)[None], CausalAttend()).dtype == torch.bfloat16
    name = "model.layers.0.self_attn.q_proj"
    state = model.state_dict()
    a, b = (state[f"{name}.lora_{part}.default.weight"] for part in "AB")
    by_hand = (state[f"{name}.base_layer.weight"].float() + 2.0 * b @ a).bfloat16()  # alpha / r = 6 / 3
    assert torch.equal(merged_state(model)[f"{name}.weight"], by_hand)


def test_off_is_the_base_to_the_bit_and_on_again_after_an_error(
    make_decoder: MakeDecoder, whole_logits: WholeLogits
) -> None:
    base, model = whole_logits(make_decoder(), IDS), adapted(make_decoder())
    on, trained = whole_logits(model, IDS), trainable_parameters(model).keys()
    with adapter_off(model):
        assert torch.equal(whole_logits(model, IDS), base)
        with adapter_off(model):
            assert torch.equal(whole_logits(model, IDS), base)
        assert torch.equal(whole_logits(model, IDS), base)
    assert torch.equal(whole_logits(model, IDS), on)
    with pytest.raises(ValueError, match="in between"), adapter_off(model):
        raise ValueError("in between")
    assert torch.equal(whole_logits(model, IDS), on)
    assert trainable_parameters(model).keys() == trained


def test_off_between_forward_and_backward_leaves_the_gradient(make_decoder: MakeDecoder) -> None:
    gradients = []
    for switch in (False, True):
        model = adapted(make_decoder())
        loss = model.logits(model(IDS, torch.arange(20)[None], CausalAttend())).logsumexp(-1).sum()
        if switch:
            with adapter_off(model), torch.no_grad():
                model(IDS, torch.arange(20)[None], CausalAttend())
        loss.backward()
        gradients.append({name: p.grad for name, p in trainable_parameters(model).items()})
    assert same(*gradients)


def test_off_leaves_frozen_adapters_frozen(make_decoder: MakeDecoder) -> None:
    model = adapted(make_decoder()).requires_grad_(False)
    with adapter_off(model):
        pass
    assert not trainable_parameters(model)


def test_without_an_adapter_there_is_nothing_to_switch_or_to_save(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no adapter to switch off"), adapter_off(make_decoder()):
        pass
    with pytest.raises(ModelError, match="no adapter to save"):
        save_adapter(make_decoder(), tmp_path, "base")


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_an_engine_that_shares_the_model_samples_with_its_adapter(make_decoder: MakeDecoder) -> None:
    def greedy(model: Decoder) -> list[int]:
        sampling = Sampling(temperature=0.0, max_new_tokens=20)
        request = GenerateRequest([5, 9, 2, 40], sampling, stop_ids=(), seed=0, session="s")
        return asyncio.run(TorchEngine(model).generate(request)).ids

    base, model = make_decoder(), adapted(make_decoder())
    merged = make_decoder()
    merged.load_state_dict(merged_state(model))
    assert greedy(model) == greedy(merged)
    assert greedy(model) != greedy(base)
