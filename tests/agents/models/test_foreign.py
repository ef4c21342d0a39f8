"""Models of transformers behind our contract, against transformers itself: its forward, its generate, its gradients."""

import asyncio
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
)

from gymtune.agents import GenerateRequest, Sampling, Trajectory
from gymtune.agents.models import CausalAttend, Decoder, load_model
from gymtune.agents.models.foreign import ForeignModel, load_any, load_foreign, save_any
from gymtune.agents.models.foreign_probe import prove
from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.errors import DataError, ModelError
from gymtune.trainers.batch import make_rows, micro_batches
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.policy import policy_logprobs

RELATIVE = 1e-4  # fp32, other orders of summation
CPU = torch.device("cpu")
CONTEXT = 64
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}
LATENT = {  # values of 8 channels, keys of 12
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
FAMILIES = {
    "gpt_neox": {},  # a part of each head turns; attention and MLP side by side
    "gpt2": {"n_positions": CONTEXT},  # learned positions
    "phi": {"partial_rotary_factor": 0.5},  # a bias on the head
    "phi3": {},
    "olmo2": {},
    "gemma": {"head_dim": 16},  # embeddings scaled; H x D is not the hidden size
    "stablelm": {},  # does not hand arguments on to its attention
    "starcoder2": {},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6},
    "deepseek_v3": LATENT,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 8},  # one that our decoder has
}
FEW = ["gpt_neox", "phi", "stablelm", "granite", "deepseek_v3", "olmoe"]  # each differs in a way of its own


def make(folder, kind, opener=AutoModelForCausalLM, **changes):
    """Save a random model whose every weight is far from its start value, norms too: nothing cancels."""
    config = AutoConfig.for_model(kind, **(COMMON | FAMILIES.get(kind, {}) | changes))
    torch.manual_seed(0)
    model = opener.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            spread = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * spread if weight.dim() == 1 else 0.2 * spread)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give the folder of a family's random model, made once."""
    made = {}

    def give(kind):
        if kind not in made:
            made[kind] = make(tmp_path_factory.mktemp("foreign") / kind, kind)
        return made[kind]

    return give


@pytest.fixture
def copy(folder, tmp_path):
    """Give a folder of one's own, to break."""
    return lambda kind: shutil.copytree(folder(kind), tmp_path / "own" / kind)


def theirs(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, **({"dtype": torch.float32} | options)).eval()


def some_ids(rows, length, seed=0):
    return torch.randint(4, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def our_logits(model, ids):
    return model.logits(model(ids, torch.arange(ids.shape[1])[None], CausalAttend()))


def close(found, wanted, relative=RELATIVE):
    return float((found - wanted).abs().max()) <= relative * float(wanted.abs().max())


def edit(path, **changes):
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | changes))


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(folder, kind):
    model, ids = load_foreign(folder(kind)), some_ids(3, 20)
    found, wanted = our_logits(model, ids), theirs(folder(kind))(ids).logits
    assert close(found, wanted)
    assert not close(our_logits(model, ids.flip(1)), wanted, 0.1)  # the tolerance can tell
    hidden = model(ids, torch.arange(20)[None], CausalAttend())
    assert close(hidden @ model.head_weight.T, wanted)  # as the trainer makes them


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_tokens_equal_generate(folder, kind):
    """Ragged prompts side by side, then a second turn of each on what the first left in the cache."""
    reference = theirs(folder(kind))
    plain = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0)
    model = load_foreign(folder(kind))
    engine, stop = TorchEngine(model, max_model_length=CONTEXT - 16), model.config.eos_token_ids

    def turn(prompts):
        async def all_of_them():
            sampling = Sampling(temperature=0, max_new_tokens=6)
            requests = [GenerateRequest(p, sampling, stop, 1, str(i)) for i, p in enumerate(prompts)]
            return await asyncio.gather(*(engine.generate(one) for one in requests))

        found = [one.ids for one in asyncio.run(all_of_them())]
        for prompt, ids in zip(prompts, found, strict=True):
            row = torch.tensor([prompt])  # without a mask, generate takes id 0 in a prompt for padding
            whole = reference.generate(row, attention_mask=torch.ones_like(row), generation_config=plain)
            assert ids == whole[0, len(prompt) :].tolist()
        return found

    first = [some_ids(1, n, seed=n)[0].tolist() for n in (1, 14, 3, 9, 10)]
    said = turn(first)
    turn([p + ids + some_ids(1, 4, seed=i)[0].tolist() for i, (p, ids) in enumerate(zip(first, said, strict=True))])


