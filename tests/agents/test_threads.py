"""Threads: never more than cores, and a word when the cores are busy."""

import pytest
import torch

from gymtune.agents import threads


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_are_what_was_asked_for_or_at_most_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads.use_threads(3)
    assert torch.get_num_threads() == 3
    monkeypatch.setattr(threads, "cores", lambda: 2)
    threads.use_threads(None)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    threads.use_threads(None)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("load", "used", "said"),
    [(0.0, 2, False), (0.3, 2, False), (1.0, 2, True), (4.0, 2, True), (4.0, 1, False), (0.9, 1, False)],
)
def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch, load: float, used: int, said: bool) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    torch.set_num_threads(used)
    warning = threads.oversubscribed(load)
    assert (warning is not None) == said
    if warning:
        assert "--torch-threads 1" in warning
