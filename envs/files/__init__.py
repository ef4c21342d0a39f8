"""Files that people already have: their rows, their kinds, their records, and all that is wrong with them."""

from pathlib import Path

from .detection import detect, detect_file, kind_for
from .kinds import parse_record, read_records
from .reading import read_rows
from .records import KINDS, Fault, Kind, Label, Record, Reply, Row
from .tasks import FileTasks

__all__ = [
    "KINDS",
    "Fault",
    "FileTasks",
    "Kind",
    "Label",
    "Record",
    "Reply",
    "Row",
    "detect",
    "detect_file",
    "example_path",
    "kind_for",
    "parse_record",
    "read_records",
    "read_rows",
]


def example_path(name: str) -> Path:
    """Return the example file of a kind (`sharegpt` is SFT as ShareGPT writes it) that comes with the package."""
    return Path(__file__).parent.parent / "examples" / f"{name}.jsonl"
