from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gymtune.agents.models import ModelConfig, init_model, load_model
from gymtune.agents.models import init as module
from gymtune.agents.models.init import MARKUP, SPECIAL, random_decoder
from gymtune.tools.errors import ModelError

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 34"}}\n</tool_call>'
TEXTS = [f"What is {a} * {b}? The answer is {a * b}. {CALL}" for a in range(10, 30) for b in range(40, 45)]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("init") / "model"
    init_model(path, texts=TEXTS, max_position_embeddings=256, **SHAPE)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_the_folder_is_a_model_with_the_ids_of_its_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = load_model(folder).config
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) == (tokenizer.eos_token_id,)
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.model_max_length == config.max_position_embeddings == 256
    assert {p.name for p in folder.parent.iterdir()} == {"model"}


def test_special_tokens_can_be_skipped_and_markup_cannot(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in SPECIAL + MARKUP:
        assert len(tokenizer.encode(text)) == 1
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == (text if text in MARKUP else "")


def test_digits_stay_single_and_words_are_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.tokenize("The answer is 1234567 * 40.")
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("123456740")
    assert "Ġanswer" in tokens


def test_no_merge_is_spent_on_the_inside_of_markup(tokenizer: PreTrainedTokenizerBase) -> None:
    assert not {t for t in tokenizer.get_vocab() if "tool_" in t or "call" in t} - set(MARKUP)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text() | st.sampled_from([*SPECIAL, *MARKUP, "  ", "\n\n", "你好", "🙂👩‍👩‍👧", " ", "12", " 's"])).map(
        "".join
    )
)
def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    singles = [t for t in tokenizer.get_vocab() if len(t) == 1]
    assert len(singles) == 256


def test_the_same_arguments_give_the_same_bytes_and_the_seed_changes_weights_only(folder: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    init_model(tmp_path / "same", texts=iter(TEXTS), max_position_embeddings=256, **SHAPE)
    init_model(tmp_path / "other", texts=TEXTS, max_position_embeddings=256, seed=1, **SHAPE)
    assert torch.equal(torch.get_rng_state(), before)
    for file in folder.iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes()
        same = (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()
        assert same == (file.name != "model.safetensors")


def test_initial_weights_have_the_deviations_they_should() -> None:
    layers = 8
    config = ModelConfig("qwen3", 300, 128, 256, layers, 4, 2, 32, 64)
    for name, weight in random_decoder(config).named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        last = name.split(".")[-2]
        small = math.sqrt(2 / (5 * 128))
        expected = small / math.sqrt(2 * layers) if last in ("o_proj", "down_proj") else small
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name


def test_a_full_or_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "kept.txt"):
        with pytest.raises(ModelError, match="not an empty folder"):
            init_model(path, texts=TEXTS, **SHAPE)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    init_model(tmp_path, texts=[], **SHAPE)
    assert load_model(tmp_path).config.vocab_size == 256 + len(SPECIAL) + len(MARKUP)


def test_a_crash_leaves_nothing_and_the_next_try_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_save_tokenizer", crash)
        with pytest.raises(KeyboardInterrupt):
            init_model(tmp_path / "new", texts=TEXTS, **SHAPE)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "stale").write_text("left by kill -9")
    init_model(tmp_path / "new", texts=TEXTS, **SHAPE)
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
    assert not (tmp_path / "new" / "stale").exists()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"vocab_size": 264}, "vocab_size=264, wanted at least 265"),
        ({"num_attention_heads": 3}, "hidden_size=32 is no multiple of num_attention_heads=3"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_wrong_sizes_are_named(tmp_path: Path, wrong: dict[str, int], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        init_model(tmp_path / "new", texts=TEXTS, **(SHAPE | wrong))
    assert list(tmp_path.iterdir()) == []
