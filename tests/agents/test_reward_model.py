"""Sequence classifiers as reward models: an encoder with and without a template, and folders that are none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from gymtune.agents.reward_model import SequenceClassifier, load_reward_model
from gymtune.rewards import call_scorer
from gymtune.tools.errors import ModelError
from gymtune.tools.messages import Message, assistant, system, user

FP32 = 1e-6
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "be",
    "brief",
    "what",
    "is",
    "two",
    "more",
    "four",
    "no",
    "user",
    "assistant",
]
ASKED: list[Message] = [system("be brief"), user("what is two more two")]
SAYS = [[*ASKED, assistant("four")], [*ASKED, assistant("no four")]]
ROLES = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a tiny BERT that scores, with a word tokenizer; return the function that does it."""

    def write(*, template: str | None = None, labels: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("bert")
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=24, num_labels=labels, **sizes)
        model = BertForSequenceClassification(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        model.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **special)
        tokenizer.save_pretrained(folder)
        return folder

    return write


@torch.no_grad()
def by_hand(folder: Path, words: str, second: int) -> float:
    """The classifier's number for these tokens, those from `second` on of the second text."""
    ids = [WORDS.index(word) for word in words.split()]
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    types = [int(place >= second) for place in range(len(ids))]
    read = model.bert(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).pooler_output
    return float(model.classifier(read)[0, 0])


def test_an_encoder_without_a_template_reads_question_and_answer_as_a_pair(encoder: Any) -> None:
    folder = encoder()
    question = "[CLS] be brief what is two more two [SEP]"
    wanted = [by_hand(folder, f"{question} {answer} [SEP]", len(question.split())) for answer in ("four", "no four")]
    assert load_reward_model(str(folder)).score(SAYS) == pytest.approx(wanted, abs=FP32)
    assert wanted[0] != pytest.approx(wanted[1], abs=1e-3)


@pytest.mark.parametrize("template", [ROLES, "[CLS] " + ROLES + "[SEP]"], ids=["plain", "its own first token"])
def test_an_encoder_with_a_template_reads_the_conversation(encoder: Any, template: str) -> None:
    folder = encoder(template=template)
    begin = "[CLS] [UNK] be brief user what is two more two assistant"
    wanted = [by_hand(folder, f"{begin} {answer} [SEP]", 99) for answer in ("four", "no four")]
    assert load_reward_model(str(folder)).score(SAYS) == pytest.approx(wanted, abs=FP32)


def test_what_is_longer_than_the_model_reads_scores_nobody(encoder: Any) -> None:
    scores = call_scorer(load_reward_model(str(encoder())), [SAYS[0], [user("two " * 30), assistant("no")]])
    assert scores.values == [None, None]
    assert "a conversation has 34 tokens, the model" in (scores.error or "")
    assert (scores.error or "").endswith("reads 24")


def test_two_labels_are_refused_by_name(encoder: Any, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a reward model has one label, this one has 2"):
        SequenceClassifier(encoder(labels=2))
    config = Qwen3Config.from_pretrained(tiny_model, num_labels=3, pad_token_id=None)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="this one has 3"):
        SequenceClassifier(tmp_path)


def test_a_language_model_is_no_reward_model(tiny_model: Path, tmp_path: Path) -> None:
    """Its head would be drawn at random, with nothing but a warning."""
    with pytest.raises(ModelError, match=r"no trained reward model, its weights lack score\.weight"):
        load_reward_model(str(tiny_model))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no reward model can be opened"):
        load_reward_model(str(tmp_path))
