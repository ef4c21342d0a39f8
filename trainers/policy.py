"""The policy's log-probs of a micro-batch: the one forward pass that every loss reads."""

from __future__ import annotations

from torch import Tensor

from ..agents.models.contract import LanguageModel
from .batch import MicroBatch
from .fused_logprob import token_logprobs


def hidden_states(model: LanguageModel, batch: MicroBatch) -> Tensor:
    """Return the hidden states (N, E) from which the N trainable tokens are predicted.

    Nothing is padded, and what rows share at their beginning is computed once.
    """
    return model(batch.ids, batch.positions, batch.attend).squeeze(0).index_select(0, batch.source)


def policy_logprobs(
    model: LanguageModel, batch: MicroBatch, *, entropy_grad: bool = False, vocabulary: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the N trainable tokens, each (N,) fp32; see `token_logprobs`.

    Logits exist only where a trainable token is predicted, a chunk at a time; those of the first `vocabulary` ids, or
    of all.
    """
    hidden, head = hidden_states(model, batch), model.head_weight[:vocabulary]
    return token_logprobs(hidden, head, batch.targets, batch.temperatures, entropy_grad=entropy_grad)


def logprobs_of(
    model: LanguageModel, hidden: Tensor, batch: MicroBatch, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Return what `policy_logprobs` does, from the hidden states (N, E)."""
    return token_logprobs(hidden, model.head_weight, batch.targets, batch.temperatures, entropy_grad=entropy_grad)
