"""Validate 100 MB of agentic JSONL: seconds and peak memory. `python benchmarks/validate_100mb.py [MB]`."""

from __future__ import annotations

import json
import resource
import sys
from itertools import cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter

from gymtune.envs.files import example_path
from gymtune.envs.files.validate import validate


def write_file(path: Path, size: int) -> None:
    """Write records like those of the agentic example: other questions, tools in another order, the answer of each."""
    rng = Random(0)
    records = [json.loads(line) for line in example_path("agentic").read_text(encoding="utf-8").splitlines()]
    schemas = list({json.dumps(t): t for r in records for t in json.loads(r["conversations"][0]["tools"])}.values())
    with path.open("w", encoding="utf-8") as file:
        for number, record in enumerate(cycle(records)):
            if file.tell() >= size:
                return
            tools = rng.sample(schemas, rng.randint(2, len(schemas)))
            record["conversations"][0]["tools"] = json.dumps(tools, ensure_ascii=False)
            left, right = rng.randint(0, 10**6), number
            record["conversations"][-2]["content"] = f"What is {left} + {right}? {'Think. ' * rng.randint(0, 60)}"
            record["gt"] = [str(left + right)]
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    """Write, validate, print."""
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else 100) * 1e6)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "agentic.jsonl"
        write_file(path, size)
        start = perf_counter()
        report = validate(path)
        seconds = perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{path.stat().st_size / 1e6:.0f} MB, {report.rows:,} records, {sum(report.errors.values())} errors")
        print(f"{seconds:.1f} s, {peak:.0f} MB peak resident memory")


if __name__ == "__main__":
    main()
