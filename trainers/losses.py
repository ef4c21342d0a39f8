"""Losses of single tokens, and how they are averaged over a batch.

Tensors of tokens are flat, `(N,)`, and hold trainable tokens only: there is no padding and no mask, so nothing masked
can leak into a sum. All is computed in float32 (float64 stays float64), whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..tools.errors import RunError
from .config_keys import RatioLevel

MAX_LOG_RATIO = 20.0
"""Log-ratios stop here (a ratio of 5e8): past 88 a float32 `exp` is inf, and inf times an advantage of 0 is NaN."""


@dataclass(frozen=True)
class TokenLosses:
    """`loss` `(N,)` with graph; detached: `ratio` `(N,)`, and where clipping took hold, from below or from above.

    With a critic also its loss, `value_loss` `(N,)` with graph, and where that was clipped. `measured`: numbers by the
    name of a metric, any count of each; the metric is their mean over the step. What is named `mean_X` is logged with
    `min_X` and `max_X`.
    """

    loss: Tensor
    clip_low: Tensor
    clip_high: Tensor
    ratio: Tensor
    value_loss: Tensor | None = None
    value_clipped: Tensor | None = None
    measured: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchCounts:
    """Sizes of the whole optimizer batch: of all micro-batches and all ranks, not of the part at hand.

    `tokens`: trainable tokens. `sequences`: trajectories that have any. `max_tokens`: the constant of Dr. GRPO, the
    most tokens that a trajectory may have.
    """

    tokens: int
    sequences: int
    max_tokens: int


def grpo_token_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float
) -> TokenLosses:
    """Return `-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)` with `r = exp(logprobs - old_logprobs)`.

    PPO's clipped surrogate (arXiv:1707.06347 eq. 7) as used by GRPO (arXiv:2402.03300 eq. 3); two bounds as in DAPO
    (arXiv:2503.14476). All arguments `(N,)`; a token's advantage is that of its trajectory.
    """
    return clipped_surrogate(_ratio(logprobs, old_logprobs.detach()), advantages, epsilon_low, epsilon_high)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float) -> TokenLosses:
    """Return the losses of `grpo_token_loss` from ratios `(N,)` with graph, whatever they are ratios of."""
    advantages = _wide(advantages.detach())
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    ratio = ratio.detach()
    return TokenLosses(
        loss,
        clip_low=(ratio < 1.0 - epsilon_low) & (advantages < 0),
        clip_high=(ratio > 1.0 + epsilon_high) & (advantages > 0),
        ratio=ratio,
    )


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, row: Tensor, level: RatioLevel) -> Tensor:
    """Return for each token `(N,)`, with graph, how much likelier it or its sequence has become; `row`: see TokenBatch.

    "token": `exp(logprobs - old_logprobs)`. "sequence": the geometric mean of these over the sequence, whose gradient
    each token takes alone (GSPO-token, arXiv:2507.18071, 4.3: of a sequence of equal advantages it adds up to GSPO's
    own). "product": their product, the ratio of the sequence's probabilities, with its whole gradient (RLOO in TRL).
    """
    if level == "token":
        return _ratio(logprobs, old_logprobs.detach())
    change = _wide(logprobs) - _wide(old_logprobs.detach())
    sequences = int(row.max()) + 1 if row.numel() else 0
    total = change.new_zeros(sequences).index_add(0, row, change)
    if level == "product":
        return total[row].clamp(max=MAX_LOG_RATIO).exp()
    mean = (total / torch.bincount(row, minlength=sequences))[row].detach()
    return (mean + change - change.detach()).clamp(max=MAX_LOG_RATIO).exp()


def cispo_token_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, epsilon_high: float) -> TokenLosses:
    """Return `-stopgrad(min(r, epsilon_high)) A logprobs`: the weight is capped, no token loses its gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585 eq. 4); `epsilon_high` is the cap itself, as in TRL. All arguments `(N,)`.
    """
    ratio = _ratio(logprobs.detach(), old_logprobs.detach())
    advantages = _wide(advantages.detach())
    loss = -ratio.clamp(max=epsilon_high) * advantages * _wide(logprobs)
    capped = ratio > epsilon_high
    return TokenLosses(loss, clip_low=torch.zeros_like(capped), clip_high=capped, ratio=ratio)


def sft_token_loss(logprobs: Tensor) -> Tensor:
    """Return the negative log-likelihood `(N,)`."""
    return -_wide(logprobs)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, how: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return an estimate `(N,)` of KL(policy || reference) from tokens that the policy sampled.

    With `d = ref - current` (http://joschu.net/blog/kl-approx.html): k1 is `-d`, unbiased, of either sign; k2 is
    `d^2 / 2`, biased, of low variance; k3 is `exp(d) - d - 1`, unbiased and never negative. As losses they differ: in
    expectation the gradient of k1 is 0 and that of k3 is the forward KL(reference || policy)'s, while k2's is the
    gradient of the KL itself (arXiv:2506.09477).
    """
    difference = _wide(ref_logprobs.detach()) - _wide(logprobs)
    if how == "k1":
        return -difference
    if how == "k2":
        return difference.square() / 2
    difference = difference.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def aggregate(
    values: Tensor,
    sequence: Tensor,
    counts: BatchCounts,
    how: Literal["token_mean", "sequence_mean", "constant"],
    lengths: Tensor | None = None,
) -> Tensor:
    """Return a part's share (scalar) of the batch average of `values` `(N,)`; the shares of all parts sum to it.

    "token_mean": sum / tokens (DAPO, CISPO). "sequence_mean": mean over trajectories of the mean over their tokens
    (GRPO). "constant": sum / (sequences * max_tokens) (Dr. GRPO). `sequence` `(N,)` int64 says which trajectory a token
    belongs to (all segments of one alike), `lengths` `(S,)` how many trainable tokens that trajectory has in the whole
    batch; only "sequence_mean" reads them. Without tokens: 0 with gradient 0.

    Raises `RunError` where the part is larger than the counts of the whole, or lengths are missing.
    """
    values = _wide(values)
    if values.numel() > counts.tokens:
        raise RunError(
            f"averaging {values.numel()} tokens of a batch said to have {counts.tokens}: BatchCounts must cover the "
            "whole optimizer batch, not the micro-batch"
        )
    if how == "token_mean":
        return values.sum() / max(counts.tokens, 1)
    if how == "constant":
        return values.sum() / max(counts.sequences * counts.max_tokens, 1)
    if lengths is None:
        raise RunError("averaging 'sequence_mean' needs lengths: the trainable tokens of each trajectory")
    return (values / lengths[sequence]).sum() / max(counts.sequences, 1)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (_wide(logprobs) - _wide(old_logprobs)).clamp(max=MAX_LOG_RATIO).exp()


def _wide(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32, or as it is where it is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
