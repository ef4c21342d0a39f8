"""Losses by hand, against slow Python loops, by finite differences, and under every split of a batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gymtune.tools.errors import RunError
from gymtune.trainers.losses import (
    MAX_LOG_RATIO,
    BatchCounts,
    aggregate,
    cispo_token_loss,
    clipped_surrogate,
    grpo_token_loss,
    importance_ratio,
    kl_estimate,
    sft_token_loss,
)

FP32 = 1e-5  # float32 against arithmetic by hand
FP64 = 1e-12  # two float64 ways to the same number
AVERAGINGS = ["token_mean", "sequence_mean", "constant"]
TOKENS = st.lists(st.tuples(*[st.floats(-5, -0.01)] * 2, st.floats(-3, 3)), min_size=1, max_size=12)


def doubles(values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def columns(tokens):
    return [doubles(column) for column in zip(*tokens, strict=True)]


def gradient(loss, *inputs):
    return torch.autograd.grad(loss, inputs, allow_unused=False)


# --- token losses ---------------------------------------------------------------------------------------------------


def test_grpo_by_hand():
    # ratios 1.5, 1.5, 0.5, 0.5, 1.1 with bounds 0.8 and 1.2
    old = torch.full((5,), -2.0)
    new = old + torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log()
    out = grpo_token_loss(new, old, torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0]), 0.2, 0.2)
    # -min(3, 2.4), -min(-3, -2.4), -min(1, 1.6), -min(-1, -1.6), -min(3.3, 3.3)
    assert out.loss.tolist() == pytest.approx([-2.4, 3.0, -1.0, 1.6, -3.3], rel=FP32)
    assert out.ratio.tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5, 1.1], rel=FP32)
    assert out.clip_high.tolist() == [True, False, False, False, False]
    assert out.clip_low.tolist() == [False, False, False, True, False]


def test_grpo_bounds_are_separate():
    old = torch.zeros(2)
    new = torch.tensor([1.25, 0.75]).log()
    out = grpo_token_loss(new, old, torch.tensor([1.0, -1.0]), 0.1, 0.3)
    assert out.loss.tolist() == pytest.approx([-1.25, 0.9], rel=FP32)
    assert (out.clip_low.tolist(), out.clip_high.tolist()) == ([False, True], [False, False])


def test_cispo_by_hand():
    # ratios 8, 5.5, 2 with cap 5: -(5 * 3 * log 0.8), -(5 * -2 * log 0.55), -(2 * -1 * log 0.2)
    new = torch.tensor([0.8, 0.55, 0.2]).log()
    out = cispo_token_loss(new, torch.full((3,), 0.1).log(), torch.tensor([3.0, -2.0, -1.0]), 5.0)
    assert out.loss.tolist() == pytest.approx([-15 * math.log(0.8), 10 * math.log(0.55), 2 * math.log(0.2)], rel=FP32)
    assert out.ratio.tolist() == pytest.approx([8.0, 5.5, 2.0], rel=FP32)
    assert (out.clip_low.tolist(), out.clip_high.tolist()) == ([False] * 3, [True, True, False])


def test_sft_by_hand():
    assert sft_token_loss(torch.tensor([0.5, 0.25]).log()).tolist() == pytest.approx([math.log(2), math.log(4)])


@given(TOKENS, st.floats(0.05, 0.9), st.floats(0.05, 3))
def test_grpo_equals_loop(tokens, low, high):
    expected = []
    for new, old, advantage in tokens:
        ratio = math.exp(new - old)
        expected.append(-min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage))
    new, old, advantages = columns(tokens)
    assert grpo_token_loss(new, old, advantages, low, high).loss.tolist() == pytest.approx(expected, rel=FP64, abs=FP64)


@given(TOKENS, st.floats(0.5, 6))
def test_cispo_equals_loop(tokens, cap):
    expected = [-min(math.exp(new - old), cap) * advantage * new for new, old, advantage in tokens]
    new, old, advantages = columns(tokens)
    assert cispo_token_loss(new, old, advantages, cap).loss.tolist() == pytest.approx(expected, rel=FP64, abs=FP64)


def test_gradients_by_finite_differences():
    torch.manual_seed(0)
    new, old = (-torch.rand(12, dtype=torch.float64) * 3 for _ in range(2))
    advantages = torch.randn(12, dtype=torch.float64)
    new.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: grpo_token_loss(x, old, advantages, 0.2, 0.3).loss, new)
    for how in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, how=how: kl_estimate(x, old, how), new)
    assert torch.autograd.gradcheck(sft_token_loss, new)
    # CISPO holds its weight fixed: finite differences see it only with the weight at r = cap everywhere
    far_below = torch.full_like(old, -9.0)
    assert torch.autograd.gradcheck(lambda x: cispo_token_loss(x, far_below, advantages, 2.0).loss, new)


@pytest.mark.parametrize("loss", ["grpo", "cispo"])
def test_on_policy_gradient_is_that_of_reinforce(loss):
    new = doubles([-1.0, -2.0, -0.5], grad=True)
    advantages = doubles([1.5, -0.5, 2.0])
    if loss == "grpo":
        out = grpo_token_loss(new, new.detach().clone(), advantages, 0.2, 0.2)
    else:
        out = cispo_token_loss(new, new.detach().clone(), advantages, 5.0)
    reinforce = -(advantages * new).sum()
    torch.testing.assert_close(gradient(out.loss.sum(), new), gradient(reinforce, new), rtol=FP64, atol=0)
    assert not (out.clip_low | out.clip_high).any()


def test_clipped_tokens_keep_their_gradient_in_cispo_only():
    old, advantages = doubles([-4.0, -4.0]), doubles([1.0, 2.0])
    new = doubles([-1.0, -4.0], grad=True)  # ratio e^3, above every bound, and 1
    grpo = grpo_token_loss(new, old, advantages, 0.2, 0.2)
    cispo = cispo_token_loss(new, old, advantages, 5.0)
    assert grpo.clip_high.tolist() == cispo.clip_high.tolist() == [True, False]
    assert gradient(grpo.loss.sum(), new)[0].tolist() == pytest.approx([0.0, -2.0], rel=FP64)
    assert gradient(cispo.loss.sum(), new)[0].tolist() == pytest.approx([-5.0, -2.0], rel=FP64)  # -cap A, -r A


@pytest.mark.parametrize("gap", [0.0, 1.0, 500.0, -500.0])
def test_zero_advantage_has_zero_loss_and_gradient(gap):
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    old, zero = new.detach() - gap, torch.zeros(2)
    for out in (grpo_token_loss(new, old, zero, 0.2, 0.2), cispo_token_loss(new, old, zero, 5.0)):
        assert out.loss.abs().tolist() == [0.0, 0.0]
        assert gradient(out.loss.sum(), new)[0].abs().tolist() == [0.0, 0.0]


def test_huge_log_ratios_stay_finite():
    new = torch.tensor([-1.0], requires_grad=True)
    for value in (
        grpo_token_loss(new, torch.tensor([-900.0]), torch.tensor([-1.0]), 0.2, 0.2).loss,
        kl_estimate(new - 900.0, new.detach(), "k3"),
    ):
        assert value.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=FP32)
        assert gradient(value.sum(), new)[0].item() == 0.0


@pytest.mark.parametrize(
    ("given_dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_computed_in_float32_or_wider(given_dtype, computed):
    x, zero = torch.tensor([-1.0], dtype=given_dtype), torch.zeros(1, dtype=torch.int64)
    counts = BatchCounts(1, 1, 1)
    for value in (
        grpo_token_loss(x, x, x, 0.2, 0.2).loss,
        cispo_token_loss(x, x, x, 5.0).loss,
        sft_token_loss(x),
        *(kl_estimate(x, x, how) for how in ("k1", "k2", "k3")),
        *(importance_ratio(x, x, zero, level) for level in ("token", "sequence", "product")),
        *(aggregate(x, zero, counts, how, torch.ones(1)) for how in ("token_mean", "constant")),
    ):
        assert value.dtype == computed


# --- ratios -----------------------------------------------------------------------------------------------------------

LEVELS = ["token", "sequence", "product"]
SEQUENCES = st.lists(st.lists(st.tuples(*[st.floats(-3, -0.01)] * 2), min_size=1, max_size=6), min_size=1, max_size=4)


def slow_ratios(sequences, level):
    found = []
    for tokens in sequences:
        ratios = [math.exp(new - old) for new, old in tokens]
        whole = math.prod(ratios)
        by_level = {"token": ratios, "sequence": [whole ** (1 / len(tokens))] * len(tokens)}
        found += by_level.get(level, [whole] * len(tokens))
    return found


def test_ratios_by_hand():
    # a sequence of ratios 2 and 8, one of 0.5 alone: geometric mean 4, product 16
    old = doubles([0.125, 0.0625, 0.5]).log()
    new, row = doubles([0.25, 0.5, 0.25]).log(), torch.tensor([0, 0, 1])
    assert importance_ratio(new, old, row, "token").tolist() == pytest.approx([2, 8, 0.5], rel=FP64)
    assert importance_ratio(new, old, row, "sequence").tolist() == pytest.approx([4, 4, 0.5], rel=FP64)
    assert importance_ratio(new, old, row, "product").tolist() == pytest.approx([16, 16, 0.5], rel=FP64)


@given(SEQUENCES, st.sampled_from(LEVELS))
def test_ratios_equal_loop(sequences, level):
    new, old = columns([token for tokens in sequences for token in tokens])
    row = torch.arange(len(sequences)).repeat_interleave(torch.tensor([len(tokens) for tokens in sequences]))
    expected = slow_ratios(sequences, level)
    assert importance_ratio(new, old, row, level).tolist() == pytest.approx(expected, rel=FP64)


@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_of_sequences_by_finite_differences(level):
    """With one advantage a sequence, as GSPO and RLOO have it; some ratios are clipped, from either side."""
    torch.manual_seed(1)
    row = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3])
    new, old = (-torch.rand(8, dtype=torch.float64) for _ in range(2))
    advantages = doubles([1.5, -1.0, 0.5, -2.0])[row]

    def loss(x):
        return clipped_surrogate(importance_ratio(x, old, row, level), advantages, 0.2, 0.3).loss.sum()

    out = clipped_surrogate(importance_ratio(new, old, row, level), advantages, 0.2, 0.3)
    assert 0 < (out.clip_low | out.clip_high).sum() < 8
    assert torch.autograd.gradcheck(loss, new.requires_grad_())


def test_each_token_of_a_sequence_takes_its_own_advantage():
    """The mean of the ratios is shared, not the gradient: what one turn earned does not pay for another's tokens."""
    row, old = torch.tensor([0, 0, 0]), doubles([-1.0, -2.0, -0.5])
    new = (old + doubles([0.3, -0.1, 0.1])).requires_grad_()
    ratio = importance_ratio(new, old, row, "sequence")
    grads = gradient(clipped_surrogate(ratio, doubles([1.0, 0.0, -2.0]), 0.5, 0.5).loss.sum(), new)
    assert grads[0].tolist() == pytest.approx([-math.exp(0.1), 0.0, 2 * math.exp(0.1)], rel=FP64)


