"""Stop strings against the slow way: the whole text, decoded and searched again after each token."""

import random
from collections.abc import Sequence

import pytest

from gymtune.agents.stop_strings import contains_stop


def decode(ids: Sequence[int]) -> str:
    """One token a byte; 256 and above have no text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def first_stop(ids: Sequence[int], stop: Sequence[str], start: int = 0) -> int | None:
    found = (i for i in range(start, len(ids)) if contains_stop(ids[: i + 1], start, stop, decode))
    return next(found, None)


@pytest.mark.parametrize("stop", [("</tool>",), ("好的", "x"), ("🙂\n",), ("aab", "ab")])
def test_the_first_token_that_completes_one_is_found(stop):
    rng = random.Random(0)
    pieces = [*(s.encode()[:n] for s in stop for n in range(1, 8)), b"a", "好".encode(), b"\xe5", bytes([255]), b"\n"]
    hits = 0
    for _ in range(300):
        ids = [b for _ in range(12) for b in rng.choice(pieces)]
        ids += stop[0].encode() * (rng.random() < 0.5)
        slow = next((i for i in range(len(ids)) if any(s in decode(ids[: i + 1]) for s in stop)), None)
        assert first_stop(ids, stop) == slow
        hits += slow is not None
    assert 100 < hits <= 300


def test_tokens_without_text_hide_nothing():
    ids = [*b"say </to", *[300] * 500, *b"ol> more"]
    assert first_stop(ids, ("</tool>",)) == ids.index(ord(">"))


def test_what_stands_before_the_turn_does_not_count():
    ids = [*b"</tool>", *b"ol> and </tool>"]
    assert first_stop(ids, ("</tool>",), start=7) == len(ids) - 1


def test_the_cost_of_a_token_does_not_grow_with_the_turn():
    seen = []

    def counting(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return decode(ids)

    ids = list(b"abc" * 3000)
    for end in range(8000, 9000):
        contains_stop(ids[:end], 0, ("never",), counting)
    assert len(seen) == 1000
    assert max(seen) <= 24
