"""Log-probs and entropies without a tensor of all logits, against the plain way, finite differences, and arithmetic."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gymtune.tools.errors import ConfigError
from gymtune.trainers import fused_logprob
from gymtune.trainers.fused_logprob import token_logprobs

FP64 = 1e-12  # two float64 ways to the same number
FP32 = 1e-6  # two float32 ways to the same number
CHUNKS = [1, 3, 4, 7, 99]


def plain(hidden, head, targets, temperature):
    """Return log-probs and entropies with every logit at once, in float32 or wider."""
    logits = F.linear(hidden, head).to(torch.promote_types(hidden.dtype, torch.float32))
    scale = temperature.unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature
    whole = (logits / scale).log_softmax(-1)
    return whole.gather(1, targets.unsqueeze(1)).squeeze(1), -(whole.exp() * whole).sum(-1)


def inputs(tokens, width, vocabulary, dtype=torch.float64, spread=1.0):
    generator = torch.Generator().manual_seed(tokens * 100 + vocabulary)
    hidden, head = (
        (torch.randn(n, width, generator=generator, dtype=torch.float64) * spread).to(dtype).requires_grad_()
        for n in (tokens, vocabulary)
    )
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    temperature = torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.5
    return hidden, head, targets, temperature


class Watch(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


# --- numbers --------------------------------------------------------------------------------------------------------


def test_by_hand():
    # logits 0, log 3: probabilities 1/4, 3/4; at temperature 1/2 the logits double: 1/10, 9/10
    hidden, head = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([0, 1]), torch.tensor([1.0, 0.5]))
    assert logprobs.tolist() == pytest.approx([math.log(1 / 4), math.log(9 / 10)], rel=FP32)
    expected = [-sum(p * math.log(p) for p in pair) for pair in ((0.25, 0.75), (0.1, 0.9))]
    assert entropy.tolist() == pytest.approx(expected, rel=FP32)


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 10), st.sampled_from([1, 2, 6]), st.sampled_from([0.7, 1.0, "each"]))
def test_equals_the_plain_way(tokens, chunk, vocabulary, temperature):
    hidden, head, targets, each = inputs(tokens, 4, vocabulary)
    temperature = each if temperature == "each" else temperature
    expected, expected_entropy = plain(hidden, head, targets, temperature)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature, chunk=chunk)
    assert not entropy.requires_grad
    torch.testing.assert_close(logprobs, expected, rtol=FP64, atol=FP64)
    torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=FP64, atol=FP64)
    weights = torch.linspace(-1, 2, tokens, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), (hidden, head)) for x in (logprobs, expected))
    torch.testing.assert_close(ours, theirs, rtol=FP64, atol=FP64)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_an_entropy_bonus_has_the_gradient_of_the_entropy(chunk):
    hidden, head, targets, temperature = inputs(7, 4, 6)
    weights, others = torch.linspace(-1, 2, 7, dtype=torch.float64), torch.linspace(3, -1, 7, dtype=torch.float64)
    found = []
    for logprobs, entropy in (
        token_logprobs(hidden, head, targets, temperature, entropy_grad=True, chunk=chunk),
        plain(hidden, head, targets, temperature),
    ):
        found.append(torch.autograd.grad(logprobs @ weights + entropy @ others, (hidden, head), retain_graph=True))
        found.append(torch.autograd.grad(entropy @ others, (hidden, head)))
    torch.testing.assert_close(found[0], found[2], rtol=FP64, atol=FP64)
    torch.testing.assert_close(found[1], found[3], rtol=FP64, atol=FP64)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_finite_differences(chunk):
    hidden, head, targets, temperature = inputs(7, 3, 5)

    def both(h, w):
        return token_logprobs(h, w, targets, temperature, entropy_grad=True, chunk=chunk)

    assert torch.autograd.gradcheck(both, (hidden, head))
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, 0.8, chunk=chunk)[0], (hidden, head))


def test_a_second_backward_pass_gives_the_same():
    hidden, head, targets, temperature = inputs(7, 3, 5)
    logprobs, _ = token_logprobs(hidden, head, targets, temperature, chunk=3)
    first = torch.autograd.grad(logprobs.sum(), (hidden, head), retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), (hidden, head))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (1, 6), (4, 1), (0, 6)])
def test_edges(tokens, vocabulary):
    hidden, head, targets, temperature = inputs(tokens, 3, vocabulary)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature, entropy_grad=True)
    assert logprobs.shape == entropy.shape == (tokens,)
    if vocabulary == 1:  # the only token is certain
        assert logprobs.tolist() == entropy.tolist() == [0.0] * tokens
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, head))
    assert all(torch.isfinite(g).all() for g in grads)
    if not tokens or vocabulary == 1:
        assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("block", [1, 100, 2**19])
def test_float32_is_exact_to_float32_with_large_logits(block, monkeypatch):
    """Logits of some 300: entropies and log-probs must not lose what the greatest logit takes of the precision."""
    monkeypatch.setattr(fused_logprob, "BLOCK_LOGITS", block)
    hidden, head, targets, _ = inputs(9, 16, 40, torch.float32, spread=5.0)
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    logits = F.linear(hidden.detach(), head.detach()).double()
    assert logits.max() > 250
    logprobs, entropy = token_logprobs(hidden, head, targets, 20.0, chunk=4)
    wanted, wanted_entropy = plain(*exact, targets, 20.0)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=2 * FP32, atol=2e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=2e-6)
    ours = torch.autograd.grad(logprobs.sum(), (hidden, head))
    theirs = torch.autograd.grad(wanted.sum(), exact)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_give_float32_numbers(dtype):
    """As the plain way does, logits are rounded as the model rounds them, and nothing after them is."""
    hidden, head, targets, temperature = inputs(64, 8, 50, dtype)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature.float(), chunk=4)
    expected, expected_entropy = plain(hidden, head, targets, temperature.float())
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=FP32, atol=FP32)
    torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=FP32, atol=FP32)


def test_the_head_s_gradient_is_summed_in_float32():
    """256 chunks each add 1/2 * 2^-8 to 1/2 * 1: bfloat16 would round every one of them away."""
    hidden = torch.full((257, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[-1] = 1.0  # chunks are taken last to first
    head = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, head, torch.zeros(257, dtype=torch.long), 1.0, chunk=1)
    (grad,) = torch.autograd.grad(logprobs.sum(), head)
    assert grad.dtype == torch.bfloat16
    assert grad.flatten().tolist() == [1.0, -1.0]  # 1/2 (1 + 256 * 2^-8)


# --- what is computed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_is_larger_than_a_chunk_of_logits(entropy_grad):
    """Of 512 tokens and Qwen's vocabulary: 78 million logits in all, of which 128 rows live at once."""
    tokens, width, vocabulary, chunk = 512, 64, 151_936, 128
    hidden, head, targets, _ = inputs(tokens, width, vocabulary, torch.float32, spread=0.1)
    with Watch() as watch:
        logprobs, entropy = token_logprobs(hidden, head, targets, 1.0, entropy_grad=entropy_grad, chunk=chunk)
        (logprobs.sum() + (entropy.sum() if entropy_grad else 0)).backward()
    assert watch.largest == chunk * vocabulary
    assert torch.isfinite(hidden.grad).all()


