"""Reward models behind `ConversationScorer`: any sequence classifier that `transformers` opens, and a stub.

A classifier reads the whole conversation in its own chat template and answers with one number, read at the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..rewards.functions import ConversationScorer
from ..tools.errors import ConfigError, ModelError
from ..tools.messages import Message

STUB = "stub"


def load_reward_model(name: str, *, device: str = "cpu") -> ConversationScorer:
    """Return the reward model in the folder `name`, or the stub of that name.

    Raises ConfigError when there is no such folder, ModelError when it holds no sequence classifier of one label.
    """
    if name == STUB:
        return StubRewardModel()
    if not (Path(name) / "config.json").is_file():
        raise ConfigError(f"reward model {name!r}: no such model folder (no config.json in it); or name {STUB!r}")
    return SequenceClassifier(name, device=device)


class StubRewardModel:
    """Needs no weights: the share of distinct words in the last message, between 0 and 1. For trying the plumbing."""

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        """Score each conversation; an empty last message earns 0."""
        return [self._one(conversation[-1]["content"]) for conversation in conversations]

    def _one(self, text: str) -> float:
        words = text.lower().split()
        return len(set(words)) / len(words) if words else 0.0


class SequenceClassifier:
    """A Hugging Face sequence-classification folder with one label.

    Raises ModelError where `transformers` cannot open it, or it has another number of labels, or no chat template.
    """

    def __init__(self, folder: str | Path, *, device: str = "cpu") -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder}: no reward model can be opened: {error}") from error
        labels = self._model.config.num_labels
        if labels != 1:
            raise ModelError(f"{folder}: a reward model has one label, this one has {labels}")
        if not self._tokenizer.chat_template:
            raise ModelError(f"{folder}: the reward model's tokenizer has no chat template to read a conversation with")
        # One conversation at a time, and no padding token: where it equals eos, the library would read the score at the
        # token before the last eos.
        self._model.config.pad_token_id = None
        self._model.eval().to(device)

    @torch.no_grad()
    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        """Return the classifier's number for each conversation."""
        return [self._one(messages) for messages in conversations]

    def _one(self, messages: Sequence[Message]) -> float:
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return float(self._model(input_ids=ids.to(self._model.device)).logits[0, 0])
