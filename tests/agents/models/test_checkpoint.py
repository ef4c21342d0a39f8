from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gymtune.agents.models import Decoder, ModelConfig, load_model, save_model
from gymtune.agents.models.config import ARCHITECTURES
from gymtune.tools.errors import ModelError

MakeDecoder = Callable[..., Decoder]
WholeLogits = Callable[[Decoder, Tensor], Tensor]

FP32_ATOL = 1e-5
IDS = torch.arange(20)[None] * 3


def shard(folder: Path) -> None:
    """Split the single file in two, as large models come."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_transformers_opens_what_we_save_and_we_open_what_it_saves(
    make_decoder: MakeDecoder, whole_logits: WholeLogits, tmp_path: Path, model_type: str, tied: bool
) -> None:
    ours = make_decoder(model_type, tie_word_embeddings=tied, sliding_window=None, **EXPERTS)
    logits = whole_logits(ours, IDS)
    save_model(ours, tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(theirs).__name__ == ARCHITECTURES[model_type]
    assert theirs.dtype == torch.float32
    assert theirs.generation_config.eos_token_id == 3
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, logits, atol=FP32_ATOL, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs")
    assert back.config == ours.config
    assert torch.equal(whole_logits(back, IDS), logits)


def test_experts_fused_in_the_file_are_read_too(
    make_decoder: MakeDecoder, whole_logits: WholeLogits, tmp_path: Path
) -> None:
    """As transformers 5 holds them in memory, and writes them when told to keep its own format."""
    ours = make_decoder("qwen3_moe", **EXPERTS)
    save_model(ours, tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    back = load_model(tmp_path / "fused")
    assert torch.equal(whole_logits(back, IDS), whole_logits(ours, IDS))
    assert back.state_dict().keys() == ours.state_dict().keys()
    shard(tmp_path / "fused")
    assert torch.equal(whole_logits(load_model(tmp_path / "fused"), IDS), whole_logits(ours, IDS))


def test_a_missing_expert_is_named(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_model(make_decoder("qwen3_moe", **EXPERTS), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    weights["model.layers.0.mlp.experts.down_proj"] = torch.zeros(4, 32, 12)  # one expert too many, fused
    save_file(weights, file)
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path)
    text = str(caught.value)
    assert "model.layers.1.mlp.experts.2.up_proj.weight wanted (12, 32) found nothing" in text
    assert "model.layers.0.mlp.experts.3.down_proj.weight wanted nothing found (32, 12)" in text


def test_rope_constants_of_old_files_are_left_out(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_model(make_decoder(), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    load_model(tmp_path)


def test_whole_numbers_are_no_weights(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_model(make_decoder(), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"wanted float weights, model\.norm\.weight is I8"):
        load_model(tmp_path)


STARVED = """
import resource, sys
from pathlib import Path
import torch
from gymtune.agents.models import load_model
from gymtune.tools.errors import ModelError
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 760_000_000,) * 2)
try:
    load_model(sys.argv[1], torch.float64)
except ModelError as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space")
def test_running_out_of_memory_is_named(tmp_path: Path) -> None:
    """307 MB are mapped and cast to twice as many, where 760 MB are free; the file is sparse, no weight is touched."""
    sizes = {"vocab_size": 1_200_000, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    config = ModelConfig.from_dict({"model_type": "llama", **sizes, **heads})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        start, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    run = subprocess.run([sys.executable, "-c", STARVED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "out of memory on cpu: the weights take 0.61 GB as torch.float64" in run.stdout


def test_a_tied_head_is_not_stored_and_a_stored_one_is_read_over(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_model(make_decoder(tie_word_embeddings=True), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    decoder = load_model(tmp_path)
    assert decoder.head_weight is decoder.model.embed_tokens.weight


def test_sharded_equals_whole(make_decoder: MakeDecoder, whole_logits: WholeLogits, tmp_path: Path) -> None:
    ours = make_decoder()
    save_model(ours, tmp_path)
    shard(tmp_path)
    assert torch.equal(whole_logits(load_model(tmp_path), IDS), whole_logits(ours, IDS))


def test_dtype_goes_there_and_back(make_decoder: MakeDecoder, whole_logits: WholeLogits, tmp_path: Path) -> None:
    save_model(make_decoder(), tmp_path / "full")
    half = load_model(tmp_path / "full", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert whole_logits(half, IDS).dtype == torch.float32
    save_model(half, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(whole_logits(load_model(tmp_path / "half", torch.bfloat16), IDS), whole_logits(half, IDS))


def test_a_loaded_model_trains_and_outlives_its_file(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_model(make_decoder(), tmp_path)
    decoder = load_model(tmp_path)
    assert all(p.requires_grad and p.is_leaf for p in decoder.parameters())
    assert not decoder.training  # the update says when it is
    before = decoder.head_weight.detach().clone()
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)  # in place: what is mapped would see it
    assert torch.equal(decoder.head_weight, before)


def test_faults_are_listed_with_both_shapes(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_model(make_decoder(), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = torch.zeros(60, 32)
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    save_file(weights, file)
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path)
    text = str(caught.value)
    assert "model.norm.weight wanted (32,) found nothing" in text
    assert "lm_head.weight wanted (61, 32) found (60, 32)" in text
    assert "model.layers.0.self_attn.q_proj.bias wanted nothing found (32,)" in text
    assert "more" not in text


def test_ten_faults_are_shown_then_a_count(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    decoder = make_decoder()
    save_model(decoder, tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path)
    total = len(decoder.state_dict()) + 1
    assert f"; and {total - 10} more" in str(caught.value)
    assert str(caught.value).count("wanted") == 10


def test_missing_files_are_named(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    make_one = "gymtune models init --out DIR"
    with pytest.raises(ModelError, match=f"no such model folder.*{make_one}"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=rf"no config\.json.*{make_one}"):
        load_model(tmp_path)
    save_model(make_decoder(), tmp_path)
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="names files that are not there: model-00002-of-00002"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="wanted weight_map"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=f"no weights, wanted model.safetensors.*{make_one}"):
        load_model(tmp_path)


def test_half_a_file_is_refused(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_model(make_decoder(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load_model(tmp_path)
