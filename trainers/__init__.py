"""Trainers: batch, log-probs, advantages, losses, the loop, one file an algorithm."""

from .config import Resolved, TrainConfig, resolve
from .loop import Trainer
from .train import Listeners, train

__all__ = ["Listeners", "Resolved", "TrainConfig", "Trainer", "resolve", "train"]
