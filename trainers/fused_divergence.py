"""How far a student's next tokens are from a teacher's, straight from hidden states, a chunk of logits at a time.

As in `fused_logprob` the backward pass makes the logits anew and turns them into their own gradient; only the student
has one. All is summed in float32 (float64 stays float64); logits are rounded where the models' own are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config_keys import DivergenceKind
from .fused_logprob import CHUNK_LOGITS, add_product, chunks, scaled_logits


@dataclass(frozen=True, slots=True)
class Measure:
    """Which divergence of a student's distribution q from a teacher's p, each a softmax of logits / `temperature`.

    forward_kl: KL(p || q), large where the student misses what the teacher says. reverse_kl: KL(q || p), large where
    the student says what the teacher would not. jsd: `b KL(p || m) + (1 - b) KL(q || m)` with `m = b p + (1 - b) q`
    and `b = jsd_beta` (GKD, arXiv:2306.13649 eq. 1): over b it tends to KL(p || q) as b falls to 0, and over 1 - b to
    KL(q || p) as b rises to 1. The gradient is the divergence's own: no factor makes up for the temperature.
    """

    kind: DivergenceKind
    temperature: float = 1.0
    jsd_beta: float = 0.5


@dataclass(frozen=True, slots=True)
class WholeTeacher:
    """A teacher that tells every token apart: the states (N, E) that predict N tokens, and its head (V, E)."""

    hidden: Tensor
    head: Tensor

    @property
    def vocabulary(self) -> int:
        """How many ids it knows."""
        return len(self.head)


@dataclass(frozen=True, slots=True)
class TopTeacher:
    """The K likeliest `ids` (N, K) int64 of a teacher among the first `vocabulary` ones, and their `logprobs`.

    `logprobs` (N, K + 1) has in its last column that of all other ids together; it is (N, K) where there are none. They
    are of one temperature, that at which they are compared.
    """

    ids: Tensor
    logprobs: Tensor
    vocabulary: int


Teacher = WholeTeacher | TopTeacher


def token_divergence(
    hidden: Tensor, head_weight: Tensor, teacher: Teacher, measure: Measure, *, chunk: int | None = None
) -> Tensor:
    """Return the divergence (N,) of the student's distribution from the teacher's at each of N tokens, in float32.

    The student is the softmax of `hidden (N, E) @ head_weight (V, E)^T`, and has the gradient. Where the vocabularies
    are not equally large, both are cut to the ids that they share and normalised anew. With a `TopTeacher`, the ids
    that it does not name are one event for teacher and student alike, which never makes the divergence larger. `chunk`
    tokens at a time; None: as many as `CHUNK_LOGITS` allows for the logits of both.
    """
    head = head_weight[: min(len(head_weight), teacher.vocabulary)]
    most = chunk or max(1, CHUNK_LOGITS // (2 * len(head)))
    divergence: Tensor = _TokenDivergence.apply(hidden, head, teacher, measure, most)  # type: ignore[no-untyped-call]
    return divergence


@torch.no_grad()
def top_teacher(
    teacher: WholeTeacher, k: int, vocabulary: int, temperature: float, *, chunk: int | None = None
) -> TopTeacher:
    """Return what a student of `vocabulary` ids is told of a teacher's distributions: the `k` likeliest of each."""
    count, shared = len(teacher.hidden), min(vocabulary, teacher.vocabulary)
    ids = teacher.hidden.new_empty(count, min(k, shared), dtype=torch.long)
    logprobs = _wide(teacher.hidden.new_empty(count, min(k + 1, shared)))
    for part in chunks(count, chunk or max(1, CHUNK_LOGITS // (2 * shared))):
        whole = _logprobs(teacher.hidden[part], teacher.head[:shared], temperature)
        ids[part] = whole.topk(ids.shape[1]).indices
        logprobs[part] = _told_apart(whole, ids[part], tail=k < shared)
    return TopTeacher(ids, logprobs, shared)


class _TokenDivergence(torch.autograd.Function):
    """Both passes by hand; nothing of the vocabulary's size is kept between them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, teacher: Teacher, measure: Measure, most: int) -> Tensor:
        ctx.save_for_backward(hidden, head)
        ctx.teacher, ctx.measure, ctx.most = teacher, measure, most
        divergence = _wide(hidden.new_empty(len(hidden)))
        for part in chunks(len(hidden), most):
            student, told = _pair(hidden[part], head, teacher, part, measure.temperature)
            events = student if isinstance(teacher, WholeTeacher) else _events(student, teacher, part)
            divergence[part] = _divergence(events, told, measure)
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head = ctx.saved_tensors
        teacher, measure = ctx.teacher, ctx.measure
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=grad.dtype) if ctx.needs_input_grad[1] else None
        for part in chunks(len(hidden), ctx.most):
            student, told = _pair(hidden[part], head, teacher, part, measure.temperature)
            if isinstance(teacher, WholeTeacher):
                slopes = _slopes(student, told, measure)
                of_logits = slopes.addcmul_(student.exp_(), slopes.sum(1, keepdim=True), value=-1)
            else:
                slopes = _slopes(_events(student, teacher, part), told, measure)
                of_logits = _spread(student, teacher.ids[part], slopes)
            product = of_logits.mul_((grad[part] / measure.temperature).unsqueeze(1)).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(product, head, out=grad_hidden[part])
            if grad_head is not None:
                add_product(grad_head, product, hidden[part])
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None


# -- a chunk -----------------------------------------------------------------------------------------------------------


def _pair(hidden: Tensor, head: Tensor, teacher: Teacher, part: slice, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs (n, V) of the student over all ids, and the teacher's over the events that it tells apart."""
    student = _logprobs(hidden, head, temperature)
    if isinstance(teacher, TopTeacher):
        return student, teacher.logprobs[part].to(student.dtype)
    told = _logprobs(teacher.hidden[part], teacher.head[: len(head)], temperature)
    return student, told.to(student.dtype)


def _logprobs(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return the log-softmax (n, V) of logits / temperature."""
    logits = scaled_logits(hidden, head, _wide(hidden.new_full((len(hidden),), temperature)))
    return logits.sub_(logits.logsumexp(1, keepdim=True))


def _events(student: Tensor, teacher: TopTeacher, part: slice) -> Tensor:
    """Return the student's log-probs of the events that the teacher tells apart."""
    return _told_apart(student, teacher.ids[part], tail=teacher.logprobs.shape[1] > teacher.ids.shape[1])


def _told_apart(logprobs: Tensor, ids: Tensor, *, tail: bool) -> Tensor:
    """Return (n, K) log-probs of `ids` (n, K), and with a `tail` (n, K + 1), the last of all others together."""
    named = logprobs.gather(1, ids)
    if not tail:
        return named
    others = logprobs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)  # a sum: 1 - the named ones loses digits
    return torch.cat((named, others), 1)


def _divergence(student: Tensor, teacher: Tensor, measure: Measure) -> Tensor:
    """Return the divergence (n,) of log-probs (n, B) of events that add up to 1."""
    if measure.kind == "forward_kl":
        return _mean(teacher, teacher - student)
    if measure.kind == "reverse_kl":
        return _mean(student, student - teacher)
    beta, mixed = measure.jsd_beta, _mixture(student, teacher, measure.jsd_beta)
    return beta * _mean(teacher, teacher - mixed) + (1 - beta) * _mean(student, student - mixed)


def _slopes(student: Tensor, teacher: Tensor, measure: Measure) -> Tensor:
    """Return the derivative (n, B) of the divergence by the student's log-probs, but for a multiple of its probs.

    Such a multiple has no effect: a softmax does not let all log-probs move by as much.
    """
    if measure.kind == "forward_kl":
        return -teacher.exp()
    if measure.kind == "reverse_kl":
        return student.exp() * (student - teacher)
    mixed = _mixture(student, teacher, measure.jsd_beta)
    return (1 - measure.jsd_beta) * student.exp() * (student - mixed)


def _mean(logprobs: Tensor, values: Tensor) -> Tensor:
    """Return the mean (n,) of values (n, B) of events under their log-probs."""
    mean: Tensor = torch.linalg.vecdot(logprobs.exp(), values)
    return mean


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


def _spread(student: Tensor, ids: Tensor, slopes: Tensor) -> Tensor:
    """Return the gradient (n, V) by the logits, given that by the log-probs of events, `slopes` (n, K or K + 1).

    A named id has its own slope; one of the others the share of the tail's that it has of the tail's probability.
    """
    count, total = ids.shape[1], slopes.sum(1, keepdim=True)
    named = slopes[:, :count] - student.gather(1, ids).exp() * total
    if slopes.shape[1] == count:
        return torch.zeros_like(student).scatter_(1, ids, named)
    others = student.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
    share = (student - others).clamp_(max=0.0).exp_()  # those named are overwritten below
    return share.mul_(slopes[:, count:]).sub_(student.exp() * total).scatter_(1, ids, named)


def _wide(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32, or as it is where it is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
