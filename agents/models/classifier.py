"""A sequence classifier of one label as a Hugging Face folder: a decoder's layers and one row, `score.weight`, on top.

`transformers` opens it as `AutoModelForSequenceClassification`. It reads the score of each row of a batch at the last
token that is not the padding token of the config. That is the last real token if and only if no conversation ends with
the padding token; where a tokenizer pads with what ends a turn (often its eos), another of its special tokens is named
in what is saved.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...tools.errors import ModelError
from .checkpoint import HEAD, SCORE, WEIGHTS, read_weights, refuse_misfits, shapes_of, weight_shapes, write_json
from .config import ModelConfig, read_json
from .contract import LanguageConfig
from .decoder import Decoder
from .families import FAMILIES
from .folder import copy_tokenizer
from .lora import merged_state

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def is_classifier(folder: str | Path) -> bool:
    """Tell whether a folder holds a classifier of one label, of a family that our decoder runs.

    Raises ModelError for a folder without a config or with torn files.
    """
    path = Path(folder)
    try:
        config = ModelConfig.from_folder(path)
    except ModelError:
        if not (path / "config.json").is_file():
            raise
        return False
    return weight_shapes(path).get(SCORE) == (1, config.hidden_size)


def classifier_outline(folder: str | Path) -> Decoder:
    """Return the layers of a classifier's folder without their weights (they are on the meta device).

    A decoder whose head is tied to the embedding: no other is on file, and none is read. Raises ModelError where names
    or shapes of weights differ from what the config asks for.
    """
    path = Path(folder)
    config = replace(ModelConfig.from_folder(path), tie_word_embeddings=True)
    with torch.device("meta"):
        model = Decoder(config)
    found = weight_shapes(path)
    found.pop(HEAD, None)
    refuse_misfits(path, shapes_of(model) | {SCORE: (1, config.hidden_size)}, found)
    return model.eval()


def load_classifier(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Decoder, Tensor]:
    """Return the layers of a classifier's folder, weights cast to `dtype`, in eval mode, and `score.weight` (1, E).

    A conversation's score is that row times the hidden state of its last token. The row is float32 or wider, as on
    file. Raises ModelError as `classifier_outline` does, and when memory runs out.
    """
    path = Path(folder)
    model = classifier_outline(path)
    model.load_state_dict(read_weights(path, shapes_of(model), dtype, device), assign=True)
    score = read_weights(
        path, {SCORE: (1, model.config.hidden_size)}, torch.promote_types(dtype, torch.float32), device
    )
    return model, score[SCORE]


def save_classifier(model: Decoder, score: Tensor, folder: Path, tokenizer_folder: Path, ends: Collection[int]) -> None:
    """Write the layers of `model` with `score` (1, E) as their head, and the tokenizer of another folder, in place.

    Adapters are merged. `ends` are the ids that a conversation may end with: none of them pads. Where the tokenizer has
    no special token besides, no padding token is named, and `transformers` takes one conversation at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer_folder, folder)
    pad = _pad_apart(folder, ends)
    config = model.config.to_dict() | {
        "architectures": [classifier_name(model.config)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "dtype": str(model.head_weight.dtype).removeprefix("torch."),
        "pad_token_id": pad,
    }
    layers = {name: tensor for name, tensor in merged_state(model).items() if name != HEAD}
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in (layers | {SCORE: score}).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def classifier_name(config: LanguageConfig) -> str:
    """Return the class of transformers that opens a classifier of this family, which is one of our decoder's."""
    return FAMILIES[config.model_type].architecture.replace("ForCausalLM", "ForSequenceClassification")


def _pad_apart(folder: Path, ends: Collection[int]) -> int | None:
    """Return the id of the padding token, none of `ends`; where that is not the tokenizer's own, write it down."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    own = tokenizer.pad_token
    special = [own, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
    fit = (token for token in special if token is not None and tokenizer.convert_tokens_to_ids(token) not in ends)
    pad = next(fit, None)
    if pad != own:
        for file in (folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()):
            write_json(file, read_json(file) | {"pad_token": pad})
    return None if pad is None else int(tokenizer.convert_tokens_to_ids(pad))