@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_every_level_is_reinforce(level):
    new, row = doubles([-1.0, -2.0, -0.5], grad=True), torch.tensor([0, 0, 1])
    advantages = doubles([1.5, 1.5, -2.0])
    loss = clipped_surrogate(importance_ratio(new, new.detach().clone(), row, level), advantages, 0.2, 0.2).loss
    # over the tokens of a sequence: their mean for tokens and GSPO, their sum for the product
    share = (loss / doubles([2, 2, 1])).sum()
    weights = doubles([1, 1, 1] if level == "product" else [1 / 2, 1 / 2, 1])
    reinforce = -(advantages * weights * new).sum()
    torch.testing.assert_close(gradient(share, new), gradient(reinforce, new), rtol=FP64, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_of_no_tokens_and_of_absurd_ones(level):
    none = torch.zeros(0, dtype=torch.int64)
    assert importance_ratio(torch.zeros(0), torch.zeros(0), none, level).shape == (0,)
    far = importance_ratio(torch.tensor([500.0, 500.0]), torch.zeros(2), torch.tensor([0, 0]), level)
    assert far.tolist() == pytest.approx([math.exp(MAX_LOG_RATIO)] * 2, rel=FP32)


# --- averaging --------------------------------------------------------------------------------------------------------


def test_averages_by_hand():
    # two trajectories: 1 2 3 and 10; max_tokens 5
    values, sequence, lengths = doubles([1.0, 2.0, 3.0, 10.0]), torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1])
    counts = BatchCounts(tokens=4, sequences=2, max_tokens=5)
    assert aggregate(values, sequence, counts, "token_mean").item() == 16 / 4
    assert aggregate(values, sequence, counts, "sequence_mean", lengths).item() == (2 + 10) / 2
    assert aggregate(values, sequence, counts, "constant").item() == 16 / (2 * 5)


