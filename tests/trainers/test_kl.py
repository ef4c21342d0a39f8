"""Estimates of the KL by hand, and their values and gradients against the exact one of a small vocabulary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gymtune.trainers.losses import kl_estimate

FP32 = 1e-5  # float32 against arithmetic by hand
FP64 = 1e-12  # two float64 ways to the same number
TOKENS = st.lists(st.tuples(*[st.floats(-5, -0.01)] * 2), min_size=1, max_size=12)


def doubles(values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def gradient(loss, *inputs):
    return torch.autograd.grad(loss, inputs, allow_unused=False)


def test_kl_by_hand():
    # policy 1/2, reference 1/4: d = -log 2; log 2, (log 2)^2 / 2, 1/2 + log 2 - 1
    wanted = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": math.log(2) - 0.5}
    for how, value in wanted.items():
        assert kl_estimate(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), how).item() == pytest.approx(
            value, rel=FP32
        )
        assert kl_estimate(torch.tensor([-3.0]), torch.tensor([-3.0]), how).item() == 0.0


@pytest.fixture
def vocabulary():
    """Logits of a policy of four tokens, and the log-probs of a reference."""
    return doubles([0.3, -1.0, 2.0, 0.5], grad=True), doubles([1.0, 0.2, -0.7, 0.1]).log_softmax(0)


def expectation(theta, estimate, sampled=False):
    """Return the mean of `estimate` over the policy's tokens; `sampled`: its probabilities are without gradient."""
    current = theta.log_softmax(0)
    weights = current.detach().exp() if sampled else current.exp()
    return (weights * estimate(current)).sum()


@pytest.mark.parametrize("how", ["k1", "k3"])
def test_unbiased_estimates_against_the_exact_kl(vocabulary, how):
    theta, reference = vocabulary
    exact = expectation(theta, lambda current: current - reference)
    found = expectation(theta, lambda current: kl_estimate(current, reference, how))
    torch.testing.assert_close(found, exact, rtol=FP64, atol=0)
    torch.testing.assert_close(gradient(found, theta), gradient(exact, theta), rtol=FP64, atol=FP64)


def test_k2_is_biased_and_close_where_the_policies_are():
    theta, step = doubles([0.3, -1.0, 2.0, 0.5]), doubles([1.0, -2.0, 0.5, 1.5])
    errors = []
    for size in (1e-1, 1e-2):
        reference = (theta + size * step).log_softmax(0)
        exact = expectation(theta, lambda current, reference=reference: current - reference)
        found = expectation(theta, lambda current, reference=reference: kl_estimate(current, reference, "k2"))
        errors.append(abs(found - exact).item() / exact.item())
    assert errors[0] > 1e-3  # biased ...
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)  # ... by a share that shrinks with the distance


def test_gradients_as_losses_of_sampled_tokens(vocabulary):
    """What a trainer averages has no gradient through the sampling: k1's is 0, k2's the KL's, k3's the other way's."""
    theta, reference = vocabulary
    exact = expectation(theta, lambda current: current - reference)
    other_way = (reference.exp() * (reference - theta.log_softmax(0))).sum()
    wanted = {"k1": torch.zeros(4).double(), "k2": gradient(exact, theta)[0], "k3": gradient(other_way, theta)[0]}
    assert not torch.allclose(wanted["k2"], wanted["k3"], rtol=0.1)  # the reference is chosen to tell them apart
    for how, gradients in wanted.items():
        loss = expectation(theta, lambda current, how=how: kl_estimate(current, reference, how), sampled=True)
        torch.testing.assert_close(gradient(loss, theta)[0], gradients, rtol=FP64, atol=FP64)


@given(TOKENS)
def test_k3_is_never_negative(tokens):
    new, reference = (doubles(column) for column in zip(*tokens, strict=True))
    expected = [math.exp(r - n) - (r - n) - 1 for n, r in tokens]
    value = kl_estimate(new, reference, "k3")
    assert value.tolist() == pytest.approx(expected, rel=FP64, abs=FP64)
    assert (value >= 0).all()
