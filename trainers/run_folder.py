"""The folder of a run: config, metrics, trajectories, checkpoints, the finished model.

::

    RUN/config.json               resolved config and where each value came from
    RUN/run_id                    the id that the run's trajectories bear
    RUN/metrics.jsonl             one line a step, the source of truth
    RUN/trajectories/step_000001.jsonl
    RUN/checkpoints/step_000050/  a Hugging Face folder with the optimizer beside the weights
    RUN/best/                     the model of the best evaluation, and best.json (with eval_steps)
    RUN/debug.jsonl               decoded samples (with debug_mode)
    RUN/nonfinite_step_000012.jsonl  the batch whose loss or gradient was not finite; the run stopped there
    RUN/<prefix>/                 the finished model (full_sft, grpo, agent, ...)
    RUN/handoff.json              what inference needs to know of it
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..agents.store import TrajectoryWriter
from ..agents.trajectory import Trajectory
from ..tools.errors import ConfigError, RunError
from .config import Resolved

#: Keys that change what is written or how fast, not what is learnt: a resumed run may have other values.
_FREE_KEYS = {
    "save_steps", "save_total_limit", "logging_steps", "torch_threads", "save_trajectories", "output_dir", "report_to",
    "debug_mode", "debug_interval",
}  # fmt: skip
_STEP = re.compile(r"step_(\d+)")
PREFIXES = {"sft": "full_sft", "distill": "full_dist", "ppo": "ppo_actor"}
"""Names of finished models that are not their algorithm's."""
HANDOFF = "handoff.json"
"""File in the folder of a finished run: what inference needs to know of its model."""


class RunFolder:
    """Paths of one run and the only code that writes there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.debug = path / "debug.jsonl"
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"

    @cached_property
    def run_id(self) -> str:
        """The id in this run's trajectories: kept in the folder, so that files of several runs can be merged.

        Where no folder was begun (a dry run) it is new, and nothing is written.
        """
        file = self.path / "run_id"
        return file.read_text(encoding="utf-8") if file.exists() else uuid4().hex

    @classmethod
    def create(cls, resolved: Resolved) -> RunFolder:
        """Start a run in a new or empty folder. Raises ConfigError when it holds something, or cannot be written."""
        folder = cls(Path(resolved.config.output_dir))
        folder.check_free()
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / "run_id").write_text(uuid4().hex, encoding="utf-8")
            resolved.dump(folder.path / "config.json")
        except OSError as error:
            raise ConfigError(f"output folder {folder.path}: cannot write: {error.strerror or error}") from error
        return folder

    @classmethod
    def resume(cls, resolved: Resolved) -> RunFolder:
        """Go on with a run. Raises ConfigError when there is none or its config differs in what is learnt."""
        folder = cls(Path(resolved.config.output_dir))
        stored_path = folder.path / "config.json"
        if not stored_path.is_file():
            raise ConfigError(f"--resume: {folder.path} holds no run (no config.json); start it without --resume")
        stored, wanted = Resolved.load(stored_path).config.effective(), resolved.config.effective()
        # a key that one of them does not read lies behind another that differs
        differing = [k for k in sorted(stored.keys() & wanted.keys()) if stored[k] != wanted[k]]
        differing = [key for key in differing if key not in _FREE_KEYS]
        if differing:
            key = differing[0]
            raise ConfigError(
                f"--resume: the run in {folder.path} has {key} = {stored.get(key)!r}, now {wanted.get(key)!r} was "
                f"asked for ({len(differing)} keys differ); give the same options, or another --output"
            )
        return folder

    def check_free(self) -> None:
        """Raise ConfigError when the folder is there and holds something."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            held = "another run" if (self.path / "config.json").exists() else "files"
            raise ConfigError(
                f"output folder {self.path} already holds {held}: give another --output, or --resume to go on"
            )

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one line of metrics and bring it to the disk."""
        append_lines(self.metrics, [metrics])

    def log_debug(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append decoded samples, each with its `step`."""
        append_lines(self.debug, lines)

    def write_nonfinite(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write down the batch of a step that broke the numbers, and return its file."""
        file = self.path / f"nonfinite_step_{step:06d}.jsonl"
        file.unlink(missing_ok=True)
        append_lines(file, records)
        return file

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics written so far; a last line that a kill has torn is none."""
        return _read_lines(self.metrics) if self.metrics.exists() else []

    def read_best(self) -> dict[str, Any] | None:
        """Return what `best/best.json` says; None where no evaluation was kept."""
        file = self.best / "best.json"
        if not file.is_file():
            return None
        try:
            record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{file}: cannot read: {error}; remove {self.best}") from error
        return record

    def write_json(self, name: str, record: Mapping[str, Any]) -> Path:
        """Write a record of the run, aside and renamed, and return its file."""
        target = self.path / name
        aside = target.with_name(f"{name}.tmp")
        try:
            aside.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(aside, target)
        except OSError as error:
            raise RunError(f"{target}: cannot write: {error.strerror or error}") from error
        return target

    def rewind(self, step: int) -> None:
        """Drop the metrics and samples of steps after `step`: they will be made again, the same."""
        for file in (self.metrics, self.debug):
            if file.exists():
                kept = [line for line in _read_lines(file) if line["step"] <= step]
                aside = file.with_suffix(".tmp")
                aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
                os.replace(aside, file)

    def write_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write the episodes of one step; the file is whole or absent."""
        target = self.path / "trajectories" / f"step_{step:06d}.jsonl"
        aside = target.with_suffix(".partial")
        aside.unlink(missing_ok=True)
        with TrajectoryWriter(aside) as writer:
            for trajectory in trajectories:
                writer.append(trajectory)
        os.replace(aside, target)

    def checkpoint_path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.checkpoints / f"step_{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        if not self.checkpoints.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def prune(self, keep: int | None) -> None:
        """Remove all but the latest `keep` checkpoints (None: keep all)."""
        if keep is not None:
            for step in self.checkpoint_steps()[:-keep]:
                shutil.rmtree(self.checkpoint_path(step), ignore_errors=True)


def append_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records as JSON, one a line, and bring them to the disk. Raises RunError naming the file."""
    try:
        with file.open("a", encoding="utf-8") as opened:
            opened.writelines(json.dumps(record) + "\n" for record in records)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise RunError(f"{file}: cannot write: {error.strerror or error}") from error


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of lines; a last line that a kill has torn is none."""
    *whole, _torn = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in whole]