def episode(number, prompt, answer):
    made = Trajectory(
        trajectory_id=f"t{number}", group_id="g", task_id="t", env_id="E-v0", task_index=0, terminated=True
    )
    made.start_segment()
    made.append_context(prompt)
    made.append_turn("said", "stop", answer, [-1.0] * len(answer))
    return made


@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_and_gradients_of_the_trainer_equal_transformers(folder, kind):
    """A group that shares its prompt: value of every trainable token, and the gradient of every parameter by name."""
    prompt, answers = [5, 9, 11, 40], [[7, 8, 9], [12, 4], [60, 33, 21, 5]]  # a token names its place
    rows = make_rows(
        experiences_of([episode(i, prompt, a) for i, a in enumerate(answers)], [1.0] * 3, need_logprobs=False)
    )
    model, reference = load_foreign(folder(kind)), theirs(folder(kind))
    found = {}
    loss = torch.zeros(())
    for batch in micro_batches(rows, 1000, CPU):
        logprobs, _ = policy_logprobs(model, batch)
        loss = loss + logprobs.sum()
        found |= {int(target): float(value) for target, value in zip(batch.targets, logprobs.detach(), strict=True)}
    wanted, sums = {}, torch.zeros(())
    for answer in answers:
        whole = reference(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        for place, token in enumerate(answer, start=len(prompt)):
            wanted[token] = float(whole[place - 1, token].detach())
            sums = sums + whole[place - 1, token]
    assert found == pytest.approx(wanted, rel=RELATIVE, abs=RELATIVE)
    loss.backward()
    sums.backward()
    gradients = {name: weight.grad for name, weight in reference.named_parameters()}
    for name, weight in model.named_parameters():
        mine, other = weight.grad, gradients.pop(name)
        assert (mine is None) == (other is None), name
        assert mine is None or close(mine, other, 10 * RELATIVE), name
    assert not gradients


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_a_changed_model_survives_saving(copy, tmp_path, kind):
    """To another folder and over its own; transformers opens both; names are those of the files."""
    own = copy(kind)
    model, ids = load_foreign(own), some_ids(2, 9)
    for weight in model.parameters():
        weight.mul_(0.9)
    wanted = our_logits(model, ids)
    for target in (tmp_path / "other", own):
        save_any(model, target)
        assert torch.equal(our_logits(model, ids), wanted)
        assert close(theirs(target)(ids).logits, wanted)
        again = load_foreign(target)
        assert torch.equal(our_logits(again, ids), wanted)
        assert again.config.eos_token_ids == (3,)
    with safe_open(own / "model.safetensors", framework="pt") as opened:
        names = set(opened.keys())
    if kind not in ("olmoe", "gpt_neox"):  # in memory transformers fuses experts, and calls GPT-NeoX's head lm_head
        assert {name for name, _ in model.named_parameters()} == names


@torch.no_grad()
def test_a_loaded_model_needs_its_file_no_more(copy):
    own = copy("phi3")
    model, ids = load_foreign(own), some_ids(1, 9)
    wanted = our_logits(model, ids)
    size = (own / "model.safetensors").stat().st_size
    (own / "model.safetensors").write_bytes(bytes(size))  # in place, as some programs save
    assert torch.equal(our_logits(model, ids), wanted)


@torch.no_grad()
def test_one_of_our_own_families_gives_what_our_decoder_gives(folder):
    foreign, decoder, ids = load_foreign(folder("qwen3")), load_model(folder("qwen3")), some_ids(2, 20)
    assert close(our_logits(foreign, ids), our_logits(decoder, ids))
    for field in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "eos_token_ids"):
        assert getattr(foreign.config, field) == getattr(decoder.config, field), field
    for field in ("model_type", "vocab_size", "hidden_size", "max_position_embeddings"):
        assert getattr(foreign.config, field) == getattr(decoder.config, field), field
    names = {name for name, _ in decoder.named_parameters()}
    assert {name for name, _ in foreign.named_parameters()} == names


