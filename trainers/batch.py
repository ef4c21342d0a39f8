"""From trajectories to the rows and micro-batches that a model runs on.

A row is one segment of one trajectory. Which tokens train comes from the response mask; how much, from the
trajectory's advantage. Micro-batches bound memory and change no number: what a token weighs is fixed by the whole
optimizer batch before it is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from operator import itemgetter

import torch
from torch import Tensor

from ..agents.trajectory import Trajectory
from ..tools.errors import DataError
from .attention import PackedAttend, Piece

WORTH_A_FORK = 16
"""Tokens that sharing a beginning must save: each length of beginning costs one more call of attention in a layer."""


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
    """What one forward pass takes: a stream of T tokens without padding, rows behind one another.

    A row that begins as the one before it adds only what is new. `ids` and `positions` (1, T), a position being the
    token's place in its row; `attend` knows which tokens a token sees. For the N trainable tokens, flat (N,): `source`,
    where in the stream the hidden state stands that predicts each, its id `targets` and, per token, `old_logprobs`,
    `advantages`, `temperatures`, `trajectory`.
    """

    ids: Tensor
    positions: Tensor
    attend: PackedAttend
    source: Tensor
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
    """Pack rows so that a forward pass computes at most `max_tokens` (or one row), and no beginning twice if it can.

    Rows are sorted by their tokens, which brings those of a group together, and groups whose prompts begin alike. Where
    a pack is full, the cut goes where the next computes the least again, in the later half of the pack.
    """
    ordered = sorted(((row.tokens[: row.places[-1]], row) for row in rows), key=itemgetter(0))
    inputs, rows = [tokens for tokens, _ in ordered], [row for _, row in ordered]
    shared = _forks([0, *(_common(first, second) for first, second in pairwise(inputs))])
    batches: list[MicroBatch] = []
    start = 0
    while start < len(rows):
        end, size = start + 1, len(inputs[start])
        while end < len(rows) and (size := size + len(inputs[end]) - shared[end]) <= max_tokens:
            end += 1
        if end < len(rows):
            end = min(range((start + end) // 2 + 1, end + 1), key=lambda cut: (shared[cut], -cut))
        batches.append(_pack(rows[start:end], inputs[start:end], [0, *shared[start + 1 : end]], device))
        start = end
    return batches


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
        ids=flat([ids], torch.long).unsqueeze(0),
        positions=flat([positions], torch.long).unsqueeze(0),
        attend=PackedAttend(pieces, device),
        source=flat([source], torch.long),
        targets=flat(([row.tokens[t] for t in row.places] for row in rows), torch.long),
        old_logprobs=flat((row.old_logprobs for row in rows), torch.float32),
        advantages=flat(([row.advantage] * len(row.places) for row in rows), torch.float32),
        temperatures=flat(([row.temperature] * len(row.places) for row in rows), torch.float32),
        trajectory=flat(([row.trajectory] * len(row.places) for row in rows), torch.long),
    )
