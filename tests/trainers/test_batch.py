"""Rows and micro-batches: which token is predicted where, what is refused, what is shared."""

import math
from itertools import chain

import pytest
import torch

from gymtune.agents import Sampling
from gymtune.tools.errors import DataError
from gymtune.trainers import batch as batch_module
from gymtune.trainers.batch import make_rows, micro_batches
from gymtune.trainers.experience import experiences_of

CPU = torch.device("cpu")


def rows_of(*trajectories, advantages=None, need_logprobs=True):
    return make_rows(experiences_of(trajectories, advantages or [1.0] * len(trajectories), need_logprobs=need_logprobs))


def pairs(batch):
    """Return, for each trainable token, the id that stands where it is predicted and its own id."""
    return list(zip(batch.ids[0, batch.source].tolist(), batch.targets.tolist(), strict=True))


@pytest.fixture
def every_fork(monkeypatch):
    """Share every beginning, however little that saves."""
    monkeypatch.setattr(batch_module, "WORTH_A_FORK", 1)


def test_a_row_names_the_places_and_numbers_of_its_sampled_tokens(episode):
    (row,) = rows_of(episode((0, [5, 6]), (1, [7, 8]), (0, [9]), (1, [4])), advantages=[2.5])
    assert row.tokens == [5, 6, 7, 8, 9, 4]
    assert row.places == [2, 3, 5]
    assert row.old_logprobs == [-0.5, -1.0, -1.5]
    assert (row.advantages[0], row.trajectory, row.temperature) == (2.5, 0, 1.0)


def test_each_segment_is_a_row_of_its_trajectory(episode):
    two = episode((0, [5, 6]), (1, [7]), "segment", (0, [8, 9, 5]), (1, [6, 4]))
    first, second = rows_of(two, advantages=[-1.0])
    assert (first.tokens, first.places, first.old_logprobs) == ([5, 6, 7], [2], [-0.5])
    assert (second.tokens, second.places, second.old_logprobs) == ([8, 9, 5, 6, 4], [3, 4], [-1.0, -1.5])
    assert {row.advantages[0] for row in (first, second)} == {-1.0}
    assert {row.trajectory for row in (first, second)} == {0}


def test_what_holds_no_trainable_token_makes_no_row(episode):
    silent = episode((0, [5, 6]))
    half = episode((0, [5, 6]), "segment", (0, [7]), (1, [8]))
    rows = rows_of(silent, half, episode((0, [1]), (1, [2])))
    assert [(row.tokens, row.trajectory) for row in rows] == [([7, 8], 1), ([1, 2], 2)]


def test_targets_are_shifted_once_first_and_last_token_included(episode):
    rows = rows_of(episode((0, [5, 6]), (1, [7, 8]), (0, [9]), (1, [4])))
    (batch,) = micro_batches(rows, 100, CPU)
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9]]  # nothing is predicted at the last token
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert pairs(batch) == [(6, 7), (7, 8), (9, 4)]


def test_a_response_of_length_one(episode):
    (batch,) = micro_batches(rows_of(episode((0, [5]), (1, [7]))), 100, CPU)
    assert pairs(batch) == [(5, 7)]


# --- what is shared -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_fork")
def test_a_shared_beginning_stands_once(episode):
    long, short = episode((0, [5, 6, 7, 8]), (1, [1, 3])), episode((0, [5, 6]), (1, [9, 2]))
    (batch,) = micro_batches(rows_of(long, short), 100, CPU)
    assert batch.ids.tolist() == [[5, 6, 7, 8, 1, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2]]
    assert pairs(batch) == [(8, 1), (1, 3), (6, 9), (9, 2)]  # both answers of the second row hang on the first row's 6


@pytest.mark.usefixtures("every_fork")
def test_what_was_sampled_alike_is_shared_too(episode):
    """Three rows say 8 first; what is predicted there is predicted from one hidden state, for each row apart."""
    same = [episode((0, [5, 6, 7]), (1, [8, end]), name=f"t{end}") for end in (1, 1, 2)]
    (batch,) = micro_batches(rows_of(*same), 100, CPU)
    assert batch.ids.tolist() == [[5, 6, 7, 8]]
    assert pairs(batch) == [(7, 8), (8, 1), (7, 8), (8, 1), (7, 8), (8, 2)]
    assert batch.trajectory.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.usefixtures("every_fork")
def test_beginnings_of_beginnings(episode):
    """Two groups with one system prompt, 1 2 3; it stands once, each group's question once."""
    rows = [
        episode((0, [1, 2, 3, ask, ask]), (1, [10 + i, 20 + i, 0]), name=f"{ask}{i}") for ask in (7, 6) for i in (1, 0)
    ]
    (batch,) = micro_batches(rows_of(*rows), 100, CPU)
    assert batch.ids.tolist() == [[1, 2, 3, 6, 6, 10, 20, 11, 21, 7, 7, 10, 20, 11, 21]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 5, 6, 3, 4, 5, 6, 5, 6]]
    assert batch.trajectory.tolist() == [3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0]


def test_a_fork_is_made_where_it_saves_enough(episode):
    """Two rows that share n tokens save n of them; three save twice that."""
    assert batch_module.WORTH_A_FORK == 16
    for count, prompt, wanted in ((2, 15, 2 * 16), (2, 16, 16 + 2), (3, 7, 3 * 8), (3, 8, 8 + 3)):
        rows = rows_of(*[episode((0, [1] * prompt), (1, [5 + i, 0]), name=f"t{i}") for i in range(count)])
        (batch,) = micro_batches(rows, 1000, CPU)
        assert batch.ids.shape == (1, wanted)


