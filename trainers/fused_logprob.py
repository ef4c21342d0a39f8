"""Log-probs of tokens straight from hidden states: the logits of a chunk live at once, never those of a batch.

The backward pass makes the logits anew, chunk by chunk, and turns them into their own gradient in place. The last
chunk's are kept for it, so that a batch of one chunk pays nothing for this. Softmax, entropy and the head's gradient
are summed in float32 (float64 stays float64); logits are rounded where the model's own `logits` are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..tools.errors import ConfigError

CHUNK_LOGITS = 2**25
"""Logits that live at once: 128 MiB of float32, enough rows for products at full speed."""
BLOCK_LOGITS = 2**19
"""Logits that softmax goes over at once on a CPU: 2 MiB stay in the cache from its first pass to its last."""


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    *,
    entropy_grad: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs `(N,)` of `targets` `(N,)` int64 and the entropy `(N,)` of each distribution, in float32.

    The distribution is the full softmax of `hidden (N, E) @ head_weight (V, E)^T / temperature`, a number or `(N,)`:
    what the sampler drew from. The entropy has no gradient unless `entropy_grad`. `chunk` tokens at a time; None:
    as many as `CHUNK_LOGITS` allows. Raises `ConfigError` for a temperature that is not positive.
    """
    scales = torch.as_tensor(temperature, dtype=torch.float64, device=hidden.device)
    if not bool((scales > 0).all()):
        raise ConfigError(f"temperature must be positive, came {temperature}: greedy tokens have no log-probs to train")
    scales = scales.to(torch.promote_types(hidden.dtype, torch.float32)).expand(len(hidden))
    most = chunk or max(1, CHUNK_LOGITS // len(head_weight))
    logprobs, entropy = _TokenLogprobs.apply(hidden, head_weight, targets, scales, most, entropy_grad)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Both passes by hand. `ctx.kept`: the last chunk's logits, less each row's greatest."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, scales: Tensor, most: int, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, top, log_sum = (scales.new_empty(len(scales)) for _ in range(4))
        logits = None
        for part in chunks(len(hidden), most):
            del logits  # before the next are made
            logits = scaled_logits(hidden[part], head, scales[part])
            _normalise(logits, *(x[part] for x in (targets, top, log_sum, logprobs, entropy)))
        ctx.kept, ctx.most, ctx.entropy_grad = logits, most, entropy_grad
        ctx.save_for_backward(hidden, head, targets, scales, top, log_sum, entropy)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets, scales, top, log_sum, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=scales.dtype) if ctx.needs_input_grad[1] else None
        slopes = [grad / scales, *([entropy, grad_entropy / scales] if ctx.entropy_grad else [])]
        logits, ctx.kept = ctx.kept, None  # overwritten below; a second backward pass makes them anew
        for part in reversed(chunks(len(hidden), ctx.most)):
            if logits is None:
                logits = scaled_logits(hidden[part], head, scales[part]).sub_(top[part].unsqueeze(1))
            _differentiate(logits, *(x[part] for x in (targets, log_sum, *slopes)))
            product, logits = logits.to(hidden.dtype), None
            if grad_hidden is not None:
                torch.mm(product, head, out=grad_hidden[part])
            if grad_head is not None:
                add_product(grad_head, product, hidden[part])
            del product
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None, None


def _normalise(logits: Tensor, targets: Tensor, *results: Tensor) -> None:
    """Fill the results (n,) of a chunk: greatest logit, log of the sum past it, log-prob of the target, entropy.

    Logits (n, V) become less by their greatest: entropy and log-probs lose nothing to large logits.
    """
    for block, target, top, log_sum, logprob, entropy in _blocks(logits, targets, *results):
        top.copy_(block.amax(1, keepdim=True))
        weights = block.sub_(top).exp()
        total = weights.sum(1, keepdim=True)
        log_sum.copy_(total.log())
        logprob.copy_(block.gather(1, target) - log_sum)
        entropy.copy_(log_sum - torch.linalg.vecdot(weights, block).unsqueeze(1) / total)


def _differentiate(logits: Tensor, targets: Tensor, log_sum: Tensor, slopes: Tensor, *of_entropy: Tensor) -> None:
    """Turn the logits (n, V) that `_normalise` left into their gradient, given that of the log-probs, `slopes` (n,).

    d log p(target) / d logits is onehot(target) - p; with `of_entropy`, entropy and its slopes, also
    d entropy / d logits, -p (log p + entropy).
    """
    for block, target, log_total, slope, *rest in _blocks(logits, targets, log_sum, slopes, *of_entropy):
        block.sub_(log_total)
        factor = torch.addcmul(slope, block + rest[0], rest[1]) if rest else slope
        block.exp_().mul_(-factor).scatter_add_(1, target, slope)


def chunks(count: int, most: int) -> list[slice]:
    """Cut 0 .. count into as few slices as hold at most `most` each, all about equally long."""
    parts = -(-count // most)
    return [slice(a, b) for a, b in pairwise(count * i // max(parts, 1) for i in range(parts + 1))]


def _blocks(logits: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of a few rows of `logits` (n, V) with those of the columns (n,) as (n, 1).

    All rows at once where the cost of launching a kernel is more than that of memory: anywhere but on a CPU.
    """
    rows = max(1, BLOCK_LOGITS // logits.shape[1]) if logits.is_cpu else len(logits)
    return zip(*(torch.split(x, rows) for x in (logits, *(column.unsqueeze(1) for column in columns))), strict=True)


def scaled_logits(hidden: Tensor, head: Tensor, scales: Tensor) -> Tensor:
    """Return the logits (n, V) of states (n, E), each row over its scale (n,), in the dtype of the scales."""
    return F.linear(hidden, head).to(scales.dtype).div_(scales.unsqueeze(1))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left^T @ right` to `total`; a product of narrower numbers is rounded, its sum over chunks is not."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total.add_(left.T @ right)