def test_load_any_takes_our_decoder_where_it_can(folder, tmp_path):
    assert isinstance(load_any(folder("qwen3")), Decoder)
    other = load_any(folder("phi"))
    assert isinstance(other, ForeignModel)
    assert not other.native
    with pytest.raises(ModelError, match="no such model folder"):
        load_any(tmp_path / "nowhere")


def test_load_any_says_what_both_refuse(copy):
    own = copy("qwen3")
    edit(own, model_type="qwen33")
    with pytest.raises(ModelError, match=r"unknown to transformers.*Did you mean.*Our own decoder.*qwen33"):
        load_any(own)


@torch.no_grad()
def test_heads_are_those_that_the_cache_must_hold(folder):
    config = load_foreign(folder("deepseek_v3")).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 12)
    config = load_foreign(folder("gemma")).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.to_dict()["model_type"] == "gemma"


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_bfloat16_gives_float32_logits_near_those_of_float32(folder, kind):
    ids = some_ids(2, 12)
    logits = our_logits(load_foreign(folder(kind), dtype=torch.bfloat16), ids)
    assert logits.dtype == torch.float32
    wanted = our_logits(load_foreign(folder(kind)), ids)
    assert float((logits - wanted).norm() / wanted.norm()) < 0.1


@torch.no_grad()
def test_float64_stays_float64(folder):
    ids = some_ids(2, 12)
    logits = our_logits(load_foreign(folder("phi"), dtype=torch.float64), ids)
    assert logits.dtype == torch.float64
    assert close(logits, theirs(folder("phi"), dtype=torch.float64)(ids).logits, 1e-7)  # rope stays float32


@torch.no_grad()
def test_dropout_never_acts(tmp_path):
    rates = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    model, ids = load_foreign(make(tmp_path / "gpt2", "gpt2", **rates)), some_ids(2, 12)
    calm = our_logits(model, ids)
    assert torch.equal(our_logits(model.train(), ids), calm)
    assert model.training
    assert not model.eval().training
    wild = theirs(tmp_path / "gpt2").train()
    assert not close(wild(ids).logits, calm, 0.1)  # it does in transformers


@torch.no_grad()
def test_rope_that_changes_with_the_length_keeps_within_the_original_context(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 32}
    model, ids = load_foreign(make(tmp_path / "phi3", "phi3", **changes)), some_ids(1, 40)
    assert model.config.max_position_embeddings == 32
    whole = theirs(tmp_path / "phi3")
    assert close(our_logits(model, ids[:, :32]), whole(ids[:, :32]).logits)
    assert not close(whole(ids).logits[:, :32], whole(ids[:, :32]).logits, 0.01)  # why: a longer pass changes all
    with pytest.raises(DataError, match="reaches position 39, the model's context is 32"):
        our_logits(model, ids)


def test_a_window_that_never_bites_is_no_fault(tmp_path):
    load_foreign(make(tmp_path / "starcoder2", "starcoder2", sliding_window=CONTEXT))


