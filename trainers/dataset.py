"""Stored trajectories as batches: the data order is a pure function of seed and step, so nothing has to be saved."""

from __future__ import annotations

from pathlib import Path
from random import Random

from ..agents.renderer import Renderer
from ..agents.replay import render_trajectory
from ..agents.store import read_trajectories
from ..agents.trajectory import Trajectory
from ..tools.errors import DataError


class TrajectoryDataset:
    """The trajectories of a file, rendered for one model, in an order reshuffled every epoch.

    Args:
        path: a file that `gymtune rollout` wrote.
        renderer: gives tokens to trajectories that have none (or another model's).
        min_reward: leaves out those that earned less, or whose reward is not known.
        max_length: longest row the model takes.
        seed: of the order.

    Raises DataError for a broken file, no trajectory left, or one that is too long (naming it).
    """

    def __init__(
        self, path: str | Path, renderer: Renderer, *, min_reward: float | None, max_length: int, seed: int
    ) -> None:
        self.seed = seed
        self.left_out = 0
        self.items: list[Trajectory] = []
        for trajectory in read_trajectories(path):
            reward = trajectory.reward
            if trajectory.error is not None or (min_reward is not None and (reward is None or reward < min_reward)):
                self.left_out += 1
                continue
            rendered = render_trajectory(trajectory, renderer)
            longest = max((end - start for start, end in rendered.segments), default=0)
            if longest > max_length:
                raise DataError(
                    f"{path}: trajectory {trajectory.trajectory_id} has {longest} tokens, the model takes {max_length}"
                )
            if rendered.sampled_tokens:
                self.items.append(rendered)
            else:
                self.left_out += 1
        if not self.items:
            raise DataError(
                f"{path}: no trajectory to learn from ({self.left_out} left out: failed, less reward than min_reward, "
                "or nothing said)"
            )

    def batch(self, step: int, size: int) -> list[Trajectory]:
        """Return the `size` trajectories of step `step` (0-based); epochs follow each other without a gap."""
        count = len(self.items)
        first = step * size
        orders: dict[int, list[int]] = {}
        chosen = []
        for place in range(first, first + size):
            epoch, offset = divmod(place, count)
            if epoch not in orders:
                orders[epoch] = list(range(count))
                Random(f"{self.seed}/epoch/{epoch}").shuffle(orders[epoch])
            chosen.append(self.items[orders[epoch][offset]])
        return chosen
