"""The gap between policy and sampler: weights of all kinds by hand, what is logged of it; numbers by token."""

import math

import pytest
import torch

from gymtune.trainers.annotate import correct_gap, gap_metrics, token_numbers
from gymtune.trainers.experience import Experience, experiences_of

FP64 = 1e-12  # two float64 ways to the same number
CAP = 3.0


@pytest.fixture
def far(episode):
    """Four tokens that the policy finds 2, 4, 1/2 and 1 times as likely as the sampler did: 4 times as a sequence."""
    experience = Experience.of(episode((0, [3]), (1, [5, 6]), (0, [4]), (1, [7, 0])), need_logprobs=True)
    ratios = (2.0, 4.0, 0.5, 1.0)
    experience.old_logprobs = [s + math.log(r) for s, r in zip(experience.sampler_logprobs, ratios, strict=True)]
    return experience


@pytest.mark.parametrize(
    ("how", "weights"),
    [
        ("token_truncate", [2.0, CAP, 0.5, 1.0]),
        ("token_mask", [2.0, 0.0, 0.5, 1.0]),
        ("sequence_truncate", [CAP] * 4),
        ("sequence_mask", [0.0] * 4),
    ],
)
def test_weights_by_hand(far, how, weights):
    correct_gap(far, how, CAP)
    assert far.weights == pytest.approx(weights, rel=FP64)


@pytest.mark.parametrize("how", ["sequence_truncate", "sequence_mask"])
def test_below_the_cap_a_sequence_has_its_product(far, how):
    correct_gap(far, how, 5.0)
    assert far.weights == pytest.approx([4.0] * 4, rel=FP64)


@pytest.mark.parametrize("how", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_where_policy_and_sampler_agree_nothing_is_weighed(episode, how):
    experience = Experience.of(episode((0, [3]), (1, [5, 6])), need_logprobs=True)
    correct_gap(experience, how, CAP)
    assert experience.weights == [1.0, 1.0]


def test_an_absurd_gap_stays_finite(far):
    far.old_logprobs = [0.0] * 4
    far.sampler_logprobs = [-900.0] * 4
    for how in ("token_truncate", "sequence_truncate"):
        correct_gap(far, how, CAP)
        assert far.weights == [CAP] * 4


def test_what_is_logged_by_hand(far, episode):
    near = Experience.of(episode((0, [3]), (1, [5])), need_logprobs=True)
    for experience in (far, near):
        correct_gap(experience, "token_truncate", CAP)
    assert gap_metrics([far, near], "token_truncate") == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": 4 * math.log(2) / 5,  # log 2, 2 log 2, log 2, 0 and 0
            "sampling/sampling_logp_difference/max": 2 * math.log(2),
            "sampling/importance_sampling_ratio/min": 0.5,
            "sampling/importance_sampling_ratio/mean": (2 + CAP + 0.5 + 1 + 1) / 5,
            "sampling/importance_sampling_ratio/max": CAP,
        },
        rel=FP64,
    )
    for experience in (far, near):
        correct_gap(experience, "sequence_truncate", CAP)
    assert gap_metrics([far, near], "sequence_truncate")["sampling/importance_sampling_ratio/mean"] == pytest.approx(
        (CAP + 1) / 2, rel=FP64
    )
    assert gap_metrics([], "token_mask") == {}


@pytest.mark.parametrize("most", [1, 6, 1000])
def test_numbers_come_back_to_the_tokens_they_belong_to(episode, most):
    """Whatever the packing: here each token's number is its id."""
    trajectories = [
        episode((0, [3, 4]), (1, [9, 8]), (0, [4]), (1, [7]), name="a"),
        episode((0, [3, 4]), name="silent"),
        episode((0, [3, 4]), (1, [6]), "segment", (0, [2]), (1, [5, 1]), name="two segments"),
        episode((0, [1]), (1, [2]), name="short"),
    ]
    found = token_numbers(
        experiences_of(trajectories, need_logprobs=True), lambda batch: batch.targets, most, torch.device("cpu")
    )
    assert found == [[9, 8, 7], [], [6, 5, 1], [2]]
