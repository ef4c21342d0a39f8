"""The sampler draws from the distribution it says, and its randomness belongs to the sequence alone."""

import math

import pytest
import torch

from gymtune.agents import Sampling
from gymtune.agents.sampler import _draw, sample, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -4.0, 0.5]])
CHI2_999 = {3: 16.27, 4: 18.47, 5: 20.52}  # quantile 0.999 of chi-square, by degrees of freedom
DRAWS = 20_000


def softmax(temperature: float) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in LOGITS[0].tolist()]
    return [weight / sum(weights) for weight in weights]


def draw(sampling: Sampling, logits: torch.Tensor = LOGITS, draws: int = DRAWS) -> list[int]:
    ids, _ = sample(logits.expand(draws, -1), [sampling] * draws, list(range(1, draws + 1)), [0] * draws)
    return ids


def chi_square(ids: list[int], expected: dict[int, float]) -> float:
    assert set(ids) <= expected.keys()
    return sum((ids.count(i) - len(ids) * p) ** 2 / (len(ids) * p) for i, p in expected.items())


def test_uniforms_are_the_stream_of_splitmix64():
    # First outputs of SplitMix64 seeded with 1234567, as in the reference implementation's test values.
    stream = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert uniforms([1234567] * 5, range(5)).tolist() == [(z >> 11) / 2**53 for z in stream]
    assert uniforms([-1], [0]) == uniforms([2**64 - 1], [0])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_draws_follow_the_softmax(temperature):
    expected = dict(enumerate(softmax(temperature)))
    assert chi_square(draw(Sampling(temperature=temperature)), expected) < CHI2_999[5]


def test_draws_along_one_sequence_follow_the_softmax_too():
    ids, _ = sample(LOGITS.expand(DRAWS, -1), [Sampling()] * DRAWS, [7] * DRAWS, list(range(DRAWS)))
    assert chi_square(ids, dict(enumerate(softmax(1.0)))) < CHI2_999[5]


def test_top_k_keeps_the_likeliest_and_renormalises():
    p = softmax(1.0)
    kept = [0, 1, 5, 2]  # by logit: 2, 1, 0.5, 0
    expected = {i: p[i] / sum(p[k] for k in kept) for i in kept}
    assert chi_square(draw(Sampling(top_k=4)), expected) < CHI2_999[3]
    assert set(draw(Sampling(top_k=1), draws=200)) == {0}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert set(draw(Sampling(top_p=0.39), logits, 500)) == {0}
    assert set(draw(Sampling(top_p=0.41), logits, 500)) == {0, 1}
    assert set(draw(Sampling(top_p=0.69), logits, 500)) == {0, 1}
    assert set(draw(Sampling(top_p=0.71), logits, 500)) == {0, 1, 2}
    assert set(draw(Sampling(top_p=1.0), logits, 500)) == {0, 1, 2, 3}
    assert set(draw(Sampling(top_p=0.95, top_k=2), logits, 500)) == {0, 1}


def test_top_p_below_the_likeliest_keeps_it_alone():
    logits = torch.tensor([[0.05, 0.9, 0.05]]).log()
    for p in (1e-9, 0.5, 0.89):
        assert set(draw(Sampling(top_p=p), logits, 300)) == {1}
    assert set(draw(Sampling(top_p=1e-9, min_p=1.0, top_k=3), logits, 300)) == {1}


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    p = softmax(1.0)  # by size: ids 0, 1, 5, 2, 3, 4 with 1, e^-1, e^-1.5, e^-2, e^-3, e^-6 of the first
    kept = [0, 1, 5]
    expected = {i: p[i] / sum(p[k] for k in kept) for i in kept}
    assert chi_square(draw(Sampling(min_p=0.2)), expected) < CHI2_999[3]
    assert set(draw(Sampling(min_p=1.0), draws=200)) == {0}
    equals = torch.tensor([[1.0, 1.0, 0.9]])
    assert set(draw(Sampling(min_p=1.0), equals, 200)) == {0, 1}
    assert set(draw(Sampling(min_p=0.2, top_k=2), draws=500)) == {0, 1}
    # At a temperature of 2 the shares are square roots: e^-1.5 of the last kept, 0.22, and e^-3, 0.05.
    assert set(draw(Sampling(min_p=0.2, temperature=2.0), draws=3000)) == {0, 1, 5, 2, 3}


