"""Medians, ratios and the order of turns, on rates made up by hand."""

from pathlib import Path

import pytest
from contests.harness import Settings, compete, line

SETTINGS = Settings(Path("."), rounds=3)


def scripted(name: str, rates: list[float], calls: list[str]):
    left = iter(rates)

    def contender() -> float:
        calls.append(name)
        return next(left)

    return contender


def test_ratios_are_taken_round_by_round_and_the_warm_up_counts_nothing():
    calls: list[str] = []
    ours, theirs = scripted("a", [1000, 10, 30, 20], calls), scripted("b", [1, 5, 10, 20], calls)
    (result,) = compete("name", "x/s", {"ours": ours, "peer": theirs}, SETTINGS, wanted={"peer": 2.5})
    assert result.ratios == [2, 3, 1]
    assert (result.ours, result.theirs, result.ratio) == (20, 10, 2)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert "MISSED" in line(result)


def test_each_peer_has_its_line_and_a_ratio_that_is_reached_is_not_missed():
    calls: list[str] = []
    contenders = {
        name: scripted(name, rates, calls) for name, rates in {"a": [8] * 4, "b": [4] * 4, "c": [1] * 4}.items()
    }
    results = compete("name", "x/s", contenders, SETTINGS, wanted={"b": 2})
    assert [(result.peer, result.ratio, result.wanted) for result in results] == [("b", 2, 2), ("c", 8, None)]
    assert "MISSED" not in line(results[0])


def test_alone_there_is_a_figure_and_no_ratio():
    (result,) = compete("name", "x/s", {"ours": scripted("a", [1, 7, 7, 7], [])}, SETTINGS)
    assert (result.ours, result.theirs, result.ratio) == (7, None, None)
    assert "7" in line(result)


@pytest.mark.parametrize("quick", [True, False])
def test_sizes(quick: bool):
    assert Settings(Path("."), quick=quick).pick(9, 2) == (2 if quick else 9)
