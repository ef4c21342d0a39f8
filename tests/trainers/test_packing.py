"""Packed attention against every row alone: values, gradients, the work done, recomputation of layers."""

from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gymtune.agents.models import CausalAttend
from gymtune.trainers import batch as batch_module
from gymtune.trainers.attention import PackedAttend, Piece
from gymtune.trainers.batch import make_rows, micro_batches
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.policy import policy_logprobs

FP64 = 1e-10  # two float64 ways to the same number
SHARED = 1e-5  # float32: a prompt computed once against once a row, in loss and gradient, relative to its size
CPU = torch.device("cpu")
HEADS, KV, DIM = 6, 2, 4


def alone(q, k, v, piece):
    """Attend for one piece: its past and itself are one row, of which the last places are wanted."""
    row = torch.tensor([*piece.past, *range(piece.start, piece.start + piece.length)])
    q, k, v = (x[:, :, row] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, len(piece.past) :]


def random_pieces(seed):
    """Make up to 12 pieces of 1 to 9 tokens, each hung on a random place of an earlier one or on nothing."""
    rng = Random(seed)
    paths, pieces, tokens = [[]], [], 0
    for _ in range(rng.randint(1, 12)):
        path = rng.choice(paths)
        past = path[: rng.randint(0, len(path))]
        pieces.append(Piece(tokens, rng.randint(1, 9), past))
        paths.append([*past, *range(tokens, tokens + pieces[-1].length)])
        tokens += pieces[-1].length
    return pieces, tokens


@pytest.mark.parametrize("seed", range(20))
def test_pieces_attend_as_if_alone(seed):
    pieces, tokens = random_pieces(seed)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, weights = (
        torch.randn(1, heads, tokens, DIM, generator=generator, dtype=torch.float64) for heads in (HEADS, KV, KV, HEADS)
    )
    for x in (q, k, v):
        x.requires_grad_()
    packed = PackedAttend(pieces, CPU)(0, q, k, v)
    slow = torch.cat([alone(q, k, v, piece) for piece in pieces], 2)
    assert torch.allclose(packed, slow, rtol=0, atol=FP64)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (packed, slow))
    assert all(torch.allclose(a, b, rtol=0, atol=FP64) for a, b in zip(ours, theirs, strict=True))


def test_nothing_reaches_a_token_from_beside_or_after_it():
    """A prompt 0 1, two answers 2 3 and 4 5 6 to it, and another row 7 8: who moves when one token's values do?"""
    pieces = [Piece(0, 2, []), Piece(2, 2, [0, 1]), Piece(4, 3, [0, 1]), Piece(7, 2, [])]
    seen = [{0, 1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6}, {2, 3}, {3}, {4, 5, 6}, {5, 6}, {6}, {7, 8}, {8}]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, DIM, generator=generator) for heads in (HEADS, KV, KV))
    attend = PackedAttend(pieces, CPU)
    before = attend(0, q, k, v)
    for token, moved in enumerate(seen):
        other = v.clone()
        other[:, :, token] += 1
        changed = (attend(0, q, k, other) != before).any(3).any(1).squeeze(0)
        assert set(changed.nonzero().squeeze(1).tolist()) == moved


@pytest.mark.parametrize("lengths", [[64] * 8, [64, 33, 32, 31, 17, 16, 5, 1], [100, 1, 1, 1, 1, 1, 1, 1]])
def test_padding_in_attention_is_bounded(lengths):
    """One prompt of 200 and eight answers: at most twice the pairs of tokens that rows alone would pad to."""
    pieces, start = [Piece(0, 200, [])], 200
    for length in lengths:
        pieces.append(Piece(start, length, range(200)))
        start += length
    attend = PackedAttend(pieces, CPU)
    needed = 200 * 200 + sum(length * (200 + length) for length in lengths)
    assert needed <= attend.pairs <= 2 * needed
    if len(set(lengths)) == 1:
        assert attend.pairs == needed
        assert len(attend._calls) == 2  # a call for the prompt, one for all answers


