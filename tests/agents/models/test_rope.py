from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gymtune.agents.models import CausalAttend, Decoder, ModelConfig
from gymtune.agents.models.rope import rope_frequencies, rope_table
from gymtune.tools.errors import ModelError

MakeDecoder = Callable[..., Decoder]

RTOL = 1e-6
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 512}

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "llama3, original left out": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, original left out": {"rope_type": "yarn", "factor": 4.0},
    "yarn, factor null": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "yarn, given factor": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def read(rope: dict[str, Any], spelling: str = "rope_parameters") -> ModelConfig:
    theta = {"rope_theta": 5000.0} if spelling == "rope_scaling" else {}
    given = rope if theta else rope | {"rope_theta": 5000.0}
    return ModelConfig.from_dict({"model_type": "llama", **SHAPE, **theta, spelling: given})


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("length", [None, 300, 512, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_factor_equal_transformers(kind: str, length: int | None, spelling: str) -> None:
    rope = KINDS[kind]
    theirs = LlamaConfig(**SHAPE, rope_parameters=rope | {"rope_theta": 5000.0})
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"), seq_len=length)
    ours = read(rope, spelling)
    got, own_factor = rope_frequencies(64, ours.rope_theta, ours.rope_scaling, context=512, length=length or 0)
    torch.testing.assert_close(got, expected, rtol=RTOL, atol=0)
    assert own_factor == pytest.approx(factor)
    plain, _ = rope_frequencies(64, 5000.0)
    changed = not torch.allclose(got, plain)
    assert changed == (rope["rope_type"] != "dynamic" or length == 1000)


def test_yarn_where_the_slowest_channel_still_turns_in_the_original_context() -> None:
    """A small theta: the ramp's end would lie past the last channel, and is cut as transformers cuts it."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 3.0}
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**SHAPE, rope_parameters=dict(rope)), torch.device("cpu"))
    scaling = ModelConfig.from_dict({"model_type": "llama", **SHAPE, "rope_parameters": rope}).rope_scaling
    got, _ = rope_frequencies(64, 3.0, scaling, context=512)
    torch.testing.assert_close(got, expected, rtol=RTOL, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_reads_the_same_here_and_in_transformers(kind: str) -> None:
    ours = read(KINDS[kind])
    written = ours.to_dict()
    assert ModelConfig.from_dict(written) == ours
    older = {key: value for key, value in written.items() if key != "rope_parameters"}  # what transformers 4 reads
    assert ModelConfig.from_dict(older) == ours
    newer = {key: value for key, value in written.items() if key not in ("rope_scaling", "rope_theta")}
    assert ModelConfig.from_dict(newer) == ours
    theirs = LlamaConfig(**ours.to_dict())
    assert theirs.rope_parameters["rope_theta"] == 5000.0
    assert ModelConfig.from_dict(theirs.to_dict()) == ours
    function = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]]
    whole = LlamaConfig(**SHAPE, rope_parameters=KINDS[kind] | {"rope_theta": 5000.0})
    assert torch.equal(function(theirs)[0], function(whole)[0])
    assert function(theirs)[1] == function(whole)[1]


def test_the_older_name_of_the_kind_and_the_original_context_outside_are_read() -> None:
    """As MiniMind and older Llamas write it; transformers lets the key outside win."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    scaling = ModelConfig.from_dict({"model_type": "llama", "rope_scaling": rope}).rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.original_max_position_embeddings) == ("yarn", 128)
    data = {"model_type": "llama", "original_max_position_embeddings": 64, "rope_scaling": rope}
    outer = ModelConfig.from_dict(data).rope_scaling
    assert outer is not None
    assert outer.original_max_position_embeddings == 64
    theirs = LlamaConfig(original_max_position_embeddings=64, rope_scaling=dict(rope))
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    torch.testing.assert_close(rope_frequencies(128, 10_000.0, outer, context=2048)[0], expected, rtol=RTOL, atol=0)


def test_rope_scaling_goes_before_rope_parameters_as_in_transformers() -> None:
    both = {"rope_scaling": KINDS["linear"], "rope_parameters": KINDS["dynamic"] | {"rope_theta": 7.0}}
    ours = ModelConfig.from_dict({"model_type": "llama", "rope_theta": 9.0, **both})
    assert ours.rope_scaling is not None
    assert ours.rope_scaling.rope_type == LlamaConfig(rope_theta=9.0, **both).rope_parameters["rope_type"] == "linear"
    assert ours.rope_theta == 9.0


@pytest.mark.parametrize(
    ("rope", "complaint"),
    [
        ({"rope_type": "yarm", "factor": 2.0}, "Did you mean 'yarn'"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
        ({"rope_type": "default", "mrope_section": [2, 2]}, "mrope_section"),
        ({"rope_type": ["yarn"]}, "is not supported"),
        ({"rope_type": "linear"}, "no 'factor'"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2'"),
        ({"rope_type": "linear", "factor": math.inf}, "factor=inf"),
        ({"rope_type": "linear", "factor": True}, "factor=True"),
        ({"rope_type": "yarn", "factor": 2.0, "attn_factor": 1.0}, "key 'attn_factor'"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate='no'"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "embeddings=0"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "no 'high_freq_factor'"),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor=4.0, wanted less",
        ),
    ],
)
def test_what_is_wrong_is_named(rope: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(rope)
    assert complaint in str(caught.value)


def test_rope_table_by_hand() -> None:
    """dim 4, theta 100: channel pairs (0, 2) and (1, 3) turn by p and p / 10."""
    table = rope_table(3, 4, 100.0)
    p = torch.tensor(2.0)
    cos, sin = [p.cos(), (p / 10).cos()], [p.sin(), (p / 10).sin()]
    expected = torch.stack([*cos, *cos, -sin[0], -sin[1], *sin])
    torch.testing.assert_close(table[2], expected, atol=1e-6, rtol=0)
    assert table.dtype == torch.float32


def hidden(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return decoder(ids, torch.arange(ids.shape[1])[None], CausalAttend())


def test_the_table_grows_and_keeps_its_start(make_decoder: MakeDecoder) -> None:
    ids = torch.randint(0, 61, (1, 40))
    grown, long = make_decoder(max_position_embeddings=16), make_decoder(max_position_embeddings=64)
    before = hidden(grown, ids[:, :10])
    assert torch.equal(hidden(grown, ids), hidden(long, ids))
    assert torch.equal(hidden(grown, ids[:, :10]), before)


def test_a_dynamic_table_follows_the_pass_at_hand(make_decoder: MakeDecoder) -> None:
    """A long sequence in between changes nothing for the next short one: sampler and trainer agree."""
    ids = torch.randint(0, 61, (1, 40))
    rope = {"rope_type": "dynamic", "factor": 4.0}
    decoder, plain = make_decoder(max_position_embeddings=16, rope_parameters=rope), make_decoder()
    assert torch.equal(hidden(decoder, ids[:, :16]), hidden(plain, ids[:, :16]))
    assert not torch.allclose(hidden(decoder, ids), hidden(plain, ids), atol=1e-3)
    whole = hidden(decoder, ids[:, :30])
    assert torch.equal(hidden(decoder, ids[:, :16]), hidden(plain, ids[:, :16]))
    hidden(decoder, ids)
    assert torch.equal(hidden(decoder, ids[:, :30]), whole)


def test_a_table_made_in_inference_mode_serves_training_and_every_dtype(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    ids, positions = torch.arange(8)[None], torch.arange(8)[None]
    with torch.inference_mode():
        decoder(ids, positions, CausalAttend())
    decoder(ids, positions, CausalAttend()).sum().backward()
    again = decoder.bfloat16().float()  # rounds the weights, must not round the table
    assert torch.equal(again._rope_table(positions), rope_table(64, 8, 10_000.0))


def test_a_pass_compiles_whole(make_decoder: MakeDecoder) -> None:
    """No look at the values of positions breaks the graph once the table is there."""
    decoder = make_decoder()
    ids = torch.randint(0, 61, (2, 9))
    expected = hidden(decoder, ids)
    compiled = torch.compile(decoder, backend="eager", fullgraph=True)
    with torch.no_grad():
        got = compiled(ids, torch.arange(9)[None], CausalAttend())
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
