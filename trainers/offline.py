"""Stored log-probs against the model that is to learn from them: a ratio between strangers corrects nothing."""

from __future__ import annotations

from statistics import fmean

from ..agents.models import LanguageModel
from ..agents.trajectory import Trajectory
from ..tools.errors import DataError
from .annotate import token_numbers
from .config import TrainConfig
from .dataset import GroupDataset
from .experience import experiences_of
from .policy import policy_logprobs

FAR, STRANGE = 0.5, 3.0
"""Mean |stored - model's log-prob|, nats a token: told of above the first, refused above the second.

A policy some steps older differs by hundredths; another temperature or a fine-tuned model by tenths. A mean of 3 is a
factor of 20 a token: no ratio is left that clipping would let through.
"""

_TRIED = 16  # episodes


def check_stored(model: LanguageModel, dataset: GroupDataset, config: TrainConfig) -> list[str]:
    """Compare the log-probs of the first episodes with the model's own and return what there is to tell.

    Raises DataError when they are another model's.
    """
    trajectories = dataset.batch(0, config.prompts_per_step)[:_TRIED]
    gap = logprob_gap(model, trajectories, config.micro_batch_tokens)
    said = (
        f"{dataset.path}: the log-probs of {len(trajectories)} episodes are {gap:.2f} nats a token away from those of "
        f"model {config.model}"
    )
    if gap > STRANGE:
        raise DataError(f"{said}: another model sampled them. Train that one, or sample with this one")
    return [f"{said}: ratios will be far from 1"] if gap > FAR else []


def logprob_gap(model: LanguageModel, trajectories: list[Trajectory], max_tokens: int) -> float:
    """Return the mean of |stored - model's log-prob| over the trainable tokens, each at its own temperature."""
    experiences = experiences_of(trajectories, need_logprobs=True)
    device = model.head_weight.device
    own = token_numbers(experiences, lambda batch: policy_logprobs(model, batch)[0], max_tokens, device)
    pairs = (zip(e.sampler_logprobs, found, strict=True) for e, found in zip(experiences, own, strict=True))
    return fmean(abs(stored - found) for pair in pairs for stored, found in pair)
