"""The cache keeps what was written, wherever rows move; attention reads little more than it needs."""

import random
from dataclasses import replace

import pytest
import torch

from gymtune.agents import cache_attend
from gymtune.agents.cache_attend import CacheAttend, Piece, arrange
from gymtune.agents.kv_cache import KVCache, Slot
from gymtune.agents.models import ModelConfig

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=1000,
    hidden_size=32,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
)
LIKE = torch.zeros(0)


def make(slots: int = 64, longest: int = 4096, max_tokens: int | None = None) -> KVCache:
    return KVCache(CONFIG, slots, LIKE, longest=longest, max_tokens=max_tokens)


def fill(slot: Slot) -> int:
    """Write what is missing, each id as its own key and value (plus the layer); return how many there were."""
    new = slot.tokens[slot.length :]
    for layer, store in enumerate(slot.shelf.stores):
        store[:, slot.row, :, slot.length : len(slot.tokens)] = torch.tensor(new)[:, None] + layer / 2
    slot.length = len(slot.tokens)
    return len(new)


def check(cache: KVCache, bound: int) -> None:
    assert cache.allocated <= bound
    for slot in cache._slots.values():
        assert slot.shelf.slots[slot.row] is slot
        assert slot.shelf.width >= slot.length
        for layer, store in enumerate(slot.shelf.stores):
            wanted = torch.tensor(slot.tokens[: slot.length])[:, None] + layer / 2
            assert torch.equal(store[:, slot.row, :, : slot.length], wanted.expand(2, 2, -1, 8))


def test_widths_grow_by_a_half_or_a_third():
    cache = make(longest=700)
    widths = [cache.width(n) for n in range(1, 701)]
    assert sorted(set(widths)) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 700]
    assert all(width >= n for n, width in enumerate(widths, 1))
    assert all(width <= 1.5 * n for n, width in enumerate(widths, 1) if n > 21)


@pytest.mark.parametrize(("slots", "bound"), [(3, 10_000), (8, 600), (8, 300), (20, 2000)])
def test_whatever_happens_each_slot_holds_its_own(slots, bound):
    """Sessions come, grow, pause, come back with another history, and leave, in random order."""
    rng, cache = random.Random(slots + bound), make(slots, 250, bound)
    histories: dict[str, list[int]] = {}
    computed = told = 0
    for _ in range(1500):
        session = str(rng.randrange(12))
        slot = cache._slots.get(session)
        deed = rng.random()
        if slot is not None and slot.busy and deed < 0.7:
            if len(slot.tokens) < 249 and cache.extend(slot):
                slot.tokens.append(rng.randrange(1000))
                fill(slot)
            else:
                cache.release(session)
        elif slot is not None and slot.busy:
            histories[session] = list(slot.tokens)
            cache.keep(slot)
            slot.shelf.bring_together([s for s in slot.shelf.used if rng.random() < 0.5])
        elif deed < 0.8:
            old = histories.get(session) or histories.get(str(rng.randrange(12)), [])
            tokens = [*old[: rng.randrange(200)], *(rng.randrange(1000) for _ in range(rng.randrange(1, 40)))]
            slot = cache.acquire(session, tokens)
            if slot is not None:
                check(cache, bound)
                told += len(tokens)
                computed += fill(slot)
        elif slot is not None:
            cache.release(session)
        check(cache, bound)
        assert len(cache._slots) <= slots
    assert computed < told  # something was kept


def test_idle_sessions_are_evicted_in_the_order_of_their_use():
    cache = make(slots=2)
    for session in ("a", "b"):
        fill(cache.acquire(session, [1, 2, 3]))
        cache.keep(cache._slots[session])
    fill(cache.acquire("a", [1, 2, 3, 4]))
    cache.keep(cache._slots["a"])
    assert cache.acquire("c", [9]) is not None
    assert set(cache._slots) == {"a", "c"}
    assert cache.acquire("d", [9]) is not None
    assert cache.acquire("e", [9]) is None  # both are busy now


def test_nobody_is_evicted_for_one_that_does_not_fit_all_the_same():
    cache = make(max_tokens=200)
    fill(cache.acquire("idle", [1] * 40))
    cache.keep(cache._slots["idle"])
    fill(cache.acquire("busy", [2] * 90))
    assert cache.acquire("new", [3] * 120) is None
    assert set(cache._slots) == {"idle", "busy"}
    assert cache.acquire("small", [3] * 90) is not None
    assert set(cache._slots) == {"busy", "small"}


def test_a_session_that_alone_fills_the_cache_can_still_grow():
    cache = make(longest=100, max_tokens=100)
    slot = cache.acquire("a", list(range(60)))
    fill(slot)
    cache.keep(slot)
    again = cache.acquire("a", list(range(80)))
    assert again is slot
    assert (slot.length, slot.shelf.width) == (0, 96)  # no place for the old row beside the new one: computed again
    assert cache.acquire("b", [1]) is None