@pytest.mark.parametrize("how", AVERAGINGS)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("shuffled", [False, True])
def test_any_split_and_order_gives_the_same_loss_and_gradient(how, parts, shuffled):
    torch.manual_seed(3)
    lengths = torch.tensor([1, 7, 2, 5, 3, 9, 4, 6])
    sequence = torch.arange(8).repeat_interleave(lengths)
    theta = torch.randn(4, dtype=torch.float64, requires_grad=True)
    features = torch.randn(len(sequence), 4, dtype=torch.float64)
    counts = BatchCounts(len(sequence), 8, 10)

    def share(where):
        return aggregate((features[where] @ theta).tanh(), sequence[where], counts, how, lengths)

    slow = sum(
        (
            (features[sequence == s] @ theta).tanh().sum()
            / {"token_mean": 37, "sequence_mean": 8 * n, "constant": 80}[how]
        )
        for s, n in enumerate(lengths.tolist())
    )
    order = torch.randperm(8) if shuffled else torch.arange(8)
    whole = sum(
        share(torch.cat([torch.nonzero(sequence == s).squeeze(1) for s in members])) for members in order.chunk(parts)
    )
    torch.testing.assert_close(whole, slow, rtol=FP64, atol=FP64)
    torch.testing.assert_close(gradient(whole, theta), gradient(slow, theta), rtol=FP64, atol=FP64)


