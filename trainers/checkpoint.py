"""Checkpoints: Hugging Face folders with the optimizer beside the weights, written aside and renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..agents.models import LanguageModel, has_adapter, save_adapter, save_any, trainable_parameters
from ..tools.errors import RunError

_TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
ADAPTER = "adapter"
"""Folder of the adapter beside the merged weights, in PEFT's format."""

_STATE = "trainer_state.json"
_OPTIMIZER = "optimizer.safetensors"


def write_aside(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a folder beside `target`, bring it to the disk and rename it: `target` is whole or absent.

    A folder that is there already is moved away first and removed last, so a kill never leaves half of either.
    Raises RunError when the disk refuses; what was there before stays.
    """
    aside, old = target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        fill(aside)
        for file in (path for path in aside.rglob("*") if path.is_file()):
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.replace(target, old)
        os.replace(aside, target)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise RunError(f"{target}: cannot write: {error}; make room and go on with --resume") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if old.exists() and not target.exists():
            os.replace(old, target)


def save_pretrained(model: LanguageModel, start: Path, target: Path) -> None:
    """Write `target` as a Hugging Face folder: weights, config, and the tokenizer of `start`, where training began.

    Of a model with an adapter the weights are merged, and the adapter is saved beside them.
    """
    write_aside(target, lambda folder: _write_model(model, start, folder))


def save_checkpoint(
    target: Path, model: LanguageModel, start: Path, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Write what `load_optimizer` and `load_state` continue from: the model's folder, optimizer, `state` as JSON."""

    def fill(folder: Path) -> None:
        _write_model(model, start, folder)
        tensors = {
            f"{name}/{key}": value.contiguous()
            for name, parameter in trainable_parameters(model).items()
            for key, value in optimizer.state[parameter].items()
        }
        save_file(tensors, folder / _OPTIMIZER)
        (folder / _STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    write_aside(target, fill)


def load_optimizer(folder: Path, model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer` the state it had when `folder` was written. Raises RunError for one of another model."""
    file = folder / _OPTIMIZER
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file}: cannot read: {error}; remove {folder} and --resume from the one before") from error
    states: dict[str, dict[str, torch.Tensor]] = {}
    parameters = trainable_parameters(model)
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        if name not in parameters or (field != "step" and tensor.shape != parameters[name].shape):
            raise RunError(f"{file}: {key} {tuple(tensor.shape)} does not belong to this model")
        # Copied, for the file may be pruned while mapped; the fused AdamW keeps its count of steps on the device too.
        states.setdefault(name, {})[field] = tensor.to(parameters[name].device, copy=True)
    if missing := parameters.keys() - states.keys():
        raise RunError(f"{file}: holds no state of {sorted(missing)[0]} ({len(missing)} parameters lack it)")
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


def load_state(folder: Path) -> dict[str, Any]:
    """Return the JSON state of a checkpoint. Raises RunError for a file that is missing or broken."""
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder / _STATE}: cannot read: {error}; remove {folder} and --resume from the one before"
        ) from error
    return state


def _write_model(model: LanguageModel, start: Path, folder: Path) -> None:
    save_any(model, folder)
    _copy_tokenizer(start, folder)
    if has_adapter(model):
        save_adapter(model, folder / ADAPTER, start)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _TOKENIZER_FILES):
            shutil.copyfile(file, target / file.name)
