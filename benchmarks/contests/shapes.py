"""Models of known shapes with random weights, as folders that both sides open: the same arithmetic, no download."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

from gymtune.agents import Renderer
from gymtune.agents.models import Decoder, ModelConfig, init_model, load_model, save_model
from gymtune.agents.models.init import END, random_decoder
from gymtune.agents.tokenizer_texts import tokenizer_texts
from gymtune.tools.messages import user

from .harness import Settings

_TEXTS_OF = "gymtune/Calculator-v0"


@dataclass(frozen=True)
class Shape:
    """A name and what `config.json` says."""

    name: str
    config: dict[str, Any] = field(hash=False)


SMOLLM2 = Shape(
    "SmolLM2-135M",
    {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rope_theta": 100_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
)  # fmt: skip
MINIMIND = Shape(
    "MiniMind-64M",
    {
        "model_type": "qwen3", "vocab_size": 6400, "hidden_size": 768, "intermediate_size": 2432,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 96,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
)  # fmt: skip
TINY = Shape(
    "tiny",
    {
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
)  # fmt: skip
_QUICK = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
}  # fmt: skip


def folder_of(shape: Shape, settings: Settings) -> Path:
    """Return the folder of a shape, made once a run."""
    folder = settings.scratch / shape.name
    if not folder.exists():
        make_folder(folder, shape.config | (_QUICK if settings.quick else {}))
    return folder


def make_folder(folder: Path, config: dict[str, Any]) -> None:
    """Write model and tokenizer: the tokenizer of our tiny models, its vocabulary filled up to the model's."""
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    init_model(folder, texts=tokenizer_texts(_TEXTS_OF, 300), vocab_size=512, **small)
    eos = fill_vocabulary(folder / "tokenizer.json", config["vocab_size"])[END]
    save_model(random_decoder(ModelConfig.from_dict({**config, "eos_token_id": eos})), folder)


def fill_vocabulary(file: Path, size: int) -> dict[str, int]:
    """Add words (` qaaaa`, ` qaaab`, ...) to a byte-level BPE until it has `size` tokens; return the added tokens' ids.

    Whatever a model with random weights samples is then text that is encoded as it was sampled, nearly: a
    conversation that is rendered again has about as many tokens as it had. Added tokens come last: their ids are
    where the words end, whatever the file says.
    """
    data = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, added = data["model"]["vocab"], data["added_tokens"]
    words = ("Ġq" + "".join(letters) for letters in itertools.product(ascii_lowercase, repeat=4))
    for number in range(len(vocabulary), size - len(added)):
        vocabulary[next(words)] = number
    for number, token in enumerate(added, size - len(added)):
        token["id"] = number
    data["model"]["ignore_merges"] = True  # a word of the vocabulary is one token, though no merges make it
    file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    return {token["content"]: token["id"] for token in added}


def question(renderer: Renderer, tokens: int, seed: int) -> str:
    """Return a user's message with which the prompt has exactly `tokens` tokens. Digits are one token each."""
    bare = len(renderer.prompt([user("")]))
    if tokens < bare:
        raise ValueError(f"a prompt of {tokens} tokens is shorter than the bare template, {bare}")
    rng = Random(seed)
    text = "".join(rng.choice("0123456789") for _ in range(tokens - bare))
    assert len(renderer.prompt([user(text)])) == tokens
    return text


def open_ours(folder: Path) -> tuple[Decoder, Renderer]:
    """Load a folder with gymtune."""
    return load_model(folder), Renderer.from_folder(folder)


def open_peer(folder: Path) -> Any:
    """Load a folder with transformers, fp32; its generation goes on to the length asked for, as ours does."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
