"""A saved classifier opens with transformers, nothing missing, and scores the same: alone, and in a padded batch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from gymtune.agents.models import CausalAttend, Decoder, apply_lora, is_classifier, load_classifier, load_model
from gymtune.agents.models.classifier import classifier_outline, save_classifier
from gymtune.agents.models.inspection import inspect_model
from gymtune.tools.errors import ModelError

FP32 = 1e-5  # two float32 ways to a score of size 1
PAD, EOS, BOS = 2, 3, 4  # ids of the special tokens below
ENDS = (EOS,)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
ROWS = [[4, 17, 20, 9, EOS], [4, 8, EOS], [4, 30, 31, 32, 33, 34, EOS, EOS]]


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a tokenizer of 61 words with the given special tokens; `None` leaves one out."""

    def write(**special: str | None) -> Path:
        words = ["a", "b", "<pad>", "<eos>", "<bos>", *(f"w{i}" for i in range(56))]
        made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        folder = tmp_path / "tokenizer"
        given = {name: token for name, token in special.items() if token is not None}
        PreTrainedTokenizerFast(tokenizer_object=made, **given).save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def plain(tokenizer_folder: Callable[..., Path]) -> Path:
    return tokenizer_folder(pad_token="<pad>", eos_token="<eos>")


def head(seed: int = 1) -> torch.Tensor:
    return 0.5 * torch.randn(1, 32, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def by_hand(decoder: Decoder, score: torch.Tensor, row: list[int]) -> float:
    hidden = decoder(torch.tensor([row]), torch.arange(len(row))[None], CausalAttend())[0, -1]
    return float(score[0] @ hidden)


@torch.no_grad()
def theirs(folder: Path, rows: list[list[int]], side: str = "right") -> list[float]:
    """What transformers says of rows in one batch, padded as the folder's tokenizer does."""
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    batch = AutoTokenizer.from_pretrained(folder).pad({"input_ids": rows}, padding_side=side, return_tensors="pt")
    logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits.shape == (len(rows), 1)
    return [float(value) for value in logits[:, 0]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_it_and_scores_the_same(
    make_decoder: Callable[..., Decoder], plain: Path, tmp_path: Path, family: str, tied: bool
) -> None:
    decoder = make_decoder(family, tie_word_embeddings=tied, **FAMILIES[family]).eval()
    folder = tmp_path / "reward"
    save_classifier(decoder, head(), folder, plain, ENDS)
    wanted = [by_hand(decoder, head(), row) for row in ROWS]
    assert max(wanted) - min(wanted) > 0.1
    assert theirs(folder, ROWS) == pytest.approx(wanted, abs=FP32)
    assert theirs(folder, ROWS, side="left") == pytest.approx(wanted, abs=FP32)
    loaded, score = load_classifier(folder)
    assert torch.equal(score, head())
    assert [by_hand(loaded, score, row) for row in ROWS] == wanted


def test_its_config_says_what_it_is(make_decoder: Callable[..., Decoder], plain: Path, tmp_path: Path) -> None:
    save_classifier(make_decoder("llama"), head(), tmp_path / "reward", plain, ENDS)
    config = json.loads((tmp_path / "reward" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    assert config["pad_token_id"] == PAD
    assert is_classifier(tmp_path / "reward")


@pytest.mark.parametrize(
    ("special", "pad"),
    [
        ({"pad_token": "<pad>", "eos_token": "<eos>"}, PAD),
        ({"pad_token": "<eos>", "eos_token": "<eos>", "bos_token": "<bos>"}, BOS),
        ({"pad_token": None, "eos_token": "<eos>", "unk_token": "a", "bos_token": "<bos>"}, 0),
    ],
    ids=["its own", "its own ends conversations", "none"],
)
def test_what_pads_never_ends_a_conversation(
    make_decoder: Callable[..., Decoder],
    tokenizer_folder: Callable[..., Path],
    tmp_path: Path,
    special: dict[str, str | None],
    pad: int,
) -> None:
    """Where pad is eos, transformers would read the score before the last eos: of what is not the whole."""
    decoder = make_decoder().eval()
    save_classifier(decoder, head(), tmp_path / "reward", tokenizer_folder(**special), ENDS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    assert tokenizer.pad_token_id == pad
    assert tokenizer.eos_token_id == EOS
    wanted = [by_hand(decoder, head(), row) for row in ROWS]
    assert theirs(tmp_path / "reward", ROWS) == pytest.approx(wanted, abs=FP32)


def test_without_a_token_to_pad_with_transformers_refuses_a_batch(
    make_decoder: Callable[..., Decoder], tokenizer_folder: Callable[..., Path], tmp_path: Path
) -> None:
    decoder = make_decoder().eval()
    folder = tmp_path / "reward"
    save_classifier(decoder, head(), folder, tokenizer_folder(pad_token="<eos>", eos_token="<eos>"), ENDS)
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        alone = [float(model(torch.tensor([row])).logits) for row in ROWS]
        with pytest.raises(ValueError, match="no padding token"):
            model(torch.tensor([[4, 8, EOS], [4, 9, EOS]]))
    assert alone == pytest.approx([by_hand(decoder, head(), row) for row in ROWS], abs=FP32)


def test_an_adapter_is_merged(make_decoder: Callable[..., Decoder], plain: Path, tmp_path: Path) -> None:
    decoder = make_decoder().eval()
    apply_lora(decoder, r=2, alpha=8, seed=0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    save_classifier(decoder, head(), tmp_path / "reward", plain, ENDS)
    wanted = [by_hand(decoder, head(), row) for row in ROWS]
    assert theirs(tmp_path / "reward", ROWS) == pytest.approx(wanted, abs=FP32)
    assert wanted != pytest.approx([by_hand(make_decoder().eval(), head(), row) for row in ROWS], abs=0.01)


def test_half_precision_keeps_its_dtype_and_the_head_its_own(
    make_decoder: Callable[..., Decoder], plain: Path, tmp_path: Path
) -> None:
    save_classifier(make_decoder().bfloat16(), head(), tmp_path / "reward", plain, ENDS)
    model, score = load_classifier(tmp_path / "reward", torch.bfloat16)
    assert model.head_weight.dtype == torch.bfloat16
    assert torch.equal(score, head())


# --- what is none ---------------------------------------------------------------------------------------------------


def test_what_scores_is_no_language_model(
    make_decoder: Callable[..., Decoder], plain: Path, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "reward"
    save_classifier(make_decoder(), head(), folder, plain, ENDS)
    for attempt in (load_model, inspect_model):
        with pytest.raises(ModelError, match="a reward model, whose head scores and does not speak"):
            attempt(folder)
    facts = inspect_model(folder, classifier=True)
    assert facts.native
    assert facts.hidden_size == 32
    assert not is_classifier(tiny_model)
    assert inspect_model(tiny_model, classifier=True).native


def test_weights_that_do_not_fit_are_named(make_decoder: Callable[..., Decoder], plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    save_classifier(make_decoder(), head(), folder, plain, ENDS)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"model\.layers\.2\..* found nothing"):
        classifier_outline(folder)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}), encoding="utf-8")
    assert not is_classifier(folder)
    with pytest.raises(ModelError, match=r"no such model folder"):
        is_classifier(tmp_path / "nowhere")
