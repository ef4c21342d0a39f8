"""Divergences of a student from a teacher, against their definitions, autograd and finite differences."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymtune.trainers import fused_divergence
from gymtune.trainers.fused_divergence import Measure, TopTeacher, WholeTeacher, token_divergence, top_teacher

FP64 = 1e-12  # two float64 ways to the same number
FP32 = 1e-6  # two float32 ways to the same number
NEAR_LIMIT = 1e-2  # a Jensen-Shannon divergence with beta 1e-6 from its end of the scale
KINDS = ["forward_kl", "reverse_kl", "jsd"]
CHUNKS = [1, 3, 4, 99]


def inputs(tokens=5, vocabulary=6, larger=0, dtype=torch.float64, spread=1.0):
    """Return the student's states and head, with gradient, and a teacher of another width."""
    generator = torch.Generator().manual_seed(tokens * 100 + vocabulary)

    def made(*shape):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype)

    hidden, head = made(tokens, 4).requires_grad_(), made(vocabulary, 4).requires_grad_()
    return hidden, head, WholeTeacher(made(tokens, 7), made(vocabulary + larger, 7))


def probabilities(hidden, head, temperature, vocabulary):
    """Return the softmax of each row as lists, from the definition."""
    rows = []
    for logits in (hidden.double() @ head[:vocabulary].double().T / temperature).tolist():
        weights = [math.exp(x) for x in logits]
        rows.append([weight / sum(weights) for weight in weights])
    return rows


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def defined(p, q, measure):
    """Return the divergence of student `q` from teacher `p`, by the formulas of the docstring."""
    b = measure.jsd_beta
    mixed = [b * x + (1 - b) * y for x, y in zip(p, q, strict=True)]
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: b * kl(p, mixed) + (1 - b) * kl(q, mixed),
    }[measure.kind]()


