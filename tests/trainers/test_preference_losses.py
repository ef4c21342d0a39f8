"""The losses of DPO and its kin, by hand and by finite differences; and nothing that a reply may be makes them NaN."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from gymtune.trainers.algorithm import TokenBatch
from gymtune.trainers.preference import CERTAIN, log_odds
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.update_stats import UpdateStats

FP64 = 1e-10  # two float64 ways to the same number
VARIANTS = [
    ("dpo", {"beta": 0.5}),
    ("dpo", {"beta": 0.5, "length_normalized": True}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.1}),
    ("dpo", {"beta": 0.5, "reference_free": True}),
    ("ipo", {"beta": 0.5}),
    ("ipo", {"beta": 0.5, "reference_free": True}),
    ("orpo", {"beta": 0.5}),
    ("simpo", {"beta": 2.0, "simpo_gamma": 0.5}),
    ("simpo", {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.1}),
    ("kto", {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
    ("kto", {"beta": 0.5, "reference_free": True}),
]


def named_by(values):
    return [f"{algo} {' '.join(f'{k}={v}' for k, v in changes.items())}" for algo, changes in values]


variants = pytest.mark.parametrize(("algo", "changes"), VARIANTS, ids=named_by(VARIANTS))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


# --- losses by hand ---------------------------------------------------------------------------------------------------

CHOSEN, CHOSEN_REF = [-1.0, -2.0], [-2.0, -2.5]  # log-ratio 1.5, mean 0.75; mean log-prob -1.5
REJECTED, REJECTED_REF = [-4.0], [-3.5]  # log-ratio -0.5; mean log-prob -4
ODDS = -math.log(math.expm1(1.5)) + math.log(math.expm1(4.0))
BY_HAND = {
    0: -log_sigmoid(0.5 * 2.0),
    1: -log_sigmoid(0.5 * 1.25),
    2: -0.9 * log_sigmoid(1.0) - 0.1 * log_sigmoid(-1.0),
    3: -log_sigmoid(0.5 * (-3.0 + 4.0)),
    4: (1.25 - 1.0) ** 2,
    5: (2.5 - 1.0) ** 2,
    6: 1.5 - 0.5 * log_sigmoid(ODDS),
    7: -log_sigmoid(2.0 * 2.5 - 0.5),
    8: -0.9 * log_sigmoid(4.5) - 0.1 * log_sigmoid(-4.5),
    9: [1.5 * (1 - math.exp(log_sigmoid(0.5 * (1.5 - 0.25)))), 0.5 * (1 - math.exp(log_sigmoid(0.5 * (0.25 + 0.5))))],
    10: [1 - math.exp(log_sigmoid(0.5 * -3.0)), 1 - math.exp(log_sigmoid(0.5 * 4.0))],
}


def token_batch(replies, algo, dtype=torch.float64):
    """Return the tokens of `(log-probs, log-probs of the reference)` replies: good, bad, good, bad, ..."""
    flat = [(a, b, i) for i, (said, ref) in enumerate(replies) for a, b in zip(said, ref, strict=True)]
    logprobs = torch.tensor([a for a, _, _ in flat], dtype=dtype, requires_grad=True)
    reply = torch.tensor([i for _, _, i in flat], dtype=torch.long)
    return TokenBatch(
        logprobs,
        torch.full((len(flat),), math.nan),
        torch.where(reply % 2 == 0, 1.0, -1.0),
        reply,
        reply,
        100 + (reply if algo == "kto" else reply // 2),  # a micro-batch holds some of the batch's units
        torch.tensor([b for _, b, _ in flat], dtype=dtype),
    )


@pytest.fixture
def algorithm(config):
    def make(algo, kl=0.0, **changes):
        made = ALGORITHMS[algo](config(algo, **changes))
        if algo == "kto" and made.asks_reference:
            made.kl = kl
        return made

    return make


@variants
def test_the_loss_of_a_pair_by_hand(algorithm, algo, changes):
    tokens = token_batch([(CHOSEN, CHOSEN_REF), (REJECTED, REJECTED_REF)], algo)
    wanted = BY_HAND[VARIANTS.index((algo, changes))]
    chosen, rejected = wanted if algo == "kto" else (wanted, wanted)
    found = algorithm(algo, kl=0.25, **changes).loss(tokens)
    assert found.loss.tolist() == pytest.approx([chosen, chosen, rejected], abs=FP64)


def test_what_is_measured_of_a_pair_by_hand(algorithm):
    pairs = [(CHOSEN, CHOSEN_REF), (REJECTED, REJECTED_REF), (REJECTED, REJECTED_REF), (CHOSEN, CHOSEN_REF)]
    found = algorithm("dpo", beta=0.5).loss(token_batch(pairs, "dpo")).measured
    assert {name: values.tolist() for name, values in found.items()} == {
        "rewards/chosen": [0.75, -0.25],
        "rewards/rejected": [-0.25, 0.75],
        "rewards/accuracies": [1.0, 0.0],
        "logps/chosen": [-3.0, -4.0],
        "logps/rejected": [-4.0, -3.0],
    }
    tied = algorithm("dpo").loss(token_batch(pairs[:1] * 2, "dpo")).measured
    assert tied["rewards/accuracies"].tolist() == [0.0]
    means = algorithm("simpo").loss(token_batch(pairs, "simpo")).measured
    assert means["rewards/chosen"].tolist() == [-3.0, -8.0]  # beta is 2, of means over tokens
    odds = algorithm("orpo").loss(token_batch(pairs, "orpo")).measured
    assert odds["nll_loss"].tolist() == [1.5, 4.0]
    assert odds["log_odds_chosen"].tolist() == pytest.approx([ODDS, -ODDS], abs=FP64)
    assert odds["log_odds_ratio"].tolist() == pytest.approx([log_sigmoid(ODDS), log_sigmoid(-ODDS)], abs=FP64)
    alone = algorithm("kto", kl=0.25, beta=0.5).loss(token_batch(pairs, "kto")).measured
    assert {name: values.tolist() for name, values in alone.items()} == {
        "kl": [0.25] * 4,
        "rewards/chosen": [0.75, -0.25],
        "rewards/rejected": [-0.25, 0.75],
        "logps/chosen": [-3.0, -4.0],
        "logps/rejected": [-4.0, -3.0],
    }


def test_the_margin_is_the_difference_of_the_means():
    stats = UpdateStats()
    stats.note_measured({"rewards/chosen": torch.tensor([1.0, 2.0, 6.0]), "rewards/rejected": torch.tensor([-1.0])})
    assert stats.metrics()["rewards/margins"] == 4.0
    assert "rewards/margins" not in UpdateStats().metrics()


def test_log_odds_by_hand():
    p = torch.tensor([0.5, 0.25, 0.9], dtype=torch.float64)
    assert log_odds(p.log()).tolist() == pytest.approx([0.0, -math.log(3), math.log(9)], abs=FP64)


def test_orpo_without_a_preference_is_sft_of_the_chosen(algorithm):
    tokens = token_batch([(CHOSEN, CHOSEN_REF), (REJECTED, REJECTED_REF)], "orpo")
    assert algorithm("orpo", beta=0.0).loss(tokens).loss.tolist() == [1.5] * 3


# --- finite differences -----------------------------------------------------------------------------------------------


@variants
def test_gradients_by_finite_differences(algorithm, algo, changes):
    rng = Random(0)
    lengths = [3, 2, 1, 4, 2, 2]
    pairs = [([-2 * rng.random() - 0.1 for _ in range(n)], [-2 * rng.random() for _ in range(n)]) for n in lengths]
    tokens, made = token_batch(pairs, algo), algorithm(algo, kl=0.25, **changes)
    assert torch.autograd.gradcheck(lambda x: made.loss(replace(tokens, logprobs=x)).loss, tokens.logprobs)
    grad = torch.autograd.grad(made.loss(tokens).loss.sum(), tokens.logprobs)[0]
    assert (grad[tokens.advantages > 0] < 0).all()  # what was chosen is to become likelier


@pytest.mark.parametrize("algo", ["dpo", "ipo", "orpo", "simpo", "kto"])
def test_what_was_rejected_is_to_become_less_likely(algorithm, algo):
    tokens = token_batch([([-1.0], [-1.0]), ([-1.0], [-1.0])], algo)
    grad = torch.autograd.grad(algorithm(algo).loss(tokens).loss.sum(), tokens.logprobs)[0]
    assert grad[1] > 0


# --- nothing is NaN ---------------------------------------------------------------------------------------------------

EXTREMES = {
    "one token": [([-1.0], [-1.5]), ([-2.0], [-1.5])],
    "equal": [([-1.0, -2.0], [-1.0, -2.0])] * 2,
    "no token in the rejected": [([-1.0], [-1.0]), ([], [])],
    "no token in the chosen": [([], []), ([-1.0], [-1.0])],
    "certain": [([0.0], [0.0]), ([0.0, 0.0], [-1.0, -1.0])],
    "rounded above certain": [([1e-7], [0.0]), ([1e-7], [0.0])],
    "long odds": [([-90.0] * 200, [-1.0] * 200), ([-1e-4] * 200, [-90.0] * 200)],
    "long odds the right way": [([-1e-4] * 200, [-90.0] * 200), ([-90.0] * 200, [-1.0] * 200)],
    "nothing at all": [],
}


@pytest.mark.parametrize("replies", EXTREMES.values(), ids=EXTREMES)
@variants
def test_nothing_is_nan(algorithm, algo, changes, replies):
    tokens = token_batch(replies, algo, torch.float32)
    found = algorithm(algo, **changes).loss(tokens)
    found.loss.sum().backward()
    assert found.loss.dtype == torch.float32
    assert found.loss.isfinite().all()
    assert tokens.logprobs.grad.isfinite().all()
    assert all(values.isfinite().all() for values in found.measured.values())


def test_odds_of_near_certain_replies_end():
    least = log_odds(torch.tensor([0.0, -CERTAIN, -2 * CERTAIN], dtype=torch.float64))
    assert least[0] == least[1] == pytest.approx(-math.log(math.expm1(CERTAIN)), abs=FP64)
    assert least[2] < least[1]
