"""The numeric checker on GSM8K: solutions of its form written here, and the files themselves where they are at hand."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gymtune.rewards import NumericChecker, check
from gymtune.rewards.numeric import parse_number

#: (solution in the form of the data set's golds, gold)
GOLDS = [
    ("Tom has 3+4=<<3+4=7>>7 pens.\n#### 7", "7"),
    ("The shop sold 1,000*2=<<1000*2=2000>>2,000 cups.\n#### 2,000", "2000"),
    ("It loses 5-8=<<5-8=-3>>-3 dollars.\n#### -3", "-3"),
    ("Half of it is 5/2=$<<5/2=2.5>>2.50\n#### 2.5", "2.5"),
    ("She does not eat 3 of them, so no more than 10-3=<<10-3=7>>7 are left.\n#### 7", "7"),
    ("The answer to the first part is 4, or 2*2=<<2*2=4>>4.\nIn all 4+5=<<4+5=9>>9\n#### 9", "9"),
    ("10% of 50 is 50*.1=<<50*.1=5>>5\n#### 5", "5"),
]
#: (solution in the form of the recorded model solutions, gold, right)
SOLUTIONS = [
    ("He runs 3*60=<<3*60=180>>180 meters\nA: 180", "180", True),
    ("He runs 3*60=<<3*60=180>>180 meters\nA: 180\n", "180", True),
    ("So it is $<<2*6=12>>12.00 in total\nA: 12.00", "12", True),
    ("A: 1,200", "1200", True),
    ("He runs 3*60=<<3*60=180>>180 meters\nA: 18", "180", False),
    ("He runs 3*60=<<3*60=180>>180 meters", "180", False),  # cut before it answers
    ("He lost a lot\nA: -1.8 billion", "-1.8", False),
    ("A: 10+x", "10", False),
    ("A: 1/5", "1", False),
    ("A: 5\nA: 6", "6", False),
]


@pytest.mark.parametrize(("solution", "gold"), GOLDS)
def test_gold_solutions(solution: str, gold: str) -> None:
    assert check(NumericChecker(), solution, gold).success is True
    assert check(NumericChecker(), solution, str((parse_number(gold) or 0) + 1)).success is False
    assert check(NumericChecker(), f"{solution}7", gold).success is False


@pytest.mark.parametrize(("solution", "gold", "right"), SOLUTIONS)
def test_model_solutions(solution: str, gold: str, right: bool) -> None:
    assert check(NumericChecker(), solution, gold).success is right


@pytest.fixture
def folder() -> Path:
    path = os.environ.get("GYMTUNE_TEST_GSM8K")
    if not path:
        pytest.skip("GYMTUNE_TEST_GSM8K names no folder with GSM8K's files")
    return Path(path)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_gold_of_the_test_set(folder: Path) -> None:
    pairs = [(row["answer"], row["answer"].rpartition("####")[2].strip()) for row in rows(folder / "test.jsonl")]
    numbers = [parse_number(gold) or 0 for _, gold in pairs]
    assert len(pairs) == 1319
    assert sum(check(NumericChecker(), text, gold).success is True for text, gold in pairs) == 1319
    assert not any(check(NumericChecker(), p[0], n + 1).success for p, n in zip(pairs, numbers, strict=True))
    assert not any(check(NumericChecker(), f"#### {gold}7", gold).success for _, gold in pairs)


def test_every_recorded_solution_agrees_with_its_record(folder: Path) -> None:
    tried, differ = 0, []
    for row in rows(folder / "example_model_solutions.jsonl"):
        gold = row["ground_truth"].rpartition("A:")[2].strip()
        for solution in (cell for cell in row.values() if isinstance(cell, dict)):
            tried += 1
            if check(NumericChecker(), solution["solution"], gold).success is not solution["is_correct"]:
                differ.append((gold, solution))
    assert (tried, differ) == (5276, [])
