"""The folder of a run: config, metrics, trajectories, checkpoints, the finished model.

::

    RUN/config.json               resolved config and where each value came from
    RUN/run_id                    the id that the run's trajectories bear
    RUN/metrics.jsonl             one line a step, the source of truth
    RUN/trajectories/step_000001.jsonl
    RUN/checkpoints/step_000050/  a Hugging Face folder with the optimizer beside the weights
    RUN/<prefix>/                 the finished model (full_sft, grpo, agent, ...)
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..agents.store import TrajectoryWriter
from ..agents.trajectory import Trajectory
from ..tools.errors import ConfigError, RunError
from .config import Resolved

#: Keys that change what is written or how fast, not what is learnt: a resumed run may have other values.
_FREE_KEYS = {"save_steps", "save_total_limit", "logging_steps", "torch_threads", "save_trajectories", "output_dir"}
_STEP = re.compile(r"step_(\d+)")


class RunFolder:
    """Paths of one run and the only code that writes there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"

    @property
    def run_id(self) -> str:
        """The id in this run's trajectories: made once and kept here, so that files of several runs can be merged."""
        file = self.path / "run_id"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(uuid4().hex, encoding="utf-8")
        return file.read_text(encoding="utf-8")

    @classmethod
    def create(cls, resolved: Resolved) -> RunFolder:
        """Start a run in a new or empty folder. Raises ConfigError when it holds something, or cannot be written."""
        folder = cls(Path(resolved.config.output_dir))
        if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            held = "another run" if (folder.path / "config.json").exists() else "files"
            raise ConfigError(
                f"output folder {folder.path} already holds {held}: give another --output, or --resume to go on"
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
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
        differing = [k for k in sorted(stored.keys() | wanted.keys()) if stored.get(k) != wanted.get(k)]
        differing = [key for key in differing if key not in _FREE_KEYS]
        if differing:
            key = differing[0]
            raise ConfigError(
                f"--resume: the run in {folder.path} has {key} = {stored.get(key)!r}, now {wanted.get(key)!r} was "
                f"asked for ({len(differing)} keys differ); give the same options, or another --output"
            )
        return folder

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one line of metrics and bring it to the disk."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.metrics}: cannot write: {error.strerror or error}") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics written so far; a last line that a kill has torn is none."""
        if not self.metrics.exists():
            return []
        *whole, _torn = self.metrics.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in whole]

    def rewind(self, step: int) -> None:
        """Drop the metrics of steps after `step`: they will be made again, the same."""
        if not self.metrics.exists():
            return
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        aside = self.metrics.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(aside, self.metrics)

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
