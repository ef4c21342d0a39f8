"""Trainers: batch, log-probs, advantages, losses, the loop, one file an algorithm.

Config and presets come without torch, so that a command can check its options at once; the rest is imported when it is
first asked for.
"""

from typing import TYPE_CHECKING, Any

from .config import Resolved, TrainConfig, resolve

if TYPE_CHECKING:
    from .build import Listeners, dry_run, train
    from .loop import Trainer

__all__ = ["Listeners", "Resolved", "TrainConfig", "Trainer", "dry_run", "resolve", "train"]


def __getattr__(name: str) -> Any:
    """Import what needs torch (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import build, loop

    globals().update(Listeners=build.Listeners, Trainer=loop.Trainer, dry_run=build.dry_run, train=build.train)
    return globals()[name]
