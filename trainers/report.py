"""The picture of a run: its curve over the steps, from `metrics.jsonl` alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tools.errors import DataError

_PANELS = {"reward": "mean reward", "success": "success", "eval/success": "held-out success", "loss": "loss"}
_SMOOTHED_OVER = 20  # the mean line spans 1/20 of the run
_INK, _RAW, _LINE = "#222222", "#9db8d9", "#1f5fa8"


def reward_curve(run: Path, png: Path) -> None:
    """Draw `RUN/metrics.jsonl` into `png`: reward and success over the steps, or the loss where nothing is rewarded.

    Success on held-out tasks has a panel of its own. The bold line is a trailing mean over a twentieth of the run.
    Raises DataError when there are no metrics, or the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = _read_metrics(run / "metrics.jsonl")
    names = [name for name in _PANELS if name != "loss" and any(name in line for line in lines)] or ["loss"]
    figure = Figure(figsize=(8, 1 + 2.6 * len(names)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        _draw(panel, name, [(line["step"], line[name]) for line in lines if name in line])
    panels[0].set_title(_title(run), loc="left", fontsize=12, color=_INK, fontweight="bold")
    panels[-1].set_xlabel("step", color=_INK)
    figure.align_ylabels(panels)
    try:
        figure.savefig(png)
    except OSError as error:
        raise DataError(f"{png}: cannot write: {error.strerror or error}") from error


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Return at each place the mean of the last `window` values, of fewer at the start."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [
        (sums[end] - sums[max(0, end - window)]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)
    ]


def _draw(panel: Any, name: str, points: list[tuple[int, float]]) -> None:
    steps, values = zip(*points, strict=True)
    window = max(1, len(values) // _SMOOTHED_OVER)
    if window > 1:
        panel.plot(steps, values, color=_RAW, linewidth=1, label="each step")
    smooth = trailing_mean(values, window)
    panel.plot(steps, smooth, color=_LINE, linewidth=2.2, label=f"mean of {window} steps" if window > 1 else None)
    panel.annotate(
        f"{smooth[-1]:.1%}" if name.endswith("success") else f"{smooth[-1]:.3g}",
        (steps[-1], smooth[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=_LINE,
    )
    if len(values) == 1:
        panel.plot(steps, values, "o", color=_LINE)
    panel.set_ylabel(_PANELS[name], color=_INK)
    if name.endswith("success"):
        panel.set_ylim(-0.03, 1.03)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panel.grid(True, color="#e6e6e6", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    if window > 1:
        panel.legend(frameon=False, fontsize=9)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
    if not lines:
        raise DataError(f"{path}: no step has been finished yet")
    return lines


def _title(run: Path) -> str:
    """Return `algo, env` from the run's config, or the folder's name where there is none."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError):
        return run.name
    source = config.get("env") or Path(config.get("data") or config.get("trajectories") or run).name
    return ", ".join([config["algo"], source])