WINDOW = {"sliding_window": 16}
REFUSED = {
    "mistral": (WINDOW, r"sliding_window=16 is not supported.*max_position_embeddings=64"),
    "starcoder2": (WINDOW, r"sliding_window=16 is not supported"),
    "cohere2": (WINDOW, r"sliding_window=16 is not supported"),
    "gemma2": ({}, r"attn_logit_softcapping=50.0 is not supported"),
    "nanochat": ({}, r"final_logit_softcapping=15.0 is not supported"),
    "gpt_oss": ({"num_local_experts": 2}, r"GptOssAttention uses s_aux, which is not supported"),
    "mamba": ({}, r"layer_types has 'linear_attention', wanted attention alone"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, r"layer_types has 'conv', wanted attention alone"),
    "xlstm": ({"num_heads": 4}, r"xlstm is not supported: its 2 layers should attend once each.*calls came from \[\]"),
    "bloom": ({"n_head": 4, "n_layer": 2}, r"should attend once each.*calls came from \[\]"),
    "diffllama": ({}, r"should attend once each.*calls came from \[0, 0, 1, 1\]"),
    "falcon": ({"alibi": True}, r"alibi=True is not supported"),
    "gpt2": ({"add_cross_attention": True}, r"add_cross_attention=True is not supported"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_contract_cannot_hold_is_refused_by_name(tmp_path, kind):
    changes, message = REFUSED[kind]
    with pytest.raises(ModelError, match=message) as caught:
        load_foreign(make(tmp_path / kind, kind, **changes))
    assert str(tmp_path / kind) in str(caught.value)


def test_other_kinds_of_model_are_refused(tmp_path):
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    seq2seq = make(tmp_path / "t5", "t5", AutoModelForSeq2SeqLM, **sizes)
    with pytest.raises(ModelError, match="is_encoder_decoder=True is not supported"):
        load_foreign(seq2seq)
    masked = make(tmp_path / "distilbert", "distilbert", AutoModelForMaskedLM, dim=32, hidden_dim=48, n_heads=4)
    with pytest.raises(ModelError, match="'distilbert' has no causal language model in transformers"):
        load_foreign(masked)
    with pytest.raises(ModelError, match="bert is not supported: its logits are not those of transformers' own"):
        load_foreign(make(tmp_path / "bert", "bert"))  # sees later tokens, for it is no decoder


class Mean(nn.Module):
    """A state that runs along the tokens and does not go through attention."""

    def forward(self, x):
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


@torch.no_grad()
def test_a_state_beside_attention_is_found(folder):
    model = load_foreign(folder("phi3"))
    (opened,) = model._opened
    prove(model, opened, folder("phi3"))
    opened.model.norm = nn.Sequential(opened.model.norm, Mean())
    assert close(our_logits(model, some_ids(1, 9)), our_logits(model, some_ids(1, 9)))
    with pytest.raises(ModelError, match="tokens reach later ones by other ways than attention"):
        prove(model, opened, folder("phi3"))


def test_code_that_comes_with_a_model_is_never_run(copy, tmp_path):
    own = copy("phi3")
    (own / "modeling_odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OddForCausalLM: ...\n")
    auto = {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    edit(own, model_type="odd_one", auto_map=auto)
    with pytest.raises(ModelError, match=r"'odd_one' is unknown to transformers. Code that comes with a model"):
        load_foreign(own)
    edit(own, model_type="phi3")
    load_foreign(own)  # its own code beside a known family: the family's is taken
    assert not (tmp_path / "ran").exists()


def test_wrong_tensors_are_all_named(copy):
    own = copy("phi3")
    weights = load_file(own / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    weights["model.norm.weight"] = torch.ones(5)
    weights["model.extra.weight"] = torch.ones(5)
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights do not fit config\.json") as caught:
        load_foreign(own)
    message = str(caught.value)
    assert "missing model.layers.0.mlp.down_proj.weight" in message
    assert "unexpected model.extra.weight" in message
    assert "mismatched" in message
    assert "model.norm.weight" in message


def break_config(own):
    (own / "config.json").write_text("{")


def break_sizes(own):
    edit(own, hidden_size="many")


def quantise(own):
    edit(own, quantization_config={"quant_method": "gptq", "bits": 4})


def drop_weights(own):
    (own / "model.safetensors").unlink()


def only_pickle(own):
    torch.save(load_file(own / "model.safetensors"), own / "pytorch_model.bin")
    (own / "model.safetensors").unlink()


def cut_weights(own):
    whole = (own / "model.safetensors").read_bytes()
    (own / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def drop_context(own):
    edit(own, max_position_embeddings=None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_config, "not JSON"),
        (break_sizes, "hidden_size"),
        (quantise, "quantization_config="),
        (drop_weights, "does not open it"),
        (only_pickle, "does not open it"),
        (cut_weights, "does not open it"),
        (drop_context, "max_position_embeddings"),
    ],
)
def test_broken_folders_are_named(copy, damage, message):
    own = copy("phi3")
    damage(own)
    with pytest.raises(ModelError, match=message) as caught:
        load_foreign(own)
    assert str(own) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_end_of_sequence_ids_come_from_both_files(copy):
    own = copy("phi3")
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert load_foreign(own).config.eos_token_ids == (3, 7)
