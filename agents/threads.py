"""CPU threads: as many as the process may use, and a word when others use them too.

How OpenMP threads wait for each other is set by the command line before torch is loaded (`cli.py`): they spin for some
microseconds and then sleep; on a machine that is busy they sleep at once, for threads that spin on a shared core can
be ten times slower. `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT` in the environment decide otherwise.
"""

from __future__ import annotations

import os

import torch

_BUSY = 0.75  # load a core from which others are said to be computing


def cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(count: int | None) -> None:
    """Let torch compute with `count` threads; None: what torch has chosen, but no more than there are cores."""
    torch.set_num_threads(count if count is not None else min(torch.get_num_threads(), cores()))


def oversubscribed(load: float | None = None) -> str | None:
    """Return a warning when other processes keep the cores busy (`load`: of the last minute), else None."""
    if load is None:
        if not hasattr(os, "getloadavg"):
            return None
        load = os.getloadavg()[0]
    threads = torch.get_num_threads()
    free = cores() - load
    if load < _BUSY or threads <= max(1.0, free + 0.5):
        return None
    return (
        f"the load is {load:.1f} on {cores()} cores and torch uses {threads} threads: others are computing too, and "
        f"threads that share a core are slow. --torch-threads {max(1, int(free))} may be faster"
    )
