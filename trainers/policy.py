"""The policy's log-probs of a micro-batch: the one forward pass that every loss reads."""

from __future__ import annotations

from torch import Tensor

from ..agents.models.contract import LanguageModel
from .batch import MicroBatch
from .fused_logprob import token_logprobs


def policy_logprobs(model: LanguageModel, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the N trainable tokens, each (N,) fp32; see `token_logprobs`.

    Nothing is padded, what rows share at their beginning is computed once, and logits exist only where a trainable
    token is predicted, a chunk at a time.
    """
    hidden = model(batch.ids, batch.positions, batch.attend).squeeze(0).index_select(0, batch.source)
    return token_logprobs(hidden, model.head_weight, batch.targets, batch.temperatures, entropy_grad=entropy_grad)