def test_by_default_a_chunk_is_bounded_whatever_the_vocabulary(monkeypatch):
    monkeypatch.setattr(fused_logprob, "CHUNK_LOGITS", 100)
    hidden, head, targets, _ = inputs(23, 2, 30)
    with Watch() as watch:
        token_logprobs(hidden, head, targets, 1.0)
    assert watch.largest == 90  # 23 tokens in 8 chunks of 2 or 3
    hidden, head, targets, _ = inputs(5, 2, 130)  # even one token is more
    with Watch() as watch:
        token_logprobs(hidden, head, targets, 1.0)
    assert watch.largest == 260  # the head


def test_a_batch_of_one_chunk_makes_its_logits_once(monkeypatch):
    made = []
    whole = fused_logprob.scaled_logits
    monkeypatch.setattr(fused_logprob, "scaled_logits", lambda h, w, s: made.append(len(h)) or whole(h, w, s))
    for chunk, wanted in ((8, [8]), (4, [4, 4, 4])):  # of two chunks the last is kept, the first made again
        hidden, head, targets, _ = inputs(8, 3, 5)
        token_logprobs(hidden, head, targets, 1.0, chunk=chunk)[0].sum().backward()
        assert made == wanted
        made.clear()


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_is_frozen_gets_no_gradient(frozen):
    hidden, head, targets, _ = inputs(6, 3, 5)
    (hidden if frozen == "hidden" else head).requires_grad_(False)
    token_logprobs(hidden, head, targets, 1.0, chunk=4)[0].sum().backward()
    expected = plain(hidden, head, targets, 1.0)[0]
    free = head if frozen == "hidden" else hidden
    assert (hidden if frozen == "hidden" else head).grad is None
    torch.testing.assert_close(free.grad, torch.autograd.grad(expected.sum(), free)[0], rtol=FP64, atol=FP64)


def test_without_grad():
    with torch.no_grad():
        hidden, head, targets, _ = inputs(9, 4, 5)
        logprobs, entropy = token_logprobs(hidden, head, targets, 1.0, chunk=2)
    assert logprobs.shape == (9,)
    assert not logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, torch.tensor([1.0, 0.0])])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ConfigError, match="temperature must be positive"):
        token_logprobs(torch.ones(2, 1), torch.ones(2, 1), torch.tensor([0, 1]), temperature)
