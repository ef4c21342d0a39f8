"""Checkpoints: Hugging Face folders with the optimizer beside the weights, written aside and renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..agents.models import Decoder, LanguageModel, has_adapter, save_adapter, save_any, save_classifier
from ..agents.models.folder import copy_tokenizer
from ..agents.renderer import Renderer
from ..tools.errors import RunError
from ..tools.messages import assistant, user
from .critic import Critic
from .update import Updater

ADAPTER = "adapter"
"""Folder of the adapter beside the merged weights, in PEFT's format."""
CRITIC = "critic"
"""Folder of the critic in a checkpoint."""

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


def save_scorer(model: LanguageModel, critic: Critic, start: Path, renderer: Renderer, target: Path) -> None:
    """Write `target` as a sequence classifier: the layers of `model`, adapters merged, under the head of `critic`.

    The tokenizer is that of `start`, and `renderer` its renderer, which tells how conversations end.
    """
    assert isinstance(model, Decoder)
    ends = {*renderer.stop_ids, renderer.conversation([user("x"), assistant("y")])[-1]}
    score = critic.head.weight.detach()
    write_aside(target, lambda folder: save_classifier(model, score, folder, start, ends))


def save_checkpoint(folder: Path, updater: Updater, start: Path, state: dict[str, Any]) -> None:
    """Fill `folder` with what `load_updater` and `load_state` continue from; the caller writes aside.

    The model's folder, the optimizer beside it, a critic in the folder `critic`, and `state` as JSON, whose `step` says
    how many steps were made. `start` is where training began, whose tokenizer is copied.
    """
    _write_model(updater.model, start, folder)
    if updater.critic is not None:
        updater.critic.save(folder / CRITIC, start)
    tensors = {
        f"{name}/{key}": value.contiguous()
        for name, parameter in updater.moved(state["step"]).items()
        for key, value in updater.optimizer.state[parameter].items()
    }
    save_file(tensors, folder / _OPTIMIZER)
    (folder / _STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def save_critic(critic: Critic, start: Path, target: Path) -> None:
    """Write the critic of a finished run: a Hugging Face folder with its head, or the head alone where it shares."""
    write_aside(target, lambda folder: critic.save(folder, start))


def load_updater(folder: Path, updater: Updater, step: int) -> None:
    """Give optimizer and critic the state they had when `folder` was written, after `step` steps.

    The model's own weights are loaded before, see `build`. Raises RunError, or ModelError, for those of another model.
    """
    if updater.critic is not None:
        updater.critic.load(folder / CRITIC)
    file = folder / _OPTIMIZER
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file}: cannot read: {error}; remove {folder} and --resume from the one before") from error
    states: dict[str, dict[str, torch.Tensor]] = {}
    parameters = updater.moved(step)
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        if name not in parameters or (field != "step" and tensor.shape != parameters[name].shape):
            raise RunError(f"{file}: {key} {tuple(tensor.shape)} does not belong to this model")
        # Copied, for the file may be pruned while mapped; the fused AdamW keeps its count of steps on the device too.
        states.setdefault(name, {})[field] = tensor.to(parameters[name].device, copy=True)
    if missing := parameters.keys() - states.keys():
        raise RunError(f"{file}: holds no state of {sorted(missing)[0]} ({len(missing)} parameters lack it)")
    for name, state in states.items():
        updater.optimizer.state[parameters[name]] = state


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
    copy_tokenizer(start, folder)
    if has_adapter(model):
        save_adapter(model, folder / ADAPTER, start)
