"""Make a tiny model from scratch: a tokenizer trained on given texts, a chat template and random weights.

What it writes is a Hugging Face folder like any other, so everything learns, is tested and is served on a laptop
by the path that a downloaded model takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from ...tools.errors import ModelError
from .checkpoint import save_model, write_json
from .config import ModelConfig
from .decoder import Decoder
from .folder import new_folder

PAD, END = "<|endoftext|>", "<|im_end|>"
SPECIAL = (PAD, "<|im_start|>", END)
"""Tokens that only template and sampler write; decoding may skip them."""

MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens that are part of what the model says: one token each, always decoded."""

_BYTES = 256


def init_model(  # noqa: PLR0913 - the shape of a model, spelled out with its defaults
    folder: str | Path,
    *,
    texts: Iterable[str],
    hidden_size: int = 128,
    num_hidden_layers: int = 3,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    intermediate_size: int = 384,
    vocab_size: int = 512,
    max_position_embeddings: int = 1024,
    seed: int = 0,
) -> None:
    """Write a Qwen3-type model with random weights and a tokenizer trained on `texts`.

    `vocab_size` is the most there can be; few texts give fewer tokens. The same arguments give the same bytes.
    The folder appears whole or not at all. Raises ModelError when it is there and not empty, or on a wrong size.
    """
    if num_attention_heads < 1 or hidden_size % num_attention_heads:
        raise ModelError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_attention_heads}.")
    with new_folder(Path(folder)) as aside:
        tokenizer = train_tokenizer(texts, vocab_size)
        config = ModelConfig.from_dict(
            {
                "model_type": "qwen3",
                "vocab_size": tokenizer.get_vocab_size(),
                "hidden_size": hidden_size,
                "intermediate_size": intermediate_size,
                "num_hidden_layers": num_hidden_layers,
                "num_attention_heads": num_attention_heads,
                "num_key_value_heads": num_key_value_heads,
                "head_dim": hidden_size // num_attention_heads,
                "max_position_embeddings": max_position_embeddings,
                "tie_word_embeddings": True,
                "eos_token_id": tokenizer.token_to_id(END),
            },
            where="init_model",
        )
        save_model(random_decoder(config, seed), aside)
        _save_tokenizer(tokenizer, aside, max_position_embeddings)


def random_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """Return a decoder with random weights, the same for the same seed; the global RNG is left alone.

    Matrices are normal with deviation sqrt(2 / (5 * width)) ("small init", Nguyen & Salazar, arXiv:1910.05895): 0.02
    at width 1024, and wide enough for a model of width 128 to learn to copy at all. Those that write into the
    residual stream are divided by sqrt(2 * layers), so that its variance does not grow with depth. Norms are 1.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    small = math.sqrt(2 / (5 * config.hidden_size))
    residual = small / math.sqrt(2 * config.num_hidden_layers)
    for name, weight in decoder.named_parameters():
        if weight.dim() == 1:
            (nn.init.zeros_ if name.endswith("bias") else nn.init.ones_)(weight)
        else:
            std = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else small
            nn.init.normal_(weight, std=std, generator=generator)
    return decoder


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens.

    Every byte is a token, so any text survives a round trip. Digits stay single, for arithmetic on tokens of
    several digits is hard to learn; other text is split into words as GPT-2 does.
    Raises ModelError when `vocab_size` leaves no room for the bytes and the added tokens.
    """
    least = _BYTES + len(SPECIAL) + len(MARKUP)
    if vocab_size < least:
        raise ModelError(f"vocab_size={vocab_size}, wanted at least {least}: every byte and the added tokens.")
    tokenizer = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(MARKUP),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_without_added(texts), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def _without_added(texts: Iterable[str]) -> Iterator[str]:
    """Yield what stands between added tokens: no merge is spent on the inside of `<tool_call>`."""
    added = re.compile("|".join(re.escape(text) for text in SPECIAL + MARKUP))
    for text in texts:
        yield from filter(None, added.split(text))


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write what `AutoTokenizer.from_pretrained` reads, in the form that transformers 4 and 5 open."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
    template = files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
