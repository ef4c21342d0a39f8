"""A reference that follows the policy: moved every few steps, kept in checkpoints so that a resumed run repeats it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..agents.models import LanguageModel
from ..agents.models.misfits import copy_weights
from ..tools.errors import RunError

REFERENCE = "reference.safetensors"
"""Its file in a checkpoint."""


@torch.no_grad()
def move_reference(reference: LanguageModel, policy: LanguageModel, alpha: float) -> None:
    """Set every weight of the reference to `alpha * policy + (1 - alpha) * reference`; with `alpha` 1 it is a copy.

    TR-DPO's soft update (arXiv:2404.09656), TRL's `ref_model_mixup_alpha`.
    """
    weights = dict(policy.named_parameters())
    for name, weight in reference.named_parameters():
        weight.lerp_(weights[name], alpha)


def save_reference(reference: LanguageModel, folder: Path) -> None:
    """Write the weights of the reference into the folder of a checkpoint."""
    weights = {name: weight.detach().cpu().contiguous() for name, weight in reference.named_parameters()}
    save_file(weights, folder / REFERENCE)


def load_reference(reference: LanguageModel, folder: Path) -> None:
    """Give the reference the weights it had in a checkpoint.

    Raises RunError for a file that cannot be read, ModelError for one of another model.
    """
    file = folder / REFERENCE
    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file}: cannot read: {error}; remove {folder} and --resume from the one before") from error
    copy_weights(dict(reference.named_parameters()), stored, file)
