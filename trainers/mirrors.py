"""Mirrors of the metrics: TensorBoard, Weights & Biases, Trackio. `metrics.jsonl` stays the source of truth.

Each package is imported when its mirror is asked for, and is an extra of the same name.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

from ..tools.errors import ConfigError
from .config import TrainConfig
from .run_folder import RunFolder

PROJECT = "gymtune"
"""Under which runs are filed where there are projects."""


class Mirror(ABC):
    """Shows the lines of metrics elsewhere as well.

    Raises ConfigError when its package is missing, before anything is done.
    """

    package: ClassVar[str]
    module: ClassVar[str]

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(
                f"report_to {self.package}: {error}; `pip install 'gymtune[{self.package}]'`, or leave it out"
            ) from error

    @abstractmethod
    def begin(self, run: RunFolder, config: TrainConfig, step: int) -> None:
        """Start or go on with the run, whose steps after `step` are still to be made."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a step."""

    @abstractmethod
    def end(self) -> None:
        """Bring everything to where it is kept."""


class TensorBoard(Mirror):
    """Event files in RUN/tensorboard; those of steps that a resumed run makes again are hidden."""

    package, module = "tensorboard", "torch.utils.tensorboard"

    def begin(self, run: RunFolder, config: TrainConfig, step: int) -> None:
        """Open the event file."""
        self.writer = self.api.SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self) -> None:
        """Close the event file."""
        self.writer.close()


class WeightsAndBiases(Mirror):
    """A run in RUN/wandb. Nothing leaves the machine unless WANDB_MODE says so (`online`); `wandb sync` sends it."""

    package, module = "wandb", "wandb"

    def begin(self, run: RunFolder, config: TrainConfig, step: int) -> None:
        """Start the run under the id that its trajectories bear, or go on with it."""
        self.run = self.api.init(
            project=PROJECT,
            name=run.path.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.path),
            config=config.effective(),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the step."""
        self.run.log(dict(values), step=step)

    def end(self) -> None:
        """Finish the run."""
        self.run.finish()


class Trackio(Mirror):
    """A run in Trackio's own local database, named for the run folder and its id."""

    package, module = "trackio", "trackio"

    def begin(self, run: RunFolder, config: TrainConfig, step: int) -> None:
        """Start the run, or go on with it."""
        name = f"{run.path.name}-{run.run_id[:8]}"
        self.api.init(project=PROJECT, name=name, config=config.effective(), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the step."""
        self.api.log(dict(values), step=step)

    def end(self) -> None:
        """Finish the run."""
        self.api.finish()


MIRRORS: Mapping[str, type[Mirror]] = {kind.package: kind for kind in (TensorBoard, WeightsAndBiases, Trackio)}


class Mirrors:
    """All mirrors of a run."""

    def __init__(self, names: Sequence[str]) -> None:
        self.all = [MIRRORS[name]() for name in dict.fromkeys(names)]
        self.begun: list[Mirror] = []

    def begin(self, run: RunFolder, config: TrainConfig, step: int) -> None:
        """Begin each; one that cannot begin leaves those before it to `end`."""
        for mirror in self.all:
            mirror.begin(run, config, step)
            self.begun.append(mirror)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Hand a line of metrics on: its numbers, under its step."""
        values = {name: float(value) for name, value in metrics.items() if isinstance(value, Real) and name != "step"}
        for mirror in self.begun:
            mirror.log(metrics["step"], values)

    def end(self) -> None:
        """End those that began."""
        while self.begun:
            self.begun.pop().end()