def test_a_trajectory_in_two_segments_counts_once():
    counts, lengths = BatchCounts(6, 2, 9), torch.tensor([4, 2])
    head = aggregate(doubles([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1]), counts, "sequence_mean", lengths)
    tail = aggregate(doubles([3.0, 6.0, 7.0]), torch.tensor([0, 0, 1]), counts, "sequence_mean", lengths)
    assert (head + tail).item() == pytest.approx(((1 + 2 + 3 + 6) / 4 + (5 + 7) / 2) / 2, rel=FP64)


@pytest.mark.parametrize("how", AVERAGINGS)
def test_no_tokens_give_zero_with_zero_gradient(how):
    theta = torch.ones(3, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    loss = aggregate(theta[none] * 2, none, BatchCounts(0, 0, 0), how, none)
    assert loss.item() == 0.0
    assert gradient(loss, theta)[0].tolist() == [0.0, 0.0, 0.0]


def test_counts_of_the_micro_batch_are_refused():
    with pytest.raises(RunError, match="whole optimizer batch"):
        aggregate(torch.ones(3), torch.zeros(3, dtype=torch.int64), BatchCounts(2, 1, 3), "token_mean")
    with pytest.raises(RunError, match="lengths"):
        aggregate(torch.ones(3), torch.zeros(3, dtype=torch.int64), BatchCounts(3, 1, 3), "sequence_mean")
