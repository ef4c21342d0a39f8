from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gymtune.agents.models import CausalAttend, Decoder, load_model, save_model
from gymtune.agents.models.init import train_tokenizer
from gymtune.agents.models.minimind import export_minimind, import_minimind
from gymtune.tools.errors import ModelError

State = dict[str, Tensor]
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH, VOCAB, EXPERTS = 2, 4, 2, 6, 32, 40, 400, 3
IDS = torch.tensor([[5, 17, 3, 200, 399, 5, 5, 42, 0, 61]])
ATOL = 1e-4


def state_dict(moe: bool, seed: int = 0) -> State:
    """Weights under MiniMind's names, as its trainers save them: half precision, the head a second time."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{name}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{name}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
        }
        mlps = [f"{name}.mlp.experts.{e}" for e in range(EXPERTS)] if moe else [f"{name}.mlp"]
        for mlp in mlps:
            shapes |= {f"{mlp}.{part}_proj.weight": (WIDTH, HIDDEN) for part in ("gate", "up")}
            shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, WIDTH)
        if moe:
            shapes[f"{name}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    shapes["model.norm.weight"] = (HIDDEN,)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        spread = torch.randn(shape, generator=generator)
        state[name] = (1 + 0.3 * spread if len(shape) == 1 else 0.3 * spread).half()
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    return state


def slow_logits(state: State, ids: list[int]) -> Tensor:
    """MiniMind's forward pass, one token and one head after another, in double precision."""
    w = {name: tensor.double() for name, tensor in state.items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * weight

    def turn(x: Tensor, position: int) -> Tensor:
        out, half = torch.empty_like(x), len(x) // 2
        for i in range(half):
            angle = position / 1e6 ** (2 * i / len(x))
            c, s = math.cos(angle), math.sin(angle)
            out[i], out[half + i] = x[i] * c - x[half + i] * s, x[half + i] * c + x[i] * s
        return out

    def mlp(name: str, x: Tensor) -> Tensor:
        gate = w[f"{name}.gate_proj.weight"] @ x
        return w[f"{name}.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * (w[f"{name}.up_proj.weight"] @ x))

    hidden = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        attn = f"{name}.self_attn"
        x = [norm(h, w[f"{name}.input_layernorm.weight"]) for h in hidden]
        q = [(w[f"{attn}.q_proj.weight"] @ h).view(HEADS, HEAD_DIM) for h in x]
        k = [(w[f"{attn}.k_proj.weight"] @ h).view(KV_HEADS, HEAD_DIM) for h in x]
        v = [(w[f"{attn}.v_proj.weight"] @ h).view(KV_HEADS, HEAD_DIM) for h in x]
        for t in range(len(ids)):
            heads = []
            for head in range(HEADS):
                kv = head * KV_HEADS // HEADS
                query = turn(norm(q[t][head], w[f"{attn}.q_norm.weight"]), t)
                keys = [turn(norm(k[s][kv], w[f"{attn}.k_norm.weight"]), s) for s in range(t + 1)]
                scores = torch.stack([query @ key / math.sqrt(HEAD_DIM) for key in keys]).softmax(0)
                heads.append(sum(scores[s] * v[s][kv] for s in range(t + 1)))
            hidden[t] = hidden[t] + w[f"{attn}.o_proj.weight"] @ torch.cat(heads)
            inner = norm(hidden[t], w[f"{name}.post_attention_layernorm.weight"])
            expert = f"{name}.mlp"
            if f"{name}.mlp.gate.weight" in w:  # one expert a token, its weight scaled to 1
                expert += f".experts.{int((w[f'{name}.mlp.gate.weight'] @ inner).argmax())}"
            hidden[t] = hidden[t] + mlp(expert, inner)
    return torch.stack([w["lm_head.weight"] @ norm(h, w["model.norm.weight"]) for h in hidden])


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(state: Any, name: str = f"full_sft_{HIDDEN}.pth") -> Path:
        torch.save(state, tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["one two three"], 300).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": "{{ 1 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "model_minimind.py").write_text("raise SystemExit")
    return folder


def their_logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ in {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
    with torch.no_grad():
        return model(IDS).logits[0]


def our_logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.logits(model(IDS, torch.arange(IDS.shape[1])[None], CausalAttend()))[0]


KINDS = pytest.mark.parametrize(("moe", "name"), [(False, f"full_sft_{HIDDEN}.pth"), (True, f"rlhf_{HIDDEN}_moe.pth")])


@KINDS
def test_logits_are_minimind_s(write: Callable[..., Path], tmp_path: Path, moe: bool, name: str) -> None:
    state = state_dict(moe)
    out = import_minimind(write(state, name), None, tmp_path / "out")
    expected = slow_logits(state, IDS[0].tolist()).float()
    torch.testing.assert_close(their_logits(out), expected, atol=ATOL, rtol=1e-4)
    torch.testing.assert_close(our_logits(load_model(out)), expected, atol=ATOL, rtol=1e-4)


@KINDS
def test_there_and_back_is_the_same_to_the_bit(
    write: Callable[..., Path], tmp_path: Path, moe: bool, name: str
) -> None:
    state = state_dict(moe)
    out = import_minimind(write(state, name), None, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    back = export_minimind(out, tmp_path / "back", name.split("_", maxsplit=1)[0])
    assert back.name == f"{name.split('_', maxsplit=1)[0]}_{HIDDEN}{'_moe' if moe else ''}.pth"
    found = torch.load(back, weights_only=True)
    assert found.keys() == state.keys()
    assert all(found[key].dtype == torch.float16 and torch.equal(found[key], state[key]) for key in state)
    assert list((tmp_path / "back").iterdir()) == [back]


def test_what_transformers_saved_is_exported(write: Callable[..., Path], tmp_path: Path) -> None:
    state = state_dict(moe=True)
    out = import_minimind(write(state, f"a_{HIDDEN}_moe.pth"), None, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    found = torch.load(export_minimind(tmp_path / "theirs", tmp_path, "b"), weights_only=True)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_the_tokenizer_goes_along_and_says_what_ends(
    write: Callable[..., Path], tmp_path: Path, tokenizer: Path
) -> None:
    out = import_minimind(write(state_dict(False)), tokenizer, tmp_path / "out")
    read = AutoTokenizer.from_pretrained(out)
    assert read.chat_template == "{{ 1 }}"
    assert load_model(out).config.eos_token_ids == (read.convert_tokens_to_ids("<|im_end|>"),)
    assert not list(out.glob("*.py"))
    bare = import_minimind(write(state_dict(False)), None, tmp_path / "bare")
    assert load_model(bare).config.eos_token_ids == (2,)
    assert {file.name for file in bare.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_head_of_its_own_stays_so_and_is_not_exported(write: Callable[..., Path], tmp_path: Path) -> None:
    state = state_dict(False) | {"lm_head.weight": state_dict(False, seed=1)["model.embed_tokens.weight"]}
    out = import_minimind(write(state), None, tmp_path / "out")
    expected = slow_logits(state, IDS[0].tolist()).float()
    torch.testing.assert_close(their_logits(out), expected, atol=ATOL, rtol=1e-4)
    with pytest.raises(ModelError, match="tie_word_embeddings=False, not True"):
        export_minimind(out, tmp_path, "x")


def test_tensors_missing_odd_and_misshapen_are_all_named(write: Callable[..., Path], tmp_path: Path) -> None:
    state = state_dict(False)
    del state["model.layers.1.self_attn.k_norm.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(24).half()
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(39, HIDDEN).half()
    with pytest.raises(ModelError) as caught:
        import_minimind(write(state), None, tmp_path / "out")
    text = str(caught.value)
    assert "model.layers.1.self_attn.k_norm.weight wanted (6,) found nothing" in text
    assert "model.layers.0.self_attn.q_proj.bias wanted nothing found (24,)" in text
    assert "model.layers.1.mlp.up_proj.weight wanted (40, 32) found (39, 32)" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: {"tok.weight": torch.zeros(2, 2)}, "no model.embed_tokens.weight"),
        (lambda s: {k: v for k, v in s.items() if "q_norm" not in k}, r"no model.layers.0.self_attn.q_norm.weight"),
        (lambda s: {"model": s, "optimizer": {}}, "run to resume"),
        (lambda s: list(s.values()), "wanted tensors by name, found list"),
        (lambda s: {}, "wanted tensors by name"),
        (lambda s: s | {"epoch": 3}, "not so: epoch"),
        (lambda s: s | {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}, "not so: model.norm.weight"),
        (lambda s: s | {"model.norm.weight": torch.empty(HIDDEN, device="meta")}, "not so: model.norm.weight"),
        (lambda s: s | {"model.norm.weight": torch.ones(1).expand(10**12)}, "not so: model.norm.weight"),
        (lambda s: s | {"model.layers.7.x": torch.ones(1)}, "model.layers.2.input_layernorm.weight wanted"),
        (
            lambda s: s | {f"model.layers.{i}0.x": torch.ones(1) for i in range(1, 300)},
            "no whole layers; it has .*; and [0-9]+ more",
        ),
        (lambda s: s | {"x" * 10**6: torch.ones(1)}, "not MiniMind's weights"),
    ],
)
def test_what_is_no_minimind_is_refused(
    write: Callable[..., Path], tmp_path: Path, change: Callable[[State], Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        import_minimind(write(change(state_dict(False))), None, tmp_path / "out")
    assert len(str(caught.value)) < 3000


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran-in-this-folder",)


def test_code_is_not_run(write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="not a whole file of tensors alone"):
        import_minimind(write(state_dict(False) | {"x": Code()}), None, tmp_path / "out")
    assert not Path("ran-in-this-folder").exists()


def test_files_that_are_broken_or_absent(write: Callable[..., Path], tmp_path: Path) -> None:
    whole = write(state_dict(False)).read_bytes()
    file = tmp_path / "broken.pth"
    for content in (b"", b"\0" * 1000, b"GGUF" + b"\xff" * 1000, whole[:-200], whole[:999], b"not a model\n" * 99):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"broken\.pth: not a whole file of tensors"):
            import_minimind(file, None, tmp_path / "out")
    with pytest.raises(ModelError, match="cannot read: No such file"):
        import_minimind(tmp_path / "nowhere.pth", None, tmp_path / "out")


def test_a_damaged_pickle_is_at_worst_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    file = write(state_dict(False))
    whole, random = file.read_bytes(), Random(0)
    start = whole.index(b"data.pkl")
    refused = 0
    for trial in range(150):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[random.randrange(start, start + 6000)] = random.randrange(256)
        file.write_bytes(damaged)
        try:
            import_minimind(file, None, tmp_path / str(trial))
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("name", [f"full_sft_{HIDDEN}_moe.pth", "full_sft_512.pth"])
def test_a_name_that_belongs_to_another_model_is_refused(write: Callable[..., Path], tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="its name is not that of its tensors: hidden size 32, dense"):
        import_minimind(write(state_dict(False), name), None, tmp_path / "out")


def test_a_name_that_says_nothing_is_taken(write: Callable[..., Path], tmp_path: Path) -> None:
    assert load_model(import_minimind(write(state_dict(True), "mine.pth"), None, tmp_path / "out"))


def test_a_tokenizer_that_does_not_fit(write: Callable[..., Path], tmp_path: Path, tokenizer: Path) -> None:
    file = write(state_dict(False))
    other = tmp_path / "tokenizer"
    other.mkdir()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        import_minimind(file, other, tmp_path / "out")
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        import_minimind(file, other, tmp_path / "out")
    (other / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(ModelError, match="eos_token=None is no token"):
        import_minimind(file, other, tmp_path / "out")
    train_tokenizer([str(n) + "ab" * n for n in range(99)] + ["the cat sat on the mat " * 9], 300).save(
        str(other / "tokenizer.json")
    )
    small = {
        k: v[:250] if k in {"lm_head.weight", "model.embed_tokens.weight"} else v for k, v in state_dict(False).items()
    }
    with pytest.raises(ModelError, match="embedding 250"):
        import_minimind(write(small), other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "llama"}, "MiniMind cannot hold a llama"),
        ({"rope_theta": 10000.0}, r"rope_theta=10000\.0, not 1000000\.0"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05, not 1e-06"),
        ({"attention_bias": True}, "attention_bias=True, not False"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling=.*linear"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 2, "norm_topk_prob": True}, "num_experts_per_tok=2, not 1"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "norm_topk_prob=False, not True"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0]}, "mlp_only_layers="),
    ],
)
def test_what_minimind_would_run_otherwise_is_not_exported(
    make_decoder: Callable[..., Decoder], tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    plain = {"rope_theta": 1e6, "tie_word_embeddings": True, "num_experts": 3, "moe_intermediate_size": 16}
    save_model(make_decoder(**plain | {"num_experts_per_tok": 1} | changes), tmp_path / "in")
    with pytest.raises(ModelError, match=complaint):
        export_minimind(tmp_path / "in", tmp_path / "out", "x")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over_and_nothing_beyond_half(write: Callable[..., Path], tmp_path: Path) -> None:
    out = import_minimind(write(state_dict(False)), None, tmp_path / "out")
    with pytest.raises(ModelError, match="not an empty folder"):
        import_minimind(write(state_dict(False)), None, out)
    with pytest.raises(ModelError, match=r"full_sft_32\.pth: is there already"):
        export_minimind(out, tmp_path, "full_sft")
    for prefix in ("", "a/b", "../a", "/a"):
        with pytest.raises(ModelError, match="first part of a file name"):
            export_minimind(out, tmp_path, prefix)
    model = load_model(out)
    with torch.no_grad():
        model.model.norm.weight[3] = 70000
    save_model(model, tmp_path / "large")
    with pytest.raises(ModelError, match=r"not finite in half precision .*: model\.norm\.weight\."):
        export_minimind(tmp_path / "large", tmp_path, "x")


def test_a_full_disk_leaves_nothing(write: Callable[..., Path], tmp_path: Path) -> None:
    out = import_minimind(write(state_dict(False)), None, tmp_path / "out")
    before = sorted(tmp_path.iterdir())
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ModelError, match=r"cannot write: .*Make room"):
            import_minimind(tmp_path / f"full_sft_{HIDDEN}.pth", None, tmp_path / "more")
        with pytest.raises(ModelError, match=r"cannot write: .*Make room"):
            export_minimind(out, tmp_path, "more")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before
    assert load_file(out / "model.safetensors")


CHECKOUT = os.environ.get("GYMTUNE_TEST_MINIMIND")


@pytest.mark.skipif(not CHECKOUT, reason="GYMTUNE_TEST_MINIMIND names no checkout of MiniMind")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("moe", [False, True])
def test_minimind_s_own_code_gives_the_same(tmp_path: Path, moe: bool) -> None:
    spec = importlib.util.spec_from_file_location("model_minimind", Path(str(CHECKOUT)) / "model/model_minimind.py")
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(action="ignore"):
        spec.loader.exec_module(theirs)
    config = theirs.MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=moe)
    model = theirs.MiniMindForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            spread = torch.randn(weight.shape, generator=generator)
            weight.copy_((1 + 0.3 * spread if weight.dim() == 1 else 0.3 * spread).half())
        expected = model(IDS).logits[0]
    file = tmp_path / f"full_sft_32{'_moe' if moe else ''}.pth"
    torch.save({k: v.half().cpu() for k, v in model.state_dict().items()}, file)  # as its trainers do
    out = import_minimind(file, Path(str(CHECKOUT)) / "model", tmp_path / "out")
    torch.testing.assert_close(their_logits(out), expected, atol=ATOL, rtol=1e-4)
    torch.testing.assert_close(our_logits(load_model(out)), expected, atol=ATOL, rtol=1e-4)
    assert len(AutoTokenizer.from_pretrained(out)) == 6400
    back = theirs.MiniMindForCausalLM(config).eval()
    back.load_state_dict(
        torch.load(export_minimind(out, tmp_path / "back", "full_sft"), map_location="cpu"), strict=True
    )
    with torch.no_grad():
        assert torch.equal(back(IDS).logits[0], expected)
