from __future__ import annotations

import json
import os
import re
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gymtune.agents import Renderer
from gymtune.agents.models import CausalAttend, Decoder, load_model
from gymtune.agents.models.gguf_file import import_gguf
from gymtune.agents.models.gguf_header import read_header
from gymtune.agents.models.importing import import_model
from gymtune.tools.errors import ConfigError, ModelError

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = {"vocab_size": 264, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
IDS = torch.arange(24)[None] * 11 % 264
NAMES = {  # of a layer's tensors, by llama.cpp and by Hugging Face
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
Change = Callable[[gguf.GGUFWriter, dict[str, Any]], None]


def paired(weight: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp wants those of llama's q and k: the two channels that rope turns together side by side."""
    rows = torch.arange(len(weight)).view(heads, 2, -1).transpose(1, 2).flatten()
    return weight[rows]


def tensors_of(model: Decoder, family: str) -> dict[str, Any]:
    """The model's weights under llama.cpp's names."""
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    found = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if "lm_head.weight" in state:
        found["output.weight"] = state["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        for theirs, ours in NAMES.items():
            for kind in ("weight", "bias"):
                tensor = state.get(f"model.layers.{layer}.{ours}.{kind}")
                if tensor is None:
                    continue
                if family == "llama" and theirs in {"attn_q", "attn_k"}:
                    tensor = paired(tensor, 4 if theirs == "attn_q" else 2)
                found[f"blk.{layer}.{theirs}.{kind}"] = tensor
        for part in ("gate", "up", "down") if model.config.num_experts else ():
            experts = [state[f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"] for e in range(3)]
            found[f"blk.{layer}.ffn_{part}_exps.weight"] = torch.stack(experts)
    return {name: tensor.contiguous().numpy() for name, tensor in found.items()}


@pytest.fixture
def write(make_decoder: Callable[..., Decoder], tmp_path: Path) -> Callable[..., tuple[Path, Decoder]]:
    def write(
        family: str = "llama", change: Change = lambda writer, tensors: None, quantise: bool = False, **config: Any
    ) -> tuple[Path, Decoder]:
        """A GGUF file of a small random model with a byte-level tokenizer, and the model."""
        model = make_decoder({"qwen3moe": "qwen3_moe"}.get(family, family), **SIZES | config)
        file = tmp_path / f"{family}.gguf"
        writer = gguf.GGUFWriter(file, family)
        writer.add_block_count(2)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(model.config.intermediate_size)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(model.config.rope_theta)
        writer.add_rope_dimension_count(8)
        writer.add_key_length(8)
        writer.add_value_length(8)
        if model.config.num_experts:
            writer.add_expert_count(3)
            writer.add_expert_used_count(2)
            writer.add_expert_feed_forward_length(model.config.moe_intermediate_size)
        tokens = [*gguf_bytes(), "<start>", "<end>", "ab", "abc", "Ġa", "12", "<pad>", "x"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        kinds = [
            gguf.TokenType.CONTROL if t in {"<start>", "<end>", "<pad>"} else gguf.TokenType.NORMAL for t in tokens
        ]
        writer.add_token_types(kinds)
        writer.add_token_merges(["a b", "ab c", "Ġ a", "1 2"])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        writer.add_pad_token_id(262)
        writer.add_chat_template(TEMPLATE)
        tensors = tensors_of(model, family)
        change(writer, tensors)
        for name, tensor in tensors.items():
            if quantise and tensor.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                packed = gguf.quants.quantize(tensor, kind)
                tensors[name] = gguf.quants.dequantize(packed, kind)
                writer.add_tensor(name, packed, raw_dtype=kind)
            else:
                writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file, model

    return write


def gguf_bytes() -> list[str]:
    """GPT-2's printable character for each byte, in order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def our_logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.logits(model(IDS, torch.arange(IDS.shape[1])[None], CausalAttend()))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_theta": 50000.0}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}),
    ],
)
def test_the_same_weights_the_same_logits(
    write: Callable[..., tuple[Path, Decoder]], tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    file, model = write(family, **config)
    out = import_gguf(file, tmp_path / "out")
    ours = load_model(out)
    saved = json.loads((out / "config.json").read_text())
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == model.config.rope_theta  # both spellings
    assert ours.config.tie_word_embeddings == config.get("tie_word_embeddings", False)
    state = model.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())
    torch.testing.assert_close(our_logits(ours), our_logits(model), atol=1e-4, rtol=1e-4)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, our_logits(model), atol=1e-4, rtol=1e-4)


def test_greedy_tokens_are_those_of_transformers(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    out = import_gguf(write()[0], tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(out)
    expected = theirs.generate(IDS, max_new_tokens=20, do_sample=False, eos_token_id=[])
    model, ids = load_model(out), IDS
    for _ in range(20):
        with torch.no_grad():
            hidden = model(ids, torch.arange(ids.shape[1])[None], CausalAttend())
        ids = torch.cat([ids, model.logits(hidden[:, -1:]).argmax(-1)], dim=1)
    assert torch.equal(ids, expected)


def test_tokenizer_and_chat_template_come_along(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    out = import_gguf(write()[0], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.tokenize("abc a12") == ["abc", "Ġa", "12"]
    assert tokenizer.decode(tokenizer("Grüße, <end>")["input_ids"]) == "Grüße, <end>"
    assert load_model(out).config.eos_token_ids == (257,)
    renderer = Renderer.from_folder(out)
    assert renderer.chat_template == TEMPLATE
    assert set(renderer.stop_ids) == {257}
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert str(tmp_path) not in (out / "config.json").read_text() + (out / "tokenizer_config.json").read_text()


def test_quantised_weights_are_unpacked(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    file, model = write("qwen3", lambda _, tensors: kept.update({"t": tensors}), quantise=True, intermediate_size=64)
    ours = load_model(import_gguf(file, tmp_path / "out")).state_dict()
    up = "model.layers.1.mlp.up_proj.weight"
    assert np.array_equal(ours[up].numpy(), kept["t"]["blk.1.ffn_up.weight"])
    assert not torch.equal(ours[up], model.state_dict()[up])


def test_dtypes(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    file, model = write()
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        out = import_gguf(file, tmp_path / name, name)
        assert json.loads((out / "config.json").read_text())["dtype"] == name
        weights = load_file(out / "model.safetensors")
        assert torch.equal(weights["model.norm.weight"], model.model.norm.weight.to(dtype))
    with pytest.raises(ConfigError, match=r"unknown dtype 'float17'\. Did you mean 'float1"):
        import_gguf(file, tmp_path / "x", "float17")


def llama3_factors(config: dict[str, Any], factor: float) -> Any:
    """What llama.cpp's converter stores, from transformers' own angles."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config, rope_parameters=scaling), "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, config["head_dim"], 2) / config["head_dim"])
    return (plain / scaled).float().numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_s_rope_is_recognised(
    write: Callable[..., tuple[Path, Decoder]], tmp_path: Path, factor: float
) -> None:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    factors = llama3_factors(SIZES, factor)
    assert len(set(factors.tolist())) > 1
    file, model = write(
        change=lambda _, tensors: tensors.update({"rope_freqs.weight": factors}),
        rope_theta=500000.0,
        rope_scaling=rope,
        max_position_embeddings=131072,
    )
    out = import_gguf(file, tmp_path / "out")
    assert load_model(out).config.rope_scaling == model.config.rope_scaling
    saved = json.loads((out / "config.json").read_text())
    assert saved["rope_scaling"] == rope
    assert saved["rope_parameters"] == rope | {"rope_theta": 500000.0}
    assert not torch.equal(
        our_logits(model), our_logits(load_model(import_gguf(write(rope_theta=5e5)[0], tmp_path / "no")))
    )
    torch.testing.assert_close(our_logits(load_model(out)), our_logits(model), atol=1e-4, rtol=1e-4)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, our_logits(model), atol=1e-4, rtol=1e-4)


def scaled(kind: gguf.RopeScalingType) -> Change:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)

    return change


def numbers(**tensors: Any) -> Change:
    return lambda _, all_: all_.update({name: np.array(t, dtype=np.float32) for name, t in tensors.items()})


def shortened(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    writer.add_vocab_size(263)
    tensors |= {name: tensors[name][:263] for name in ("token_embd.weight", "output.weight")}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (scaled(gguf.RopeScalingType.YARN), "llama.rope.scaling.type='yarn', llama.rope.scaling.factor=4.0"),
        (scaled(gguf.RopeScalingType.LINEAR), "scaled rotary embeddings are not read"),
        (numbers(**{"rope_factors_long.weight": [1, 2, 3, 4]}), "rope_factors_long.weight='a tensor'"),
        (numbers(**{"rope_freqs.weight": [1, 2, 3, 4]}), "rope_freqs.weight is not Llama 3's scaling"),
        (numbers(**{"rope_freqs.weight": [1, 1]}), "rope_freqs.weight is not Llama 3's scaling"),
        (numbers(**{"rope_freqs.weight": [float("nan")] * 4}), "rope_freqs.weight is not Llama 3's scaling"),
        (numbers(**{"blk.0.attn_q.bias": [1] * 32}), "would be lost or made up"),
        (numbers(**{"extra.weight": [[1, 2]]}), "would be lost or made up"),
        (lambda _, t: t.pop("blk.1.ffn_up.weight"), "would be lost or made up"),
        (lambda _, t: t.update({"zz.weight": t.pop("blk.1.ffn_up.weight")}), "lacks weights of .*1.mlp.up"),
        (shortened, "264 tokens, but an embedding of 263"),
        (lambda w, _: w.add_vocab_size(100), "cannot read this GGUF file: Padding_idx"),
    ],
)
def test_what_would_not_come_out_equal_is_refused(
    write: Callable[..., tuple[Path, Decoder]], tmp_path: Path, change: Change, complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        import_gguf(write(change=change)[0], tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["llama.gguf"]


def test_an_unknown_architecture_is_named(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    file, _ = write()
    file.write_bytes(file.read_bytes().replace(b"llama", b"lloma"))
    with pytest.raises(ModelError, match=r"llama\.gguf: transformers cannot read .*lloma is not supported"):
        import_gguf(file, tmp_path / "out")


def test_files_that_are_none_or_broken(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    whole = write()[0].read_bytes()
    bad = tmp_path / "bad.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    name = struct.pack("<Q", 3) + b"a.b"
    layers = b"llama.block_count\4\0\0\0"
    cases = {
        b"": "not a GGUF file",
        b"version https://git-lfs.github.com/spec/v1\n": "not a GGUF file: it begins with b'vers'",
        b"GGUF" + struct.pack("<I", 99) + whole[8:]: "version 99",
        b"GGUF" + struct.pack(">I", 3) + whole[8:]: "version 50331648",
        whole[:300]: "breaks off",
        start + struct.pack("<Q", 2**63): "breaks off",
        start + name + struct.pack("<IIQ", 9, 0, 2**60) + b"x" * 64: "breaks off",  # an array of 2**60 bytes
        start + name + struct.pack("<IIQ", 9, 8, 2**60) + b"\0" * 64: "breaks off",  # ... of strings
        start + name + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 64: "type 9, which does not exist",  # ... of arrays
        start + name + struct.pack("<I", 77): "type 77",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (name + struct.pack("<IB", 0, 1)) * 2: "names 'a.b' twice",
        start + name + struct.pack("<IB", 0, 1): "does not name its general.architecture",
        whole.replace(layers + b"\2\0\0\0", layers + b"\xff\xff\xff\x7f"): "2147483647 layers",
    }
    for content, complaint in cases.items():
        bad.write_bytes(content)
        with pytest.raises(ModelError, match=f"bad.gguf: .*{re.escape(complaint)}"):
            import_gguf(bad, tmp_path / "out")
    with pytest.raises(ModelError, match="cannot read: No such file"):
        import_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")


def test_a_file_cut_in_its_tensors(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    file = write()[0]
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="transformers cannot read this GGUF file"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_header_is_what_was_written(write: Callable[..., tuple[Path, Decoder]]) -> None:
    file, model = write()
    header = read_header(file)
    theirs = gguf.GGUFReader(file)
    assert header.architecture == "llama"
    assert {t.name: (tuple(t.shape.tolist()), t.data_offset) for t in theirs.tensors} == {
        name: (tensor.shape, tensor.start) for name, tensor in header.tensors.items()
    }
    plain = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert header.fields == {k: len(v) if isinstance(v, list) else v for k, v in plain.items()}
    assert header.floats("output_norm.weight") == tuple(model.model.norm.weight.tolist())


def test_nothing_is_written_over(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ModelError, match="not an empty folder"):
        import_gguf(write()[0], tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_full_disk_leaves_nothing(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    file = write()[0]
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ModelError, match=r"out: cannot write: .*Make room"):
            import_gguf(file, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'gymtune\[gguf\]'"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")


def test_import_model_chooses_by_suffix(write: Callable[..., tuple[Path, Decoder]], tmp_path: Path) -> None:
    file, model = write("qwen3")
    assert torch.equal(load_model(import_model(file, tmp_path / "a")).head_weight, model.head_weight)
    with pytest.raises(ConfigError, match="brings its own tokenizer"):
        import_model(file, tmp_path / "b", tmp_path)
    with pytest.raises(ModelError, match="cannot read"):
        import_model(tmp_path / "full_sft_768.pth", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"cannot import '\.safetensors': wanted a \.gguf file, or MiniMind's \.pth"):
        import_model(tmp_path / "model.safetensors", tmp_path / "b")
    with pytest.raises(ConfigError, match="a folder, which needs no import"):
        import_model(tmp_path, tmp_path / "b")


REAL = os.environ.get("GYMTUNE_TEST_SMOLLM2_GGUF")


@pytest.mark.skipif(not REAL, reason="GYMTUNE_TEST_SMOLLM2_GGUF names no SmolLM2-135M-Instruct GGUF")
@pytest.mark.filterwarnings("ignore")
def test_smollm2_answers(tmp_path: Path) -> None:
    out = import_gguf(Path(str(REAL)), tmp_path / "out")
    renderer = Renderer.from_folder(out)
    ids = torch.tensor([renderer.prompt([{"role": "user", "content": "What is the capital of France?"}])])
    theirs = AutoModelForCausalLM.from_pretrained(out)
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert "The capital of France is Paris." in renderer.tokenizer.decode(expected)
    model, found = load_model(out), ids
    for _ in expected:
        with torch.no_grad():
            hidden = model(found, torch.arange(found.shape[1])[None], CausalAttend())
        found = torch.cat([found, model.logits(hidden[:, -1:]).argmax(-1)], dim=1)
    assert found[0, ids.shape[1] :].tolist() == expected
