"""From trajectories to the rows and micro-batches that a model runs on.

A row is one segment of one trajectory. Which tokens train comes from the response mask; how much, from the
trajectory's advantage. Micro-batches bound memory and change no number: what a token weighs is fixed by the whole
optimizer batch before it is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from ..agents.trajectory import Trajectory
from ..tools.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One segment: its ids, the places of its trainable tokens, their old log-probs (NaN where unknown)."""

    tokens: list[int]
    places: list[int]  # t of every trainable token; its log-prob is read at t - 1
    old_logprobs: list[float]
    advantage: float
    trajectory: int  # index in the optimizer batch
    temperature: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass takes.

    `prefix` (P,): ids that all rows share, computed once. `ids` (B, T): the rest of the rows, padded on the right.
    For the N trainable tokens, flat: `row` and `column` (N,) of the hidden state that predicts each, its id `targets`
    and, per token, `old_logprobs`, `advantages`, `temperatures`, `trajectory`.
    """

    prefix: Tensor
    ids: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    trajectory: Tensor


def make_rows(trajectories: Sequence[Trajectory], advantages: Sequence[float], *, need_logprobs: bool) -> list[Row]:
    """Return the rows of `trajectories` that hold a trainable token, in order.

    With `need_logprobs` a row keeps the temperature it was sampled at, for the ratio must compare like with like;
    without, log-probs are the model's own (temperature 1), whoever wrote the tokens.

    Raises DataError for a trajectory without tokens, a mask of all ones (no prompt predicts the first token), and,
    when `need_logprobs`, for agent tokens that were not sampled or were sampled greedily.
    """
    rows = []
    for index, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True)):
        sampling = trajectory.sampling if need_logprobs else None
        temperature = 1.0 if sampling is None else sampling.temperature
        if temperature == 0:
            raise DataError(
                f"trajectory {trajectory.trajectory_id} was sampled greedily; RL needs a temperature above 0"
            )
        for start, end in trajectory.segments:
            places = [t for t in range(start, end) if trajectory.response_mask[t]]
            if not places:
                continue
            if places[0] == start:
                raise DataError(
                    f"trajectory {trajectory.trajectory_id}: a segment begins with mask 1, so nothing predicts its "
                    "first token; a prompt must come before"
                )
            old = [trajectory.logprobs[t] for t in places]
            if need_logprobs and None in old:
                raise DataError(
                    f"trajectory {trajectory.trajectory_id} (agent {trajectory.agent!r}): token "
                    f"{places[old.index(None)]} has no log-prob, so no policy sampled it; RL needs sampled "
                    "trajectories, SFT takes these"
                )
            rows.append(
                Row(
                    trajectory.tokens[start:end],
                    [t - start for t in places],
                    [float("nan") if value is None else value for value in old],
                    float(advantage),
                    index,
                    temperature,
                )
            )
    return rows


def micro_batches(rows: Sequence[Row], max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Split rows, longest first, so that a micro-batch pads to at most `max_tokens` (one row at least)."""
    ordered = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    batches: list[MicroBatch] = []
    while ordered:
        count = max(1, max_tokens // len(ordered[0].tokens))
        batches.append(_collate(ordered[:count], device))
        ordered = ordered[count:]
    return batches


def _shared_prefix(rows: Sequence[Row]) -> int:
    """Return how many leading tokens all rows share, short of the one that predicts a first trainable token."""
    if len(rows) < 2:
        return 0
    tokens = [row.tokens for row in rows]
    # what the first and the last in dictionary order share, all share
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(min(tokens), max(tokens), strict=False)))
    return min(shared, *(row.places[0] - 1 for row in rows))


def _collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    shared = _shared_prefix(rows)
    width = max(len(row.tokens) for row in rows) - shared
    ids = [[*row.tokens[shared:], *([0] * (width + shared - len(row.tokens)))] for row in rows]

    def flat(values: list[list[float]] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([value for row in values for value in row], dtype=dtype, device=device)

    counts = [len(row.places) for row in rows]
    return MicroBatch(
        prefix=torch.tensor(rows[0].tokens[:shared], dtype=torch.long, device=device),
        ids=torch.tensor(ids, dtype=torch.long, device=device),
        row=flat([[i] * n for i, n in enumerate(counts)], torch.long),
        column=flat([[t - 1 - shared for t in row.places] for row in rows], torch.long),
        targets=flat([[row.tokens[t] for t in row.places] for row in rows], torch.long),
        old_logprobs=flat([row.old_logprobs for row in rows], torch.float32),
        advantages=flat([[row.advantage] * n for row, n in zip(rows, counts, strict=True)], torch.float32),
        temperatures=flat([[row.temperature] * n for row, n in zip(rows, counts, strict=True)], torch.float32),
        trajectory=flat([[row.trajectory] * n for row, n in zip(rows, counts, strict=True)], torch.long),
    )