def test_small_forks_below_a_large_one_are_not_made(episode):
    """Four rows share 20 tokens, two of them two more: 20 are shared, by all."""
    rows = [episode((0, [1] * 20), (1, [*said, 0]), name=str(said)) for said in ([5, 6, 7], [5, 6, 8], [9], [4])]
    (batch,) = micro_batches(rows_of(*rows), 1000, CPU)
    assert batch.ids.tolist() == [[1] * 20 + [4, 5, 6, 7, 5, 6, 8, 9]]
    assert batch.positions.tolist() == [[*range(20), 20, 20, 21, 22, 20, 21, 22, 20]]


def test_a_large_fork_below_small_ones_is_made(episode):
    """All three share 2 tokens, two of them 20: the first two are computed twice."""
    rows = [episode((0, [1, 2, *more]), (1, [5, 0])) for more in ([3] * 18 + [4], [3] * 18 + [5], [9])]
    (batch,) = micro_batches(rows_of(*rows), 1000, CPU)
    assert batch.ids.tolist() == [[1, 2, *[3] * 18, 4, 5, 5, 5, 1, 2, 9, 5]]


def test_what_stands_beside_a_token_is_its_own(episode):
    first = episode((0, [5, 6]), (1, [7]), name="a", sampling=Sampling(temperature=0.5))
    second = episode((0, [5]), (1, [8, 9]), name="b", sampling=Sampling(temperature=2.0))
    (batch,) = micro_batches(rows_of(first, second, advantages=[1.0, -2.0]), 100, CPU)
    assert batch.targets.tolist() == [7, 8, 9]
    assert batch.trajectory.tolist() == [0, 1, 1]
    assert batch.temperatures.tolist() == [0.5, 2.0, 2.0]
    assert batch.advantages.tolist() == [1.0, -2.0, -2.0]
    assert batch.old_logprobs.tolist() == [-0.5, -0.5, -1.0]


# --- micro-batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fork", [1, 16])
@pytest.mark.parametrize("limit", [1, 3, 6, 7, 12, 1000])
def test_micro_batches_keep_every_token_once_within_the_limit(episode, limit, fork, monkeypatch):
    monkeypatch.setattr(batch_module, "WORTH_A_FORK", fork)
    rows = rows_of(*[episode((0, list(range(1, n))), (1, [9, 0]), name=f"t{n}") for n in (2, 5, 3, 5, 2)])
    batches = micro_batches(rows, limit, CPU)
    assert sorted(chain.from_iterable(b.trajectory.tolist() for b in batches)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for batch in batches:
        assert batch.ids.shape[1] <= limit or len(batch.trajectory.unique()) == 1


def test_what_is_computed_is_what_counts(episode):
    """A group of 8: 40 tokens of prompt, then 4 each. 40 + 8 * 4 fit in 72; one less makes two parts."""
    rows = rows_of(*[episode((0, [1] * 40), (1, [5 + i, 2, 3, 4, 0]), name=f"t{i}") for i in range(8)])
    assert [batch.ids.shape[1] for batch in micro_batches(rows, 72, CPU)] == [72]
    assert [batch.ids.shape[1] for batch in micro_batches(rows, 71, CPU)] == [40 + 7 * 4, 40 + 4]


def test_a_cut_goes_between_groups(episode):
    """Two groups of 4, 60 tokens each, in packs of 110: the first row of the second would fit in the first pack."""
    rows = [
        episode((0, [ask] * 44), (1, [5 + i, 2, 3, 4, 0]), name=f"{ask}{i}", group=str(ask))
        for ask in (1, 2)
        for i in range(4)
    ]
    assert [batch.ids.shape[1] for batch in micro_batches(rows_of(*rows), 110, CPU)] == [60, 60]


def test_no_rows_make_no_micro_batch():
    assert micro_batches([], 100, CPU) == []


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_mask_of_all_ones_is_refused(episode):
    with pytest.raises(DataError, match=r"trajectory t7: a segment begins with mask 1"):
        rows_of(episode((1, [5, 6]), name="t7"))
    with pytest.raises(DataError, match="a segment begins with mask 1"):
        rows_of(episode((0, [5]), (1, [6]), "segment", (1, [5, 6])), need_logprobs=False)


def test_tokens_that_nobody_sampled_are_for_sft_alone(episode):
    written = episode((0, [5, 6]), (1, [7, 8]), name="t3", agent="scripted", sampling=None)
    written.logprobs[3] = None
    with pytest.raises(DataError, match=r"trajectory t3 \(agent 'scripted'\): token 3 has no log-prob"):
        rows_of(written)
    (row,) = rows_of(written, need_logprobs=False)
    assert row.places == [2, 3]
    assert row.old_logprobs[0] == -0.5
    assert math.isnan(row.old_logprobs[1])


def test_greedy_tokens_are_for_sft_alone(episode):
    greedy = episode((0, [5]), (1, [6]), name="t4", sampling=Sampling(temperature=0.0))
    with pytest.raises(DataError, match="trajectory t4 was sampled greedily"):
        rows_of(greedy)
    assert len(rows_of(greedy, need_logprobs=False)) == 1


def test_sft_reads_the_models_own_log_probs_whatever_the_temperature_of_the_sampler(episode):
    warm = episode((0, [5]), (1, [6]), sampling=Sampling(temperature=0.7))
    assert [row.temperature for row in rows_of(warm)] == [0.7]
    assert [row.temperature for row in rows_of(warm, need_logprobs=False)] == [1.0]