def sglang(probs: list[float], sampling: Sampling) -> dict[int, float]:
    """What SGLang's own sampler would draw from, written out: sort, cut by rank, by the sum before, by the share."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept, before = {}, 0.0
    for rank, i in enumerate(order):
        if rank < (sampling.top_k or len(probs)) and before <= sampling.top_p:
            kept[i] = probs[i]
        before += probs[i]
    kept = {i: p for i, p in kept.items() if p >= sampling.min_p * probs[order[0]]}
    return {i: p / sum(kept.values()) for i, p in kept.items()}


def test_all_cuts_together_are_those_of_sglang():
    generator = torch.Generator().manual_seed(3)
    for trial in range(40):
        logits = torch.randn(1, 7, generator=generator) * 2
        pick = torch.rand(3, generator=generator).tolist()
        sampling = Sampling(top_k=int(pick[0] * 7), top_p=0.3 + 0.7 * pick[1], min_p=pick[2] * 0.3)
        expected = sglang(logits.softmax(-1)[0].tolist(), sampling)
        seeds = range(trial * 10_000, trial * 10_000 + 4000)
        ids, _ = sample(logits.expand(4000, -1), [sampling] * 4000, seeds, [0] * 4000)
        assert set(ids) <= expected.keys()
        assert all(abs(ids.count(i) / 4000 - p) < 0.04 for i, p in expected.items())


def test_draws_follow_the_softmax_over_a_vocabulary_of_many_blocks():
    """Mass lies in few tokens, far apart, some at the borders of blocks and in the last, incomplete one."""
    logits = torch.full((1, 1000), float("-inf"))
    shares = {0: 0.1, 127: 0.3, 128: 0.2, 640: 0.05, 999: 0.35}
    for i, share in shares.items():
        logits[0, i] = math.log(share)
    assert chi_square(draw(Sampling(), logits), shares) < CHI2_999[4]


def test_the_draw_is_the_inverse_of_the_running_sum():
    """Each uniform number against float64's running sum over the whole row, away from its steps."""
    logits = torch.randn(500, 1000, generator=torch.Generator().manual_seed(0)) * 3
    numbers = torch.from_numpy(uniforms(range(500), [4] * 500))
    cumulative = logits.double().softmax(-1).cumsum(-1)
    ids, _ = sample(logits, [Sampling()] * 500, list(range(500)), [4] * 500)
    clear = ((cumulative - numbers[:, None]).abs().min(-1).values > 1e-6).tolist()
    wanted = (cumulative <= numbers[:, None]).sum(-1).tolist()
    assert sum(clear) > 450
    assert [i for i, c in zip(ids, clear, strict=True) if c] == [i for i, c in zip(wanted, clear, strict=True) if c]


def test_what_is_cut_away_is_never_drawn():
    """Numbers at the very borders between blocks, and the largest there is, with zeros on both sides of them."""
    generator = torch.Generator().manual_seed(0)
    kept = [40, 41, 42, 133, 134, 290, 291, 292]
    probs = torch.zeros(5000, 512)
    probs[:, kept] = 10 ** (-12 * torch.rand(5000, len(kept), generator=generator))
    ends = probs.view(5000, 4, 128).sum(-1).double().cumsum(-1)
    for numbers in (0 * ends[:, 0], ends[:, 0] / ends[:, 3], ends[:, 1] / ends[:, 3], 0 * ends[:, 0] + 1 - 2**-53):
        assert set(_draw(probs, numbers).tolist()) <= set(kept)


def test_greedy_takes_the_first_of_equals():
    ties = torch.tensor([[0.0, 3.0, 3.0, 1.0, 3.0]])
    for size in (5, 5000):  # wide enough for vector units and threads
        logits = torch.nn.functional.pad(ties, (0, size - 5), value=3.0 if size > 5 else 0.0)
        ids, logprobs = sample(logits.expand(3, -1), [Sampling(temperature=0)] * 3, [1, 2, 3], [0, 1, 2])
        assert ids == [1, 1, 1]
        assert logprobs[0] == pytest.approx(-math.log(math.fsum(math.exp(x - 3) for x in logits[0].tolist())), abs=1e-5)


def test_greedy_takes_the_largest_with_its_log_prob_at_temperature_one():
    ids, logprobs = sample(LOGITS, [Sampling(temperature=0)], [5], [0])
    assert ids == [0]
    assert logprobs[0] == pytest.approx(math.log(softmax(1.0)[0]), abs=1e-6)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.3}])
def test_log_probs_are_those_of_the_full_softmax_at_the_temperature(cut):
    sampling = Sampling(temperature=0.7, **cut)
    ids, logprobs = sample(LOGITS.expand(50, -1), [sampling] * 50, list(range(50)), [0] * 50)
    p = softmax(0.7)
    assert logprobs == pytest.approx([math.log(p[i]) for i in ids], abs=1e-6)


def test_a_sequence_draws_the_same_whatever_stands_beside_it():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator)
    cuts = [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"temperature": 0}]
    kinds = [Sampling(), *(Sampling(**cut) for cut in cuts)]
    sampling = [kinds[i % 5] for i in range(40)]
    seeds, places = [i * 977 + 1 for i in range(40)], [i % 7 for i in range(40)]
    together = sample(logits, sampling, seeds, places)
    alone = [sample(logits[i : i + 1], sampling[i : i + 1], seeds[i : i + 1], places[i : i + 1]) for i in range(40)]
    assert together[0] == [ids[0] for ids, _ in alone]
    assert together[1] == [logprobs[0] for _, logprobs in alone]
    order = torch.randperm(40, generator=generator).tolist()
    shuffled = sample(logits[order], *([values[i] for i in order] for values in (sampling, seeds, places)))
    assert shuffled[0] == [together[0][i] for i in order]