def make_slots(cache: KVCache, lengths: list[int], kv_heads: int = 2) -> list[Slot]:
    slots = []
    for i, length in enumerate(lengths):
        slot = cache.acquire(str(i), [1000 + i] * length)
        for store in slot.shelf.stores:
            store[:, slot.row, :, :length] = torch.randn(2, kv_heads, length, 8)
        slot.length = length
        slots.append(slot)
    return slots


@pytest.mark.parametrize("exact", [False, True])
def test_decoding_attends_to_its_own_past_wherever_rows_lie(exact):
    torch.manual_seed(0)
    cache = make()
    slots = make_slots(cache, [5, 40, 300, 7, 45, 31, 5, 12])
    decoding = [slots[i] for i in (6, 0, 4, 2, 7, 1)]
    past = {slot.session: [s[:, slot.row, :, : slot.length].clone() for s in slot.shelf.stores] for slot in slots}
    pieces = arrange([Piece(slot, [1], i) for i, slot in enumerate(decoding)])
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    attend = CacheAttend(cache, pieces, exact)
    for layer in range(2):
        out = attend(layer, q, k, v)
        for i, piece in enumerate(pieces):
            held = past[piece.slot.session][layer]
            keys, values = (torch.cat((h, x[0, :, i : i + 1]), 1) for h, x in zip(held, (k, v), strict=True))
            scores = q[0, :, i, None] @ keys.repeat_interleave(2, 0).transpose(1, 2) / 8**0.5
            wanted = scores.softmax(-1) @ values.repeat_interleave(2, 0)
            assert torch.allclose(out[0, :, i], wanted[:, 0], atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (15, 3)])
def test_exact_attention_gives_the_same_bits_in_any_company_and_thread(heads, kv_heads):
    """One token on top of others: alone, beside others, on other rows, and as one of a run."""
    torch.manual_seed(0)
    config = replace(CONFIG, num_attention_heads=heads, num_key_value_heads=kv_heads)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for length in (1, 20, 47, 48, 70):
            keys, values, q = torch.randn(kv_heads, 99, 8), torch.randn(kv_heads, 99, 8), torch.randn(heads, 99, 8)
            found = set()
            for trial in range(12):
                cache = KVCache(config, 64, LIKE, longest=200)
                lengths = [random.Random(trial).choice([length, 33, 70]) for _ in range(trial)]
                own = cache.acquire("own", [0] * length) if trial % 2 else None
                company = make_slots(cache, lengths, kv_heads)
                own = own or cache.acquire("own", [0] * length)
                own.shelf.stores[0][:, own.row, :, :length] = torch.stack((keys, values))[:, :, :length]
                own.length = length if trial % 3 else 0
                ids = [7] * (length + 1 - own.length)
                pieces = arrange([Piece(own, ids, 0), *(Piece(slot, [1], i + 1) for i, slot in enumerate(company))])
                start = next(sum(len(p.ids) for p in pieces[:i]) for i, p in enumerate(pieces) if p.slot is own)
                place = slice(start, start + len(ids))
                packed = [torch.randn(1, n, 128, 8) for n in (heads, kv_heads, kv_heads)]
                for x, mine in zip(packed, (q, keys, values), strict=True):
                    x[0, :, place] = mine[:, own.length : length + 1]
                out = CacheAttend(cache, pieces, exact=True)(0, *packed)
                found.add(out[0, :, place.stop - 1].contiguous().numpy().tobytes())
            assert len(found) == 1
    finally:
        torch.set_num_threads(threads)


def count_attended(monkeypatch) -> list[int]:
    """Count the positions that decoding reads, rows times length, in the calls of attention from now on."""
    seen, real = [0], cache_attend._attend_once

    def counting(q, keys, *rest):
        seen[0] += keys.shape[0] * keys.shape[2]
        return real(q, keys, *rest)

    monkeypatch.setattr(cache_attend, "_attend_once", counting)
    return seen


@pytest.mark.parametrize(
    "lengths",
    [[3000, *[30] * 31], [16 * i for i in range(2, 30)], [33] * 10 + [47] * 3, [100, 2000, 30, 500] * 8],
    ids=["one long", "ragged", "at a border", "mixed"],
)
@pytest.mark.parametrize("kept", [1.0, 0.6, 0.1])
def test_a_long_sequence_costs_the_others_nothing(monkeypatch, lengths, kept):
    """Also where most of the sessions are idle, and lie between those that decode."""
    rng = random.Random(0)
    slots = make_slots(make(), lengths)
    decoding = rng.sample(slots, max(2, int(kept * len(slots))))
    pieces = arrange([Piece(slot, [1], i) for i, slot in enumerate(decoding)])
    seen = count_attended(monkeypatch)
    n = len(pieces)
    CacheAttend(make(), pieces)(0, torch.randn(1, 4, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8))
    needed = sum(slot.length + 1 for slot in decoding)
    print(f"attended {seen[0]}, needed {needed}: {seen[0] / needed:.2f}; one rectangle {n * max(lengths) / needed:.1f}")
    assert needed <= seen[0] <= 1.5 * needed