def bucketed(p, q, k):
    """Return both with the ids that are not among the k likeliest of `p` added up."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    return [[x[i] for i in order[:k]] + [sum(x[i] for i in order[k:])] * (k < len(p)) for x in (p, q)]


def plain(hidden, head, teacher, measure, k=None):
    """Return the divergences (N,) with every logit at once, for autograd to differentiate."""
    shared = min(len(head), len(teacher.head))
    q = (hidden @ head[:shared].T / measure.temperature).softmax(1)
    p = (teacher.hidden @ teacher.head[:shared].T / measure.temperature).softmax(1)
    if k is not None:
        top = p.topk(min(k, shared)).indices
        p, q = (torch.cat((x.gather(1, top), x.scatter(1, top, 0.0).sum(1, keepdim=True)), 1) for x in (p, q))
        if k >= shared:
            p, q = p[:, :-1], q[:, :-1]
    b = measure.jsd_beta
    mixed = b * p + (1 - b) * q
    return {
        "forward_kl": lambda: (p * (p / q).log()).sum(1),
        "reverse_kl": lambda: (q * (q / p).log()).sum(1),
        "jsd": lambda: (b * p * (p / mixed).log() + (1 - b) * q * (q / mixed).log()).sum(1),
    }[measure.kind]()


def told(teacher, student, measure, k):
    return teacher if k is None else top_teacher(teacher, k, len(student), measure.temperature)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_by_hand():
    """Teacher 1/4, 3/4; student 1/2, 1/2."""
    hidden, head = torch.ones(1, 1), torch.zeros(2, 1)
    teacher = WholeTeacher(torch.ones(1, 1), torch.tensor([[0.0], [math.log(3)]]))
    found = {kind: token_divergence(hidden, head, teacher, Measure(kind)).item() for kind in KINDS}
    assert found["forward_kl"] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=FP32)
    assert found["reverse_kl"] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=FP32)
    of_teacher = 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    of_student = 0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)
    assert found["jsd"] == pytest.approx((of_teacher + of_student) / 2, rel=FP32)


@pytest.mark.parametrize("k", [None, 1, 2, 5, 6, 99])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition(kind, temperature, k):
    measure = Measure(kind, temperature, 0.3)
    hidden, head, teacher = inputs()
    found = token_divergence(hidden, head, told(teacher, head, measure, k), measure)
    pairs = zip(
        probabilities(teacher.hidden, teacher.head, temperature, 6),
        probabilities(hidden, head, temperature, 6),
        strict=True,
    )
    wanted = [defined(*((p, q) if k is None else bucketed(p, q, k)), measure) for p, q in pairs]
    assert found.tolist() == pytest.approx(wanted, abs=FP64)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 6), st.sampled_from(KINDS), st.sampled_from([None, 1, 3, 6]), st.integers(1, 7),
    st.sampled_from([-2, 0, 3]),
)  # fmt: skip
def test_the_gradient_is_that_of_autograd(tokens, kind, k, chunk, larger):
    """Of teachers with fewer, as many and more ids than the student; each token with a slope of its own."""
    measure = Measure(kind, 1.5, 0.2)
    hidden, head, teacher = inputs(tokens, larger=larger)
    found = token_divergence(hidden, head, told(teacher, head, measure, k), measure, chunk=chunk)
    wanted = plain(hidden, head, teacher, measure, k)
    torch.testing.assert_close(found, wanted, rtol=FP64, atol=FP64)
    weights = torch.linspace(-1, 2, tokens, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), (hidden, head)) for x in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=FP64, atol=FP64)


@pytest.mark.parametrize("k", [None, 2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences(kind, k):
    measure = Measure(kind, 0.8, 0.4)
    hidden, head, teacher = inputs()
    source = told(teacher, head, measure, k)
    assert torch.autograd.gradcheck(lambda h, w: token_divergence(h, w, source, measure, chunk=2), (hidden, head))


# -- what a divergence is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_the_teacher_is_at_zero_and_stays(kind, k, dtype):
    hidden, head, _ = inputs(dtype=dtype, spread=3.0)
    teacher, measure = WholeTeacher(hidden.detach(), head.detach()), Measure(kind)
    found = token_divergence(hidden, head, told(teacher, head, measure, k), measure)
    tolerance = FP32 if dtype == torch.float32 else FP64
    assert found.abs().max() <= tolerance
    assert max(g.abs().max() for g in torch.autograd.grad(found.sum(), (hidden, head))) <= 10 * tolerance


def test_directions_are_told_apart():
    """The teacher is sure of id 0, the student of nothing: to miss little and to say what the teacher never would."""
    hidden, head = torch.ones(1, 1), torch.zeros(3, 1)
    teacher = WholeTeacher(torch.ones(1, 1), torch.tensor([[10.0], [0.0], [0.0]]))
    forward, reverse = (token_divergence(hidden, head, teacher, Measure(kind)).item() for kind in KINDS[:2])
    assert forward == pytest.approx(math.log(3), abs=0.01)
    assert reverse == pytest.approx(20 / 3 - math.log(3), abs=0.01)


def test_ends_of_the_jensen_shannon_scale():
    hidden, head, teacher = inputs()
    forward, reverse = (token_divergence(hidden, head, teacher, Measure(kind)) for kind in KINDS[:2])
    low, high = (token_divergence(hidden, head, teacher, Measure("jsd", jsd_beta=b)) for b in (1e-6, 1 - 1e-6))
    torch.testing.assert_close(low / 1e-6, forward, rtol=NEAR_LIMIT, atol=0)
    torch.testing.assert_close(high / 1e-6, reverse, rtol=NEAR_LIMIT, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_more_ids_told_apart_never_make_it_smaller_and_all_of_them_are_the_whole(kind):
    hidden, head, teacher = inputs(vocabulary=9)
    measure = Measure(kind)
    by_k = [token_divergence(hidden, head, told(teacher, head, measure, k), measure) for k in range(1, 10)]
    assert all((more >= less - FP64).all() for less, more in pairwise(by_k))
    assert (by_k[0] < by_k[-1] - 0.01).all()
    torch.testing.assert_close(by_k[-1], token_divergence(hidden, head, teacher, measure), rtol=FP64, atol=FP64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_teacher_is_cut_to_what_the_student_knows(kind):
    hidden, head, teacher = inputs(larger=4)
    cut = WholeTeacher(teacher.hidden, teacher.head[:6])
    measure = Measure(kind)
    for k in (None, 2):
        left, right = (token_divergence(hidden, head, told(t, head, measure, k), measure) for t in (teacher, cut))
        assert torch.equal(left, right)
    assert int(top_teacher(teacher, 10, 6, 1.0).ids.max()) < 6


# -- floating point and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind):
    hidden, head, teacher = inputs(tokens=7)
    measure, found = Measure(kind), []
    for chunk in CHUNKS:
        value = token_divergence(hidden, head, teacher, measure, chunk=chunk)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), (hidden, head))))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=FP64, atol=FP64)


def test_both_passes_make_logits_chunk_by_chunk(monkeypatch):
    hidden, head, teacher = inputs(tokens=7)
    made, whole = [], fused_divergence.scaled_logits
    monkeypatch.setattr(fused_divergence, "scaled_logits", lambda h, w, s: made.append(len(h)) or whole(h, w, s))
    token_divergence(hidden, head, teacher, Measure("forward_kl"), chunk=3).sum().backward()
    assert len(made) == 12  # three chunks, two models, two passes
    assert max(made) == 3


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_nan_where_both_are_sure_of_other_ids(kind, k):
    """Logits of a thousand: probabilities that float32 cannot hold, and a tail that weighs nothing."""
    hidden, head, teacher = inputs(vocabulary=8, dtype=torch.float32, spread=30.0)
    measure = Measure(kind, 0.5)
    found = token_divergence(hidden, head, told(teacher, head, measure, k), measure)
    assert torch.isfinite(found).all()
    assert found.max() > 1 or kind == "jsd"
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(found.sum(), (hidden, head)))


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_weights_give_float32_numbers(kind):
    hidden, head, teacher = inputs(tokens=64, vocabulary=50, dtype=torch.bfloat16)
    found = token_divergence(hidden, head, teacher, Measure(kind))
    logits = [(h @ w.T).double() for h, w in ((hidden.detach(), head.detach()), (teacher.hidden, teacher.head))]
    exact = [(torch.eye(50, dtype=torch.float64), x) for x in logits]  # logits as they were rounded
    wanted = token_divergence(exact[0][1], exact[0][0], WholeTeacher(exact[1][1], exact[1][0]), Measure(kind))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(found.sum(), (hidden, head)))


def test_the_teacher_has_no_gradient():
    hidden, head, teacher = inputs()
    teacher.hidden.requires_grad_()
    teacher.head.requires_grad_()
    token_divergence(hidden, head, teacher, Measure("jsd")).sum().backward()
    assert teacher.hidden.grad is None
    assert teacher.head.grad is None
    assert not top_teacher(teacher, 2, 6, 1.0).logprobs.requires_grad


def test_no_tokens():
    hidden, head, teacher = inputs(tokens=0)
    for k in (None, 2):
        found = token_divergence(hidden, head, told(teacher, head, Measure("jsd"), k), Measure("jsd"))
        assert found.shape == (0,)
        assert (torch.autograd.grad(found.sum(), head)[0] == 0).all()


def test_a_top_teacher_keeps_what_it_was_told():
    top = top_teacher(WholeTeacher(torch.ones(1, 1), torch.tensor([[0.0], [2.0], [1.0], [0.0]])), 2, 4, 1.0)
    total = 2 + math.e + math.e**2
    assert isinstance(top, TopTeacher)
    assert top.ids.tolist() == [[1, 2]]
    wanted = [math.e**2 / total, math.e / total, 2 / total]
    assert top.logprobs.exp().tolist()[0] == pytest.approx(wanted, rel=FP32)
