"""Meter: what a progress display says of episodes and of training steps. It counts; whoever draws it prints."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from .trajectory import Trajectory

_SHOWN = ("reward", "success", "eval/success", "loss")


class Meter:
    """Counts towards `total` from `done`: running reward, tokens a second, seconds that are left."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done = total, done
        self._began = monotonic()
        self._counted = self._scored = self._tokens = 0
        self._reward = 0.0

    def episode(self, trajectory: Trajectory) -> str:
        """Count a finished episode and return the text beside the bar."""
        self.done, self._counted = self.done + 1, self._counted + 1
        self._tokens += trajectory.sampled_tokens
        if trajectory.reward is not None:
            self._reward, self._scored = self._reward + trajectory.reward, self._scored + 1
        mean = f"{self._reward / self._scored:.3f}" if self._scored else "-"
        return f"reward {mean}  {self._tokens / max(monotonic() - self._began, 1e-9):.0f} tokens/s"

    def step(self, metrics: Mapping[str, Any]) -> str:
        """Take the metrics of a training step and return the text beside the bar."""
        self.done, self._counted = metrics["step"], self._counted + 1
        tokens = metrics["num_tokens"]
        new = tokens - self._tokens if self._tokens else tokens / self.done  # a resumed run starts with its mean
        self._tokens = tokens
        shown = [f"{name} {metrics[name]:.4f}" for name in _SHOWN if name in metrics]
        return "  ".join([*shown, f"{new / max(metrics['step_time'], 1e-9):.0f} tokens/s"])

    @property
    def seconds_left(self) -> float:
        """Estimate from the pace of this process so far."""
        return (monotonic() - self._began) / max(self._counted, 1) * (self.total - self.done)
