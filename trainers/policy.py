"""The policy's log-probs of a micro-batch: the one forward pass that every loss reads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..agents.models import CausalAttend, Decoder, PrefixAttend, RecordAttend
from .batch import MicroBatch
from .losses import token_logprobs


def policy_logprobs(model: Decoder, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return log-probs and (detached) entropies of the N trainable tokens, each (N,) fp32.

    The prefix that all rows share is computed once; logits exist only where a trainable token is predicted.
    """
    shared, width = len(batch.prefix), batch.ids.shape[1]
    positions = torch.arange(shared, shared + width, device=batch.ids.device)[None]
    if shared:
        record = RecordAttend()
        model(batch.prefix[None], torch.arange(shared, device=batch.ids.device)[None], record)
        hidden = model(batch.ids, positions, PrefixAttend(record))
    else:
        hidden = model(batch.ids, positions, CausalAttend())
    return token_logprobs(hidden[batch.row, batch.column], model.head_weight, batch.targets, batch.temperatures)
