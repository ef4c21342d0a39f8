"""Rows and micro-batches: which token is predicted where, what is refused, what is shared."""

import math
from itertools import chain

import pytest
import torch

from gymtune.agents import Sampling
from gymtune.tools.errors import DataError
from gymtune.trainers.batch import make_rows, micro_batches

CPU = torch.device("cpu")


def rows_of(*trajectories, advantages=None, need_logprobs=True):
    return make_rows(trajectories, advantages or [1.0] * len(trajectories), need_logprobs=need_logprobs)


def pairs(batch):
    """Return, for each trainable token, the id that stands where it is predicted and its own id."""
    ids = batch.ids[batch.row, batch.column]
    return list(zip(ids.tolist(), batch.targets.tolist(), strict=True))


def test_a_row_names_the_places_and_numbers_of_its_sampled_tokens(episode):
    (row,) = rows_of(episode((0, [5, 6]), (1, [7, 8]), (0, [9]), (1, [4])), advantages=[2.5])
    assert row.tokens == [5, 6, 7, 8, 9, 4]
    assert row.places == [2, 3, 5]
    assert row.old_logprobs == [-0.5, -1.0, -1.5]
    assert (row.advantage, row.trajectory, row.temperature) == (2.5, 0, 1.0)


def test_each_segment_is_a_row_of_its_trajectory(episode):
    two = episode((0, [5, 6]), (1, [7]), "segment", (0, [8, 9, 5]), (1, [6, 4]))
    first, second = rows_of(two, advantages=[-1.0])
    assert (first.tokens, first.places, first.old_logprobs) == ([5, 6, 7], [2], [-0.5])
    assert (second.tokens, second.places, second.old_logprobs) == ([8, 9, 5, 6, 4], [3, 4], [-1.0, -1.5])
    assert {row.advantage for row in (first, second)} == {-1.0}
    assert {row.trajectory for row in (first, second)} == {0}


def test_what_holds_no_trainable_token_makes_no_row(episode):
    silent = episode((0, [5, 6]))
    half = episode((0, [5, 6]), "segment", (0, [7]), (1, [8]))
    rows = rows_of(silent, half, episode((0, [1]), (1, [2])))
    assert [(row.tokens, row.trajectory) for row in rows] == [([7, 8], 1), ([1, 2], 2)]


def test_targets_are_shifted_once_first_and_last_token_included(episode):
    rows = rows_of(episode((0, [5, 6]), (1, [7, 8]), (0, [9]), (1, [4])))
    (batch,) = micro_batches(rows, 100, CPU)
    assert batch.prefix.tolist() == []
    assert pairs(batch) == [(6, 7), (7, 8), (9, 4)]


def test_a_response_of_length_one(episode):
    (batch,) = micro_batches(rows_of(episode((0, [5]), (1, [7]))), 100, CPU)
    assert pairs(batch) == [(5, 7)]


def test_shared_prefix_stops_short_of_the_token_that_predicts_the_first_answer(episode):
    same = [episode((0, [5, 6, 7]), (1, [8, end]), name=f"t{end}") for end in (1, 2)]  # 8 is shared too
    (batch,) = micro_batches(rows_of(*same), 100, CPU)
    assert batch.prefix.tolist() == [5, 6]
    assert batch.ids.tolist() == [[7, 8, 1], [7, 8, 2]]
    assert pairs(batch) == [(7, 8), (8, 1), (7, 8), (8, 2)]


def test_shared_prefix_ends_where_rows_differ_and_where_one_begins_to_answer(episode):
    long, short = episode((0, [5, 6, 7, 8]), (1, [1])), episode((0, [5, 6]), (1, [7, 2]))
    (batch,) = micro_batches(rows_of(long, short), 100, CPU)
    assert batch.prefix.tolist() == [5]
    assert pairs(batch) == [(8, 1), (6, 7), (7, 2)]
    (batch,) = micro_batches(rows_of(episode((0, [5, 6, 9]), (1, [1])), episode((0, [5, 4, 9]), (1, [1]))), 100, CPU)
    assert batch.prefix.tolist() == [5]


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7, 8]])
def test_equal_rows_keep_their_predictor(episode, prompt):
    rows = rows_of(*[episode((0, prompt), (1, [1, 2]), name=f"t{i}") for i in range(3)])
    (batch,) = micro_batches(rows, 100, CPU)
    assert batch.prefix.tolist() == prompt[:-1]
    assert int(batch.column.min()) == 0
    assert pairs(batch) == [(prompt[-1], 1), (1, 2)] * 3


def test_what_stands_beside_a_token_is_its_own(episode):
    first = episode((0, [5, 6]), (1, [7]), name="a", sampling=Sampling(temperature=0.5))
    second = episode((0, [5]), (1, [8, 9]), name="b", sampling=Sampling(temperature=2.0))
    (batch,) = micro_batches(rows_of(first, second, advantages=[1.0, -2.0]), 100, CPU)
    assert batch.targets.tolist() == [7, 8, 9]
    assert batch.trajectory.tolist() == [0, 1, 1]
    assert batch.temperatures.tolist() == [0.5, 2.0, 2.0]
    assert batch.advantages.tolist() == [1.0, -2.0, -2.0]
    assert batch.old_logprobs.tolist() == [-0.5, -0.5, -1.0]


@pytest.mark.parametrize("limit", [1, 3, 6, 7, 12, 1000])
def test_micro_batches_keep_every_token_once_within_the_limit(episode, limit):
    rows = rows_of(*[episode((0, list(range(1, n))), (1, [9, 0]), name=f"t{n}") for n in (2, 5, 3, 5, 2)])
    batches = micro_batches(rows, limit, CPU)
    lengths = [[len(rows[i].tokens) for i in batch.trajectory.unique().tolist()] for batch in batches]
    assert sorted(chain.from_iterable(lengths)) == sorted(len(row.tokens) for row in rows)
    assert all(len(part) == 1 or max(part) * len(part) <= limit for part in lengths)
    assert sum(len(batch.targets) for batch in batches) == 10


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
