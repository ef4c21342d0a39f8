"""What a plan finds out about models and runs: folders are looked at, no weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tools.errors import GymtuneError
from .run_folder import HANDOFF

_DEEP = ("*", "*/*", "*/*/*")  # how far below a folder runs and models are looked for


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model folder.

    Args:
        path: As it was given or found.
        role: The prefix that a run left it under (`full_sft`, `reward`, `grpo`, ...); `base` where no run did.
        told: Family, shape and size; what is wrong with it where there is a `fault`.
        fault: Whether it cannot be used.
        parameters: Numbers in its files; 0 where they were not counted.
        start: The model that its run started from.
        success: Of that run's last evaluation, in [0, 1].
    """

    path: str
    role: str
    told: str
    fault: bool = False
    parameters: int = 0
    start: str | None = None
    success: float | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run without a hand-off record: it runs still, or was stopped."""

    path: str
    algo: str
    steps: int
    max_steps: int


def look_at_model(path: Path) -> FoundModel:
    """Return what a model folder is; by the hand-off record of its run, where a run left it."""
    record: dict[str, Any] = {}
    if (path.parent / HANDOFF).is_file():
        record = _read(path.parent / HANDOFF)
        record = record if record.get("folder") == path.name else {}
    role, start = str(record.get("prefix", "base")), record.get("base_model")
    final = (record.get("success") or {}).get("final") or {}
    try:
        role, told, parameters = _inspect(path, role)
    except GymtuneError as error:
        return FoundModel(str(path), role, str(error), fault=True, start=start)
    return FoundModel(str(path), role, told, parameters=parameters, start=start, success=final.get("success"))


def _inspect(path: Path, role: str) -> tuple[str, str, int]:
    """Return the role of a folder, what there is to tell of it, and its parameters. Raises ModelError."""
    from ..agents.models.classifier import classifier_outline, is_classifier
    from ..agents.models.inspection import inspect_model

    if role == "reward" or is_classifier(path):
        shape = classifier_outline(path).config
        told = f"width {shape.hidden_size}, {shape.num_hidden_layers} layers, context {shape.max_position_embeddings}"
        return "reward", f"reward model, {shape.model_type}, {told}", 0
    facts = inspect_model(path)
    return role, str(facts), facts.parameters


def find_models(folder: Path) -> list[FoundModel]:
    """Return the models below a folder: those that runs left, the oldest first, then the others by name."""
    runs = [path.parent for path in _find(folder, HANDOFF)]
    runs.sort(key=lambda run: (run / HANDOFF).stat().st_mtime)
    left = []
    for run in runs:
        model = _read(run / HANDOFF).get("folder")
        if isinstance(model, str):
            left.append(look_at_model(run / model))
        else:
            left.append(FoundModel(str(run / HANDOFF), "?", "not the hand-off record of a run", fault=True))
    inside = {*runs, *(path.parent for path in _find(folder, "run_id"))}
    plain = [
        look_at_model(path.parent)
        for path in _find(folder, "config.json")
        if not inside & {path.parent, *path.parent.parents} and "model_type" in _read(path)
    ]
    return left + plain


def descended(models: list[FoundModel], first: FoundModel) -> list[FoundModel]:
    """Return `first` and those of `models` that runs made of it, straight or over others."""
    line = {Path(first.path).resolve()}
    kept = [first]
    for _ in models:  # a run may have ended before one that it built on was copied here: as many rounds as models
        for model in models:
            place = Path(model.path).resolve()
            if place not in line and model.start is not None and Path(model.start).resolve() in line:
                line.add(place)
                kept.append(model)
    return kept


def find_unfinished(folder: Path) -> list[Unfinished]:
    """Return the runs below a folder that left no finished model."""
    found = []
    for mark in _find(folder, "run_id"):
        run = mark.parent
        config = _read(run / "config.json").get("config")
        if (run / HANDOFF).is_file() or not isinstance(config, dict):
            continue
        metrics = run / "metrics.jsonl"
        steps = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        found.append(Unfinished(str(run), str(config.get("algo")), steps, int(config.get("max_steps", 0))))
    return found


def _find(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a name at most three folders deep, in the order of their paths."""
    here = [folder / name] if (folder / name).is_file() else []
    yield from here + sorted(path for depth in _DEEP for path in folder.glob(f"{depth}/{name}") if path.is_file())


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, an empty one where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
