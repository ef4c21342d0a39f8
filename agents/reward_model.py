"""Reward models behind `ConversationScorer`: classifiers of our own decoder, any other of transformers, and a stub.

A classifier reads the whole conversation, tools included, in its own chat template, or, where it has none, what was
asked and what was answered as a pair of texts. It answers with one number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from ..rewards.functions import ConversationScorer
from ..tools.errors import ConfigError, ModelError
from ..tools.messages import Message
from .loading import check_device
from .models import CausalAttend, is_classifier, load_classifier
from .renderer import Renderer

STUB = "stub"
_BATCH_TOKENS = 8192  # of one forward pass of our decoder, padding included


def load_reward_model(name: str, *, device: str = "cpu") -> ConversationScorer:
    """Return the reward model in the folder `name`, or the stub of that name.

    Our own decoder runs it where it can: a family it knows, one label, a chat template. Raises ConfigError when there
    is no such folder or device, ModelError when it holds no sequence classifier of one label.
    """
    if name == STUB:
        return StubRewardModel()
    if not (Path(name) / "config.json").is_file():
        raise ConfigError(
            f"reward model {name!r}: no such model folder (no config.json in it); a server is http://HOST:PORT/PATH, "
            f"and {STUB!r} needs no weights"
        )
    check_device(device, "float32")
    if is_classifier(name):
        try:
            renderer = Renderer.from_folder(name)
        except ModelError:  # no template: two texts are all that it can read
            return SequenceClassifier(name, device=device)
        return DecoderClassifier(name, renderer, device=device)
    return SequenceClassifier(name, device=device)


class StubRewardModel:
    """Needs no weights: the share of distinct words in the last message, between 0 and 1. For trying the plumbing."""

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        """Score each conversation; an empty last message earns 0."""
        return [self._one(conversation[-1]["content"]) for conversation in conversations]

    def _one(self, text: str) -> float:
        words = text.lower().split()
        return len(set(words)) / len(words) if words else 0.0


class DecoderClassifier:
    """A classifier's folder of a family that our decoder runs: what `gymtune train --algo reward` leaves.

    The score is read at the last token of `renderer.conversation(messages, tools)`, as it was trained.
    """

    def __init__(self, folder: str | Path, renderer: Renderer, *, device: str = "cpu") -> None:
        """Load it in float32; `renderer` is that of its tokenizer. Raises ModelError as `load_classifier` does."""
        self._name, self._renderer = str(folder), renderer
        self._model, self._head = load_classifier(folder, torch.float32, device)
        self._longest = self._model.config.max_position_embeddings

    @torch.no_grad()
    def score(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[str] | None = None
    ) -> list[float | None]:
        """Return the score of each conversation; `tools` is the JSON text of those of each.

        Raises ValueError for one that is longer than the model reads: a score of a part would be none of the whole.
        """
        known = ["[]"] * len(conversations) if tools is None else tools
        rows = [self._renderer.conversation(m, json.loads(t)) for m, t in zip(conversations, known, strict=True)]
        for row in rows:
            _refuse_long(len(row), self._longest, self._name)
        scores: list[float | None] = [None] * len(rows)
        for batch in _batches(rows):
            found = self._scores([rows[index] for index in batch])
            for index, value in zip(batch, found, strict=True):
                scores[index] = value
        return scores

    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        """Return the score of each row of ids. Padded on the right: no token sees padding, and none of it is read."""
        device, longest = self._head.device, max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        hidden = self._model(ids, torch.arange(longest, device=device)[None], CausalAttend())
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        return [float(score) for score in hidden[torch.arange(len(rows), device=device), last] @ self._head[0]]


def _batches(rows: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield the indices of rows of like length, as many as one forward pass takes."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        if batch and len(rows[index]) * (len(batch) + 1) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _refuse_long(length: int, longest: float, name: str) -> None:
    if length > longest:
        raise ValueError(f"a conversation has {length} tokens, the model {name} reads {longest}")


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
    def score(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[str] | None = None
    ) -> list[float | None]:
        """Return the classifier's number for each conversation; `tools` is the JSON text of those of each.

        Raises ValueError for one that is longer than the model reads: a score of a part would be none of the whole.
        """
        known = ["[]"] * len(conversations) if tools is None else tools
        return [self._one(m, json.loads(t)) for m, t in zip(conversations, known, strict=True)]

    def _one(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> float:
        read = self._pair(messages) if not self._tokenizer.chat_template else self._whole(messages, tools)
        _refuse_long(read["input_ids"].shape[1], self._longest, self._name)
        taken = {name: read[name].to(self._model.device) for name in self._inputs if name in read}
        return float(self._model(**taken).logits[0, 0])

    def _whole(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> Any:
        """Return the conversation as the chat template writes it; an encoder's first token is put before it."""
        text = self._tokenizer.apply_chat_template(list(messages), tools=tools or None, tokenize=False)
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
