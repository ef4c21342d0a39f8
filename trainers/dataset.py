"""Stored trajectories as batches: the data order is a pure function of seed and step, so nothing has to be saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from ..agents.renderer import Renderer
from ..agents.replay import render_trajectory
from ..agents.store import read_trajectories
from ..agents.trajectory import Sampling, Trajectory
from ..tools.errors import DataError

_NAMED = 10  # trajectories named in an error


class TrajectoryDataset:
    """The trajectories of a file, rendered for one model, in an order reshuffled every epoch.

    Args:
        path: a file that `gymtune rollout` wrote.
        renderer: gives tokens to trajectories that have none (or another model's).
        min_reward: leaves out those that earned less, or whose reward is not known.
        max_length: longest row the model takes.
        seed: of the order.

    `notes` says what a reader should know and need not mend. Raises DataError for a broken file, no trajectory left,
    and rows that are too long, naming them.
    """

    def __init__(
        self, path: str | Path, renderer: Renderer, *, min_reward: float | None, max_length: int, seed: int
    ) -> None:
        self.seed = seed
        self.left_out = 0
        self.notes: list[str] = []
        self.items: list[Trajectory] = []
        long = []
        for trajectory in read_trajectories(path):
            reward = trajectory.reward
            if trajectory.error is not None or (min_reward is not None and (reward is None or reward < min_reward)):
                self.left_out += 1
                continue
            rendered = render_trajectory(trajectory, renderer)
            if (length := longest_row(rendered)) > max_length:
                long.append(f"{trajectory.trajectory_id} has {length} tokens")
            if rendered.sampled_tokens:
                self.items.append(rendered)
            else:
                self.left_out += 1
        if long:
            raise DataError(_too_long(path, long, max_length))
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
                orders[epoch] = epoch_order(count, self.seed, epoch)
            chosen.append(self.items[orders[epoch][offset]])
        return chosen


class GroupDataset:
    """The groups of a file of sampled trajectories, for the algorithms that learn from what a policy did.

    A group is the trajectories of one `group_id`. Failed ones, those whose reward is not known, and groups of fewer
    than `min_group_size` that are left after that, are left out and counted in `notes`.

    Args:
        path: a file that `gymtune rollout` or a run wrote.
        renderer: of the model that learns; its tokens must be those of the file, for log-probs belong to tokens.
        min_group_size: 1 where no group is compared.
        max_length: longest row the model takes.
        seed: of the order.

    Raises DataError for a broken file, a trajectory that stands there twice, and no group left; and naming the
    trajectories (ten, then a count) whose tokens have no log-probs, are another tokenizer's, were sampled greedily, or
    are more than the model takes.
    """

    def __init__(
        self, path: str | Path, renderer: Renderer, *, min_group_size: int, max_length: int, seed: int
    ) -> None:
        self.path, self.seed = path, seed
        self.left_out = 0
        self.notes: list[str] = []
        groups: dict[str, list[Trajectory]] = {}
        seen: set[str] = set()
        faults: dict[str, list[str]] = {}
        long: list[str] = []
        for trajectory in read_trajectories(path):
            name = trajectory.trajectory_id
            if name in seen:
                raise DataError(f"{path}: trajectory {name} stands there twice: keep one of them")
            seen.add(name)
            if trajectory.reward is None or not any(turn.text or turn.end > turn.start for turn in trajectory.turns):
                self.left_out += 1
                continue
            if fault := _unfit(trajectory, renderer):
                faults.setdefault(fault, []).append(f"{name} (agent {trajectory.agent!r})")
            elif (length := longest_row(trajectory)) > max_length:
                long.append(f"{name} has {length} tokens")
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        told = [f"{path}: {fault}: {_listed(names)}" for fault, names in faults.items()]
        if long:
            told.append(_too_long(path, long, max_length))
        if told:
            raise DataError("; ".join(told))
        self.groups = [group for group in groups.values() if len(group) >= min_group_size]
        if not self.groups:
            raise DataError(
                f"{path}: no group to learn from, wanted {min_group_size} episodes or more of one group_id whose "
                f"reward is known; came {len(groups)} smaller groups, and {self.left_out} episodes that failed or have "
                "no reward. `gymtune rollout --num-generations N` samples groups"
            )
        self._note(len(groups) - len(self.groups))
        if min_group_size > 1:
            equal = sum(len({trajectory.reward for trajectory in group}) == 1 for group in self.groups)
            self.notes += [f"{equal} of {len(self.groups)} groups have equal rewards: they teach nothing"] * (equal > 0)

    @property
    def most_turns(self) -> int:
        """Turns of the longest episode."""
        return max(len(trajectory.turns) for group in self.groups for trajectory in group)

    @property
    def with_tools(self) -> bool:
        """Whether any episode had tools to call."""
        return any(trajectory.tools != "[]" for group in self.groups for trajectory in group)

    def batch(self, step: int, size: int) -> list[Trajectory]:
        """Return the trajectories of the `size` groups of step `step` (0-based), those of a group one after another.

        No group comes twice in a step: where an epoch has fewer than `size` left, the next one begins; a file that has
        fewer gives all it has.
        """
        size = min(size, len(self.groups))
        epoch, place = divmod(step, len(self.groups) // size)
        order = epoch_order(len(self.groups), self.seed, epoch)
        return [trajectory for index in order[place * size :][:size] for trajectory in self.groups[index]]

    def _note(self, small: int) -> None:
        """Write down what was left out, and how the episodes were sampled where that is not the plain way."""
        if self.left_out:
            self.notes.append(f"{self.left_out} episodes are left out: they failed, have no reward, or said nothing")
        if small:
            self.notes.append(f"{small} groups are left out: too few episodes to compare")
        every = [trajectory for group in self.groups for trajectory in group]
        samplings = [trajectory.sampling or Sampling() for trajectory in every]
        temperatures = sorted({sampling.temperature for sampling in samplings})
        if len(temperatures) > 1:
            counts = (f"{t:g} ({sum(s.temperature == t for s in samplings)} episodes)" for t in temperatures)
            self.notes.append(f"sampled at temperatures {', '.join(counts)}: each counts at its own")
        if narrow := sum(s.top_p < 1 or s.top_k > 0 or s.min_p > 0 for s in samplings):
            self.notes.append(
                f"{narrow} episodes were sampled with top-p, top-k or min-p: their log-probs are of the full softmax, "
                "so ratios are off where the policy leaves what was allowed"
            )


Dataset = TrajectoryDataset | GroupDataset


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """Return 0 to `count` - 1 in the order of an epoch."""
    order = list(range(count))
    Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


def longest_row(trajectory: Trajectory) -> int:
    """Return the tokens of the longest segment."""
    return max((end - start for start, end in trajectory.segments), default=0)


def _unfit(trajectory: Trajectory, renderer: Renderer) -> str:
    """Return what keeps an episode from having a ratio; nothing where it has one."""
    said = [p for p, trained in zip(trajectory.logprobs, trajectory.response_mask, strict=True) if trained]
    if not said or None in said:
        return "no log-probs of what was said, so no policy sampled it (sft takes such episodes)"
    if trajectory.tokenizer != renderer.fingerprint:
        return "tokens of another tokenizer or chat template than the model's, and log-probs belong to tokens"
    if trajectory.sampling is not None and trajectory.sampling.temperature == 0:
        return "sampled greedily, and RL needs a temperature above 0"
    if any(start < end and trajectory.response_mask[start] for start, end in trajectory.segments):
        return "a segment that begins with mask 1, so nothing predicts its first token"
    return ""


def _too_long(path: str | Path, long: Sequence[str], max_length: int) -> str:
    return f"{path}: trajectory {_listed(long)}; the model takes {max_length}"


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
