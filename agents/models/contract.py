"""What engine and trainers ask of a language model, whoever wrote its layers: `Decoder` and `ForeignModel` give it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self

from torch import Tensor, nn

from ...tools.errors import ModelError
from .decoder import Attend


class LanguageConfig(Protocol):
    """Shape of a model, as far as caches, checks and counts of work need it."""

    @property
    def model_type(self) -> str:
        """The family, as in `config.json`."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids the model takes: 0 to this, exclusive."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Layers, each of which calls its `Attend` once."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Heads of the queries handed to `Attend`."""
        ...

    @property
    def num_key_value_heads(self) -> int:
        """Heads of the keys and values handed to `Attend`."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of a head, the same for queries, keys and values."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence; may be empty."""
        ...

    @property
    def router_aux_loss_coef(self) -> float:
        """What multiplies `LanguageModel.router_loss()` in training."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the Hugging Face config."""
        ...


class LanguageModel(Protocol):
    """A causal language model, an `nn.Module`, whose attention is handed in with each forward pass."""

    @property
    def config(self) -> LanguageConfig:
        """Shape and constants."""
        ...

    @property
    def native(self) -> bool:
        """Whether the layers are our own; otherwise those of transformers, which are slower."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """The (V, E) matrix: `forward(...) @ head_weight.T` are the logits, all of them, with no step between."""
        ...

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend, real: Tensor | None = None) -> Tensor:
        """Return hidden states (B, T, E) after the final norm.

        `ids` is (B, T) int64; `positions` is (B, T) or (1, T) int64, each token's place in its own sequence.
        What a token sees of other tokens, it sees through `attend` and by no other way. `real`, (B, T) bool, names the
        tokens that count in `router_loss`, where some are padding.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., E) to logits (..., V): float32, or float64 for a float64 model."""
        ...

    def checkpoint_layers(self) -> None:
        """Compute layers again in the backward pass from now on. Raises ConfigError where the model cannot."""
        ...

    def router_loss(self) -> Tensor | None:
        """Return the unscaled load-balancing loss of the passes since the last call; None without a router to train."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield every parameter once."""
        ...

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, under the name it has in Hugging Face files."""
        ...

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let every parameter have a gradient, or none."""
        ...

    def train(self, mode: bool = True) -> Self:
        """Say whether the model is being trained. No dropout acts either way: sampler and trainer see one model."""
        ...

    def eval(self) -> Self:
        """Say that the model is not being trained."""
        ...


class HasVocabulary(Protocol):
    """What knows how many ids a model takes: a config, or the facts of a folder."""

    @property
    def vocab_size(self) -> int:
        """Ids the model takes: 0 to this, exclusive."""
        ...


def check_vocabulary(tokenizer_size: int, config: HasVocabulary, where: str) -> None:
    """Raise ModelError when a tokenizer (its size: highest id + 1) has ids that the model's embedding has not."""
    if tokenizer_size > config.vocab_size:
        raise ModelError(
            f"{where}: the tokenizer has {tokenizer_size} tokens, the model's embedding {config.vocab_size}. "
            "Use the tokenizer that the model was trained with."
        )
