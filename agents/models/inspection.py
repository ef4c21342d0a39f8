"""What a model folder holds, told by its config and the headers of its weight files: no tensor is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tools.errors import ModelError
from .checkpoint import outline, weight_shapes
from .classifier import classifier_outline, is_classifier
from .config import ModelConfig
from .decoder import Decoder
from .foreign import read_foreign_config
from .foreign_config import longest

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as families of transformers call them


@dataclass(frozen=True, slots=True, eq=False)
class ModelFacts:
    """Family and shape of a model. `experts` is 0 for a dense one; `parameters` counts the numbers in its files.

    `outline` is our decoder without its weights, None where the layers are those of transformers (not `native`): then
    loading alone can tell whether every weight is there.
    """

    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    context: int
    experts: int
    parameters: int
    outline: Decoder | None

    @property
    def native(self) -> bool:
        """Whether our own decoder runs it."""
        return self.outline is not None

    def __str__(self) -> str:
        kind = f"mixture of {self.experts} experts" if self.experts else "dense"
        whose = "" if self.native else ", layers of transformers"
        return (
            f"{self.family}, {kind}, width {self.hidden_size}, {self.layers} layers, {self.heads} heads "
            f"({self.kv_heads} of keys), vocabulary {self.vocab_size}, context {self.context}, "
            f"{self.parameters:,} parameters{whose}"
        )


def inspect_model(folder: str | Path, *, classifier: bool = False) -> ModelFacts:
    """Return what is in a model folder; with `classifier` it may be a reward model of ours, told by its layers.

    Raises ModelError when it is none, when its family or a key of its config is not supported, and when its files are
    torn; for our own decoder also when names or shapes of weights differ from what the config asks for.
    """
    path = Path(folder)
    try:
        config = ModelConfig.from_folder(path)
    except ModelError as own:
        if not (path / "config.json").is_file():
            raise
        try:
            return _foreign(path)
        except ModelError as error:
            raise ModelError(f"{error} (Our own decoder: {own})") from error
    return ModelFacts(
        family=config.model_type,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
        experts=config.num_experts,
        outline=classifier_outline(path) if classifier and is_classifier(path) else outline(path),
        parameters=_count(path),
    )


def _foreign(path: Path) -> ModelFacts:
    text: Any = read_foreign_config(path).get_text_config()
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    return ModelFacts(
        family=str(text.model_type),
        hidden_size=int(text.hidden_size),
        layers=int(text.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        vocab_size=int(text.vocab_size),
        context=longest(text, str(path / "config.json")),
        experts=next((int(count) for key in _EXPERTS if (count := getattr(text, key, None))), 0),
        outline=None,
        parameters=_count(path),
    )


def _count(path: Path) -> int:
    return sum(math.prod(shape) for shape in weight_shapes(path).values())