def group(episode, rng, name, prompt, count, longest):
    answers = [[rng.randrange(1, 31) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [
        episode((0, prompt), (1, answer), (0, [3, 2]), (1, [4, 0]), name=f"{name}{i}", group=name)
        for i, answer in enumerate(answers)
    ]


@pytest.mark.parametrize("limit", [40, 90, 1000])
def test_groups_with_their_own_prompts_equal_rows_alone_in_float32(decoder, episode, limit, monkeypatch):
    """Loss and gradient within 1e-5 of every row whole, in one forward and backward pass a row."""
    rng = Random(5)
    system = [rng.randrange(1, 31) for _ in range(12)]
    trajectories = [
        t
        for name in "abc"
        for t in group(episode, rng, name, system + [rng.randrange(1, 31) for _ in range(rng.randint(3, 9))], 4, 9)
    ]
    rows = make_rows(experiences_of(trajectories, [1.0] * len(trajectories), need_logprobs=True))
    model = decoder(dtype=torch.float32)

    def whole(fork, limit):
        monkeypatch.setattr(batch_module, "WORTH_A_FORK", fork)
        model.zero_grad()
        batches = micro_batches(rows, limit, CPU)
        total = 0.0
        for batch in batches:
            loss = (policy_logprobs(model, batch)[0] * (batch.trajectory + 1)).sum() / 100
            loss.backward()
            total += loss.item()
        return total, [p.grad.clone() for p in model.parameters()], sum(batch.ids.numel() for batch in batches)

    plain, grads, tokens = whole(10**9, 1)
    shared, shared_grads, fewer = whole(1, limit)
    assert fewer < 0.8 * tokens
    assert shared == pytest.approx(plain, rel=SHARED)
    for left, right in zip(shared_grads, grads, strict=True):
        assert (left - right).norm() <= SHARED * right.norm()


def test_a_prompt_of_680_is_computed_once(episode):
    """2 prompts x 8 samples x 64 tokens: of 16 x 743 tokens 2 x (680 + 8 x 63) are left, or fewer."""
    rng = Random(0)
    tools = [rng.randrange(1000) for _ in range(650)]
    rows = make_rows(
        experiences_of(
            [
                episode((0, tools + [ask] * 30), (1, [rng.randrange(1000) for _ in range(64)]), name=f"{ask}{i}")
                for ask in (1, 2)
                for i in range(8)
            ],
            [1.0] * 16,
            need_logprobs=True,
        )
    )
    (batch,) = micro_batches(rows, 4096, CPU)
    assert batch.ids.numel() == 650 + 2 * (30 + 8 * 63)  # the tools are the same: once for both
    assert sum(len(row.tokens) - 1 for row in rows) / batch.ids.numel() == pytest.approx(6.9, abs=0.1)


def test_layers_may_be_computed_again_in_the_backward_pass(decoder, episode, monkeypatch):
    """Gradient checkpointing around each layer: the same bits, forward and backward."""
    monkeypatch.setattr(batch_module, "WORTH_A_FORK", 1)
    rng = Random(1)
    trajectories = group(episode, rng, "a", [1, 2, 3, 4], 4, 6) + group(episode, rng, "b", [1, 2, 9], 3, 6)
    rows = make_rows(experiences_of(trajectories, [1.0] * 7, need_logprobs=True))
    (batch,) = micro_batches(rows, 1000, CPU)
    model, runs = decoder(), []

    def gradients():
        logprobs, _ = policy_logprobs(model, batch)
        return [logprobs, *torch.autograd.grad(logprobs.sum(), list(model.parameters()))]

    plain = gradients()
    for layer in model.model.layers:
        inner = layer.forward

        def again(*args, inner=inner):
            return checkpoint(lambda *a: runs.append(1) or inner(*a), *args, use_reentrant=False)

        monkeypatch.setattr(layer, "forward", again)
    recomputed = gradients()
    assert len(runs) == 2 * len(model.model.layers)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_one_row_is_plain_causal_attention(decoder):
    model, ids = decoder(), torch.arange(1, 12)[None]
    positions = torch.arange(11)[None]
    packed = model(ids, positions, PackedAttend([Piece(0, 11, [])], CPU))
    assert torch.allclose(packed, model(ids, positions, CausalAttend()), rtol=0, atol=FP64)
