"""A teacher's top-k log-probs on disk, so that each row of tokens goes through it once: for all epochs and all runs.

    FOLDER/teacher.json               whose numbers these are, and how they were made
    FOLDER/ab/ab12....safetensors     those of one row: `ids` and `logprobs`, a line a trainable token

A row is known by what the teacher reads of it, so the order of data, batches and other files of the same rows make no
difference. The temperature is among what the numbers depend on: from the k likeliest ids at one temperature, those of
another cannot be had, for nobody knows what the others add up to.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..tools.errors import ConfigError, RunError
from .batch import MicroBatch, Row
from .fused_divergence import TopTeacher

MANIFEST = "teacher.json"
"""File that says whose numbers a cache holds."""
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class About:
    """What a teacher's numbers depend on beside the tokens; `teacher` is its `fingerprint`, `vocabulary` is shared."""

    teacher: str
    dtype: str
    temperature: float
    top_k: int
    vocabulary: int


class TeacherCache:
    """What one teacher said, in a folder that is made when it is first written to.

    Args:
        folder: where.
        about: what the numbers depend on beside the tokens.

    Raises ConfigError when the folder holds the numbers of another teacher, or ones made in another way; RunError for a
    file that cannot be read or written. Several runs may share a folder.
    """

    def __init__(self, folder: Path, about: About) -> None:
        self.folder, self.about = folder, asdict(about)
        try:
            stored = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            stored = self.about
        except (OSError, ValueError) as error:
            raise RunError(f"{folder / MANIFEST}: cannot read: {error}; remove {folder}, or name another") from error
        if stored != self.about:
            told = stored if isinstance(stored, dict) else {}
            differing = [f"{key} {told.get(key)} there, {value} here" for key, value in self.about.items()
                         if told.get(key) != value]  # fmt: skip
            raise ConfigError(
                f"teacher_cache {folder} holds the numbers of another teacher: {'; '.join(differing)}. Name another "
                "folder for this run"
            )

    def read(self, batch: MicroBatch, ask: Callable[[], TopTeacher]) -> TopTeacher:
        """Return what the teacher said at the trainable tokens of a micro-batch; `ask` computes it for all of them.

        It is asked only where a row is not stored yet. A stored row counts as it is stored, so that a run that finds
        the cache full computes what the one that filled it did.
        """
        files = [self._file(row) for row in batch.rows]
        known = {file: self._load(file, row) for file, row in zip(files, batch.rows, strict=True) if file.is_file()}
        if set(files) - known.keys():
            told, lengths = ask(), [len(row.places) for row in batch.rows]
            parts = zip(torch.split(told.ids, lengths), torch.split(told.logprobs, lengths), strict=True)
            for file, part in zip(files, parts, strict=True):
                if file not in known:  # of equal rows the first one counts
                    known[file] = self._store(file, *part)
        ids, logprobs = zip(*(known[file] for file in files), strict=True)
        device = batch.ids.device
        return TopTeacher(torch.cat(ids).to(device), torch.cat(logprobs).to(device), self.about["vocabulary"])

    def _file(self, row: Row) -> Path:
        read = row.tokens[: row.places[-1]]  # nothing is predicted from the last token
        name = hashlib.sha256(array("q", [len(row.places), *row.places, *read]).tobytes()).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def _load(self, file: Path, row: Row) -> tuple[Tensor, Tensor]:
        try:
            stored = load_file(file)
            ids, logprobs = stored["ids"].long(), stored["logprobs"]
        except (OSError, SafetensorError, KeyError) as error:
            raise RunError(f"{file}: cannot read: {error}; remove it, and the teacher is asked again") from error
        if not len(ids) == len(logprobs) == len(row.places):
            raise RunError(f"{file}: wanted {len(row.places)} tokens, came {len(ids)}; remove it, it is of other rows")
        return ids, logprobs

    def _store(self, file: Path, ids: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Write a row and return what reading it gives."""
        tensors = {"ids": ids.int().cpu().contiguous(), "logprobs": logprobs.cpu().contiguous()}
        try:
            if not (self.folder / MANIFEST).is_file():
                self.folder.mkdir(parents=True, exist_ok=True)
                text = json.dumps(self.about, indent=2) + "\n"
                _appear(self.folder / MANIFEST, lambda aside: aside.write_text(text, encoding="utf-8"))
            file.parent.mkdir(exist_ok=True)
            _appear(file, lambda aside: save_file(tensors, aside))
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file}: cannot write: {error}; make room, or leave teacher_cache out") from error
        return tensors["ids"].long(), tensors["logprobs"]


def _appear(file: Path, write: Callable[[Path], Any]) -> None:
    """Write a file aside and rename it, so that a reader finds it whole or not at all."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    write(aside)
    os.replace(aside, file)


def fingerprint(folder: Path) -> str:
    """Return a hash of what makes up the model of a folder: its config and every byte of its weights."""
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if any(fnmatch(file.name, pattern) for pattern in _MODEL_FILES):
            with file.open("rb") as stream:
                total.update(f"{file.name}\n{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
