"""The sampler draws from the distribution it says, and its randomness belongs to the sequence alone."""

import math

import pytest
import torch

from gymtune.agents import Sampling
from gymtune.agents.sampler import sample, uniforms

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


def test_greedy_takes_the_largest_with_its_log_prob_at_temperature_one():
    ids, logprobs = sample(LOGITS, [Sampling(temperature=0)], [5], [0])
    assert ids == [0]
    assert logprobs[0] == pytest.approx(math.log(softmax(1.0)[0]), abs=1e-6)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5}, {"top_k": 2}])
def test_log_probs_are_those_of_the_full_softmax_at_the_temperature(cut):
    sampling = Sampling(temperature=0.7, **cut)
    ids, logprobs = sample(LOGITS.expand(50, -1), [sampling] * 50, list(range(50)), [0] * 50)
    p = softmax(0.7)
    assert logprobs == pytest.approx([math.log(p[i]) for i in ids], abs=1e-6)


def test_a_sequence_draws_the_same_whatever_stands_beside_it():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator)
    kinds = [Sampling(), Sampling(temperature=0.5), Sampling(top_p=0.9), Sampling(top_k=5), Sampling(temperature=0)]
    sampling = [kinds[i % 5] for i in range(40)]
    seeds, places = [i * 977 + 1 for i in range(40)], [i % 7 for i in range(40)]
    together = sample(logits, sampling, seeds, places)
    alone = [sample(logits[i : i + 1], sampling[i : i + 1], seeds[i : i + 1], places[i : i + 1]) for i in range(40)]
    assert together[0] == [ids[0] for ids, _ in alone]
    assert together[1] == [logprobs[0] for _, logprobs in alone]
    order = torch.randperm(40, generator=generator).tolist()
    shuffled = sample(logits[order], *([values[i] for i in order] for values in (sampling, seeds, places)))
    assert shuffled[0] == [together[0][i] for i in order]
