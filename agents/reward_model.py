"""Reward models behind `ConversationScorer`: any sequence classifier that `transformers` opens, and a stub.

A classifier reads the whole conversation in its own chat template, or, where it has none, what was asked and what was
answered as a pair of texts. It answers with one number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
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
        raise ConfigError(
            f"reward model {name!r}: no such model folder (no config.json in it); a server is http://HOST:PORT/PATH, "
            f"and {STUB!r} needs no weights"
        )
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
    """A Hugging Face sequence-classification folder with one label: a decoder, read at its last token, or an encoder.

    Raises ModelError where `transformers` cannot open it, it has another number of labels, or its file lacks weights
    (as a language model lacks the head that scores).
    """

    def __init__(self, folder: str | Path, *, device: str = "cpu") -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._name = str(folder)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self._name, local_files_only=True)
            opened: Any = AutoModelForSequenceClassification.from_pretrained(
                self._name, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{folder}: no reward model can be opened: {error}") from error
        self._model, report = opened
        if missing := sorted(map(str, report["missing_keys"])):
            raise ModelError(
                f"{folder}: no trained reward model, its weights lack {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}"
            )
        config = self._model.config
        if config.num_labels != 1:
            raise ModelError(f"{folder}: a reward model has one label, this one has {config.num_labels}")
        if not getattr(config, "is_encoder_decoder", False):
            # One conversation at a time, and no padding token: where it equals eos, the library would read the score at
            # the token before the last eos.
            config.pad_token_id = None
        self._longest = min(self._tokenizer.model_max_length, getattr(config, "max_position_embeddings", math.inf))
        takes = signature(self._model.forward).parameters
        self._inputs = [name for name in ("input_ids", "token_type_ids") if name in takes]
        self._model.eval().to(device)

    @torch.no_grad()
    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        """Return the classifier's number for each conversation.

        Raises ValueError for one that is longer than the model reads: a score of a part would be none of the whole.
        """
        return [self._one(messages) for messages in conversations]

    def _one(self, messages: Sequence[Message]) -> float:
        read = self._pair(messages) if not self._tokenizer.chat_template else self._whole(messages)
        length = read["input_ids"].shape[1]
        if length > self._longest:
            raise ValueError(f"a conversation has {length} tokens, the model {self._name} reads {self._longest}")
        taken = {name: read[name].to(self._model.device) for name in self._inputs if name in read}
        return float(self._model(**taken).logits[0, 0])

    def _whole(self, messages: Sequence[Message]) -> Any:
        """Return the conversation as the chat template writes it; an encoder's first token is put before it."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        begin = self._tokenizer.cls_token
        added = begin is not None and not text.startswith(begin)
        return self._encoded(text, add_special_tokens=added)

    def _pair(self, messages: Sequence[Message]) -> Any:
        """Return what came before the last message, and the last message, as two texts with what separates them."""
        *asked, answer = [message["content"] for message in messages]
        return self._encoded("\n\n".join(asked), answer)

    def _encoded(self, *texts: str, **options: Any) -> Any:
        types = "token_type_ids" in self._inputs
        return self._tokenizer(*texts, return_tensors="pt", return_token_type_ids=types, **options)
