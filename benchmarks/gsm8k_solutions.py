"""GSM8K's model solutions through the numeric checker: agreement with the verdicts on record, disagreements explained.

    python benchmarks/gsm8k_solutions.py FOLDER     FOLDER holds example_model_solutions.jsonl (and test.jsonl)

Prints a table of record against verdict, every disagreement with its reason, the answers in which no number was read,
and, where test.jsonl is there, the gold solutions, each with gold + 1, and each as the prefix of a longer number.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from gymtune.rewards import NumericChecker, Verdict, check
from gymtune.rewards.numeric import parse_number

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
CHECKER = NumericChecker()


def reason(solution: str, gold: str, recorded: bool, verdict: Verdict) -> str:
    """Return why record and verdict differ, by the last line alone."""
    last = solution.strip().rpartition("\n")[2]
    number = parse_number(last.removeprefix("A:"))
    if verdict.kind == "broken":
        return "the checker broke"
    if number is None:
        return "the last line is no number, and the record took it for right" if recorded else "ours read too much"
    if (number == parse_number(gold)) != recorded:
        return "the record is wrong: the last line's number says otherwise"
    return "ours is wrong: the last line is clear"


def solutions(path: Path) -> None:
    """Print the agreement over all recorded solutions."""
    table: Counter[tuple[bool, str]] = Counter()
    reasons: Counter[str] = Counter()
    notes = []
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row: dict[str, Any] = json.loads(text)
        gold = row["ground_truth"].rpartition("A:")[2].strip()
        for model in MODELS:
            recorded, solution = row[model]["is_correct"], row[model]["solution"]
            verdict = check(CHECKER, solution, gold)
            table[recorded, verdict.kind] += 1
            if verdict.success is not recorded:
                why = reason(solution, gold, recorded, verdict)
                reasons[why] += 1
                notes.append(f"line {line} {model}: gold {gold}, recorded {recorded}, {verdict.kind}: {why}")
            elif verdict.kind == "unparsed":
                notes.append(f"line {line} {model}: no number read (recorded {recorded}) in {solution[-60:]!r}")
    agree = sum(n for (recorded, kind), n in table.items() if recorded is (kind == "right") and kind != "broken")
    print(f"{agree} of {table.total()} solutions agree with the record")
    for (recorded, kind), n in sorted(table.items()):
        print(f"  recorded {recorded!s:5}  {kind:8} {n:5}")
    print(f"disagreements by reason: {dict(reasons)}", *notes, sep="\n  ")


def golds(path: Path) -> None:
    """Print how many gold solutions are right, against gold, gold + 1, and as the prefix of a longer number."""
    rows = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [(text, text.rpartition("####")[2].strip()) for text in rows]
    right = sum(check(CHECKER, text, gold).success is True for text, gold in pairs)
    one_more = sum(check(CHECKER, text, (parse_number(gold) or 0) + 1).success is not False for text, gold in pairs)
    prefix = sum(check(CHECKER, f"#### {gold}7", gold).success is not False for _, gold in pairs)
    print(f"gold solutions: {right} of {len(pairs)} right; gold + 1: {one_more}; gold as a prefix: {prefix}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    solutions(folder / "example_model_solutions.jsonl")
    if (folder / "test.jsonl").exists():
        golds(folder / "test.jsonl")
