"""Validate: all that is wrong with a file, and what its records are like, in one pass and constant memory."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .detection import ALIKE, detect, main_kind, named_kind
from .kinds import parse_record
from .reading import read_rows
from .records import Fault, Kind, Record, Row
from .remarks import remarks, unused_keys

_LINES = 5  # lines named with a warning
_MOST_NAMES = 100  # unused keys counted by name; hostile files have millions
_OTHERS = "(other keys)"
_POINTS = {"p0": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(slots=True)
class Warned:
    """How often a remark was made, and the first lines it was made on."""

    count: int = 0
    lines: list[int] = field(default_factory=list)


class Table(NamedTuple):
    """A table to be printed."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(slots=True)
class Report:
    """What `validate` found.

    Args:
        path: The file.
        kind: What it was read as.
        rows: Rows that are not blank.
        blank: Blank lines between them.
        faults: What is wrong, in the order of the file, at most `max_faults`.
        errors: Number of faults by rule, those that are not listed among them.
        warnings: Remarks on records that a trainer can use all the same.
        spread: By measure (turns, characters, tools a record): p0 (the least), p50, p90, p99, max.
        unused: Keys that nobody reads, with the number of records that have them.
    """

    path: str
    kind: Kind
    rows: int = 0
    blank: int = 0
    faults: list[Fault] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    warnings: dict[str, Warned] = field(default_factory=dict)
    spread: dict[str, dict[str, int]] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether a trainer can use every record."""
        return not self.errors

    @property
    def unlisted(self) -> int:
        """Number of faults that are counted and not listed."""
        return sum(self.errors.values()) - len(self.faults)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps({"ok": self.ok, **asdict(self), "unlisted": self.unlisted}, ensure_ascii=False, indent=2)

    def tables(self) -> list[Table]:
        """Return what there is to print; a table without rows is left out."""
        counts: list[tuple[str, ...]] = [
            ("kind", self.kind),
            ("rows", f"{self.rows:,}"),
            ("blank lines", f"{self.blank:,}"),
        ]
        counts += [(f"errors: {rule}", f"{count:,}") for rule, count in _falling(self.errors)]
        found = [
            Table(f"{self.path}", ("what", "count"), counts),
            Table("errors", ("line", "path", "wanted", "came"), [_cells(fault) for fault in self.faults]),
            Table("errors not listed", ("count",), [(f"{self.unlisted:,}",)] if self.unlisted else []),
            Table(
                "warnings",
                ("what", "count", "first lines"),
                [(what, f"{w.count:,}", ", ".join(map(str, w.lines))) for what, w in self.warnings.items()],
            ),
            Table(
                "a record",
                ("measure", *_POINTS),
                [(measure, *(f"{value:,}" for value in points.values())) for measure, points in self.spread.items()],
            ),
            Table("keys nobody reads", ("key", "records"), [(k, f"{n:,}") for k, n in _falling(self.unused)]),
        ]
        return [table for table in found if table.rows]


def _falling(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1


def _cells(fault: Fault) -> tuple[str, ...]:
    return str(fault.line), fault.path, fault.wanted, fault.came


def validate(path: str | Path, kind: Kind | Literal["auto"] = "auto", max_faults: int = 1000) -> Report:
    """Return all that is wrong with a file, with counts and percentiles of what is right.

    Errors are what a trainer could not use or would use wrongly: what is no JSON, shapes, empty answers, prompts that
    differ between chosen and rejected, a missing or empty `gt`, tool schemas and calls that are none, results without
    a call, a conversation that nobody opened or could answer, with `auto` a record of another kind. Warnings are what
    it can use: duplicates, chosen equal to rejected, an empty list `gt`, a `gt` without the tools to reach it or too
    long to be stated, a worked answer that does not end in `gt`, speakers out of order.

    Raises:
        DataError: The file cannot be read, or its kind not told.
        ConfigError: There is no such kind, or an extra is missing.
    """
    known = main_kind(path) if kind == "auto" else named_kind(path, kind)
    tally = _Tally(Report(str(path), known), max_faults)
    last = 0
    for row in read_rows(path):
        tally.report.blank += row.line - last - 1
        last = row.line
        tally.add(row, any_kind=kind == "auto")
    return tally.close()


def checked_record(row: Row, kind: Kind) -> Record | list[Fault]:
    """Return the record of a row of a file of that kind, or all that is wrong; to tell of another kind is wrong too."""
    record = parse_record(row, kind)
    if isinstance(record, Record) and row.value is not None:
        told = detect(row.value)
        if told not in (None, kind) and {told, kind} != ALIKE:
            return [Fault(row.line, "", f"the kind {kind}, as other lines", f"the kind {told}", "kind")]
    return record


class _Tally:
    """Gathers a report row by row."""

    def __init__(self, report: Report, max_faults: int) -> None:
        self.report, self._max_faults = report, max_faults
        self._measured = {name: array("Q") for name in ("turns", "characters", "tools")}
        self._seen: set[int] = set()

    def add(self, row: Row, *, any_kind: bool) -> None:
        """Count one row; with `any_kind` one that tells another kind than the file is a fault."""
        report = self.report
        report.rows += 1
        record = checked_record(row, report.kind) if any_kind else parse_record(row, report.kind)
        if isinstance(record, Record) and row.value is not None:
            self._add_record(record, row.value)
            return
        self._blame(record if isinstance(record, list) else [])

    def _blame(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            _count(self.report.errors, fault.rule)
            if len(self.report.faults) < self._max_faults:
                self.report.faults.append(fault)

    def _add_record(self, record: Record, value: dict[str, Any]) -> None:
        longest = max((reply.messages for reply in record.replies), key=len, default=())
        everything = [*record.prompt, *(message for reply in record.replies for message in reply.messages)]
        self._measured["turns"].append(len(record.prompt) + len(longest))
        self._measured["characters"].append(sum(len(message["content"]) for message in everything))
        self._measured["tools"].append(len(record.tools))
        for what in remarks(record):
            self._warn(what, record.line)
        text = json.dumps([everything, record.gt, record.tools])
        mark = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
        if mark in self._seen:
            self._warn("the same as an earlier record", record.line)
        self._seen.add(mark)
        unused = self.report.unused
        for key in unused_keys(record, value):
            _count(unused, key if key in unused or len(unused) < _MOST_NAMES else _OTHERS)

    def _warn(self, what: str, line: int) -> None:
        warned = self.report.warnings.setdefault(what, Warned())
        warned.count += 1
        if len(warned.lines) < _LINES:
            warned.lines.append(line)

    def close(self) -> Report:
        """Return the report."""
        report = self.report
        if not report.rows:
            self._blame([Fault(0, "", "at least one record", "none", "json")])
        for name, values in self._measured.items():
            if values:
                ordered = sorted(values)
                # nearest rank: the least value that so many of the values do not exceed
                ranks = {point: max(ceil(share * len(ordered)), 1) - 1 for point, share in _POINTS.items()}
                report.spread[name] = {point: ordered[rank] for point, rank in ranks.items()}
        return report
