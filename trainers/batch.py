"""From trajectories to the rows and micro-batches that a model runs on.

A row is one segment of one trajectory. Which tokens train comes from the response mask; how much, from
its advantages. Micro-batches bound memory and change no number: what a token weighs is fixed by the whole
optimizer batch before it is split.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

import torch
from torch import Tensor

from .attention import PackedAttend, Piece
from .experience import Experience

WORTH_A_FORK = 16
"""Tokens that sharing a beginning must save: each length of beginning costs one more call of attention in a layer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One segment: its ids, the places of its trainable tokens, and a number of each (see `Experience`)."""

    tokens: list[int]
    places: list[int]  # t of every trainable token; its log-prob is read at t - 1
    old_logprobs: list[float]
    weights: list[float]
    advantages: list[float]
    ref_logprobs: list[float]  # NaN where no reference was asked
    values: list[float]  # NaN without a critic, as are the returns
    returns: list[float]
    unit: int  # see `Experience`; below 0, and its own, where there is none
    trajectory: int  # index in the optimizer batch
    first: int  # its first trainable token, counted among those of the trajectory
    temperature: float

    @property
    def teaches(self) -> bool:
        """Whether any token has an advantage; a policy's loss is without gradient otherwise."""
        return any(self.advantages)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass takes: a stream of T tokens without padding, rows behind one another.

    A row that begins as the one before it adds only what is new. `rows` are in the order of the tokens; `ids` and
    `positions` are (1, T), a position being the token's place in its row; `attend` knows which tokens a token sees. For
    the N trainable tokens, flat (N,): `source`, where in the stream the hidden state stands that predicts each, its id
    `targets` and, per token, `old_logprobs`, `weights`, `advantages`, `ref_logprobs`, `values`, `returns`,
    `temperatures`; `row` (a segment, counted in this micro-batch), `trajectory` and `unit` (counted in the optimizer
    batch) say whose it is.
    """

    rows: Sequence[Row]
    ids: Tensor
    positions: Tensor
    attend: PackedAttend
    source: Tensor
    targets: Tensor
    old_logprobs: Tensor
    weights: Tensor
    advantages: Tensor
    ref_logprobs: Tensor
    values: Tensor
    returns: Tensor
    temperatures: Tensor
    row: Tensor
    trajectory: Tensor
    unit: Tensor


def make_rows(experiences: Sequence[Experience]) -> list[Row]:
    """Return the rows of an optimizer batch that hold a trainable token, in order."""
    rows: list[Row] = []
    for index, experience in enumerate(experiences):
        places, none = experience.places, [float("nan")] * len(experience.places)
        values, returns = experience.values or none, experience.returns or none
        reference = experience.ref_logprobs or none
        for start, end in experience.trajectory.segments:
            first, last = bisect_left(places, start), bisect_left(places, end)
            if first == last:
                continue
            rows.append(
                Row(
                    experience.trajectory.tokens[start:end],
                    [t - start for t in places[first:last]],
                    experience.old_logprobs[first:last],
                    experience.weights[first:last],
                    experience.advantages[first:last],
                    reference[first:last],
                    values[first:last],
                    returns[first:last],
                    -1 - len(rows) if experience.unit is None else experience.unit,
                    index,
                    first,
                    experience.temperature,
                )
            )
    return rows


def micro_batches(rows: Sequence[Row], max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Pack rows so that a forward pass computes at most `max_tokens` (or one unit), and no beginning twice if it can.

    Rows are sorted by their tokens, which brings those of a group together, and groups whose prompts begin alike; those
    of a unit stay together. Where a pack is full, the cut goes where the next computes the least again, in the later
    half of the pack.
    """
    units: dict[int, list[Row]] = {}
    for row in sorted(rows, key=_input):
        units.setdefault(row.unit, []).append(row)
    ordered = [row for unit in units.values() for row in unit]
    inputs = [_input(row) for row in ordered]
    shared = _forks([0, *(_common(first, second) for first, second in pairwise(inputs))])
    heads = [0, *accumulate(len(unit) for unit in units.values())]  # of the units among the rows, and the end
    new = [sum(len(inputs[i]) - shared[i] for i in range(*span)) for span in pairwise(heads)]
    again = [shared[head] for head in heads[:-1]]  # what a unit takes from the one before it
    batches: list[MicroBatch] = []
    start = 0
    while start < len(new):
        end, size = start + 1, new[start] + again[start]
        while end < len(new) and (size := size + new[end]) <= max_tokens:
            end += 1
        if end < len(new):
            end = min(range((start + end) // 2 + 1, end + 1), key=lambda cut: (again[cut], -cut))
        part = slice(heads[start], heads[end])
        batches.append(_pack(ordered[part], inputs[part], [0, *shared[part][1:]], device))
        start = end
    return batches


def _input(row: Row) -> list[int]:
    """Return the tokens that a row is computed from: nothing is predicted from its last one."""
    return row.tokens[: row.places[-1]]


def _common(first: list[int], second: list[int]) -> int:
    """Return how many leading tokens two rows share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _forks(shared: list[int]) -> list[int]:
    """Return how many tokens each sorted row takes from the row before it, given how many it could take.

    Rows that share n tokens more than their neighbours do are made to share them only where that saves
    `WORTH_A_FORK` tokens in all; else they share what their neighbours do.
    """
    taken = [0] * len(shared)
    spans = [(0, len(shared), 0)]
    while spans:
        low, high, depth = spans.pop()
        if high - low < 2:
            continue
        level = min(shared[low + 1 : high])
        cuts = [i for i in range(low + 1, high) if shared[i] == level]
        if (level - depth) * (high - low - 1) >= WORTH_A_FORK:
            depth = level
        for cut in cuts:
            taken[cut] = depth
        spans += [(a, b, depth) for a, b in pairwise((low, *cuts, high))]
    return taken


def _pack(rows: Sequence[Row], inputs: Sequence[list[int]], shared: Sequence[int], device: torch.device) -> MicroBatch:
    """Lay rows behind one another; each shares its first `shared` tokens with the row before it."""
    ids: list[int] = []
    positions: list[int] = []
    source: list[int] = []
    pieces: list[Piece] = []
    path: list[int] = []  # where the tokens of the row at hand stand in the stream
    for row, tokens, depth in zip(rows, inputs, shared, strict=True):
        new = tokens[depth:]
        if new:
            pieces.append(Piece(len(ids), len(new), path[:depth]))
        path[depth:] = range(len(ids), len(ids) + len(new))
        ids += new
        positions += range(depth, len(tokens))
        source += [path[t - 1] for t in row.places]

    def flat(values: Iterable[Iterable[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([value for row in values for value in row], dtype=dtype, device=device)

    return MicroBatch(
        rows=rows,
        ids=flat([ids], torch.long).unsqueeze(0),
        positions=flat([positions], torch.long).unsqueeze(0),
        attend=PackedAttend(pieces, device),
        source=flat([source], torch.long),
        targets=flat(([row.tokens[t] for t in row.places] for row in rows), torch.long),
        old_logprobs=flat((row.old_logprobs for row in rows), torch.float32),
        weights=flat((row.weights for row in rows), torch.float32),
        advantages=flat((row.advantages for row in rows), torch.float32),
        ref_logprobs=flat((row.ref_logprobs for row in rows), torch.float32),
        values=flat((row.values for row in rows), torch.float32),
        returns=flat((row.returns for row in rows), torch.float32),
        temperatures=flat(([row.temperature] * len(row.places) for row in rows), torch.float32),
        row=flat(([index] * len(row.places) for index, row in enumerate(rows)), torch.long),
        trajectory=flat(([row.trajectory] * len(row.places) for row in rows), torch.long),
        unit=flat(([row.unit] * len(row.places) for row in rows), torch.long),
    )
