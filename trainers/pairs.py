"""Pairs and labels: of episodes of one group, or of replies on file, which is the better one, and which are good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Literal

from ..agents.renderer import Renderer
from ..agents.trajectory import Trajectory
from ..tools.errors import DataError
from .stored import HOLDS, FileDataset, StoredFile, listed, spoke

Pairing = Literal["best_worst", "all"]


def pairs_of(
    trajectories: Sequence[Trajectory], how: Pairing = "best_worst", *, ties: bool = False
) -> list[Trajectory]:
    """Return the pairs of each group as a flat list: chosen, rejected, chosen, rejected, ...

    "best_worst" takes the best and the worst episode of a group, the earlier of equals; "all" every two that earned
    different rewards. With `ties`, a group whose episodes all earned the same gives one pair of them; without, none.
    Episodes that failed, said nothing or have no reward are left out, and so is a pair of the very same words. A group
    is what has the same `group_id` and the same first tokens, up to what the agent said: those of a pair share them.
    """
    return [one for group in _groups(trajectories) for pair in _pairs(group, how, ties=ties) for one in pair]


def labelled(trajectories: Sequence[Trajectory], threshold: float | None = None) -> list[Trajectory]:
    """Return the episodes that are known to be good or bad, copies whose `success` says which.

    Good is what succeeded; with a `threshold`, what earned so much. Those that failed, said nothing, or of which it is
    not known are left out.
    """
    found = []
    for trajectory in trajectories:
        if trajectory.error is not None or not spoke(trajectory):
            continue
        good = trajectory.success
        if threshold is not None:
            good = None if trajectory.reward is None else trajectory.reward >= threshold
        if good is not None:
            found.append(trajectory.model_copy(update={"success": good}))
    return found


def _groups(trajectories: Sequence[Trajectory]) -> Iterator[list[tuple[float, Trajectory]]]:
    """Yield the episodes of each group with what they earned, in order."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[float, Trajectory]]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None and spoke(trajectory):  # one that failed has no reward
            key = trajectory.group_id, _prompt(trajectory)
            groups.setdefault(key, []).append((trajectory.reward, trajectory))
    yield from groups.values()


def _prompt(trajectory: Trajectory) -> tuple[int, ...]:
    """Return the tokens before the first one that the agent said; none where an episode is not rendered."""
    mask = trajectory.response_mask
    return tuple(trajectory.tokens[: mask.index(1)]) if 1 in mask else ()


def _pairs(
    group: Sequence[tuple[float, Trajectory]], how: Pairing, *, ties: bool
) -> Iterator[tuple[Trajectory, Trajectory]]:
    """Yield the pairs of one group, the better one first."""
    rewards = [reward for reward, _ in group]
    if len(set(rewards)) < 2:
        tied = ((one, other) for (_, one), (_, other) in combinations(group, 2) if not same_words(one, other))
        yield from islice(tied, int(ties))
        return
    if how == "best_worst":
        group = [group[rewards.index(max(rewards))], group[rewards.index(min(rewards))]]
    for (earned, one), (other_earned, other) in combinations(group, 2):
        if earned != other_earned and not same_words(one, other):
            yield (one, other) if earned > other_earned else (other, one)


def same_words(one: Trajectory, other: Trajectory) -> bool:
    """Whether two episodes are told apart by nothing: neither by tokens nor by texts."""
    return one.tokens == other.tokens and [turn.text for turn in one.turns] == [turn.text for turn in other.turns]


class PairDataset(FileDataset):
    """Pairs, the better reply first: those of a file of pairs, or of the groups of a file of episodes.

    Args:
        path: a file of either kind.
        renderer: gives tokens to what has none (or another model's).
        max_length: longest row the model takes.
        seed: of the order.
        how: which pairs of a group; see `pairs_of`.
        ties: keeps one pair of a group of equals, both with the same reward.
        drop_long: leaves out what is longer than the model takes, in place of refusing the file.

    A batch is flat: chosen, rejected, chosen, rejected, ... Pairs of the very same words are left out. Raises DataError
    for a broken file, one of another kind, no pair left, and rows that are too long, naming the lines.
    """

    def __init__(
        self,
        path: str | Path,
        renderer: Renderer,
        *,
        max_length: int,
        seed: int,
        how: Pairing = "best_worst",
        ties: bool = False,
        drop_long: bool = False,
    ) -> None:
        file = StoredFile(path, renderer)
        if file.kind not in ("preference", "trajectories"):
            raise file.unfit("pairs of a better and a worse reply")
        file.leave_out("their reward is not known", lambda episode: episode.reward is None)
        file.render(max_length=max_length, drop_long=drop_long)
        flat = pairs_of(file.episodes, how, ties=ties)
        notes = _unpaired(file, flat)
        if not flat:
            raise file.nothing("pair", *notes, "A pair is two replies to one prompt, one better than the other")
        super().__init__(file, list(zip(flat[::2], flat[1::2], strict=True)), seed)
        self.notes += notes
        self.summary = f"{len(self.examples)} pairs"
        if file.kind == "trajectories":
            self.summary += f" of {len({one.group_id for one in flat})} groups"


def _unpaired(file: StoredFile, paired: Sequence[Trajectory]) -> list[str]:
    """Return what there is to say of the groups that give no pair."""
    groups: dict[str, list[Trajectory]] = {}
    for episode in file.episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    inside = {one.group_id for one in paired}
    alone = [group for name, group in groups.items() if name not in inside]
    if file.kind == "trajectories":
        why = "too few episodes, equal rewards, or the same words"
        return [f"{len(alone)} of {len(groups)} groups give no pair: {why}"] if alone else []
    same = [str(file.lines[group[0].trajectory_id]) for group in alone if len(group) > 1]
    return [f"{len(same)} pairs are left out, chosen and rejected say the same: lines {listed(same)}"] if same else []


class LabelledDataset(FileDataset):
    """Replies that are known to be good or bad, by `success`: of a file of labels, of pairs, or of episodes.

    Args:
        path: a file of one of these kinds.
        renderer: gives tokens to what has none (or another model's).
        max_length: longest row the model takes.
        seed: of the order.
        threshold: of a file of episodes, good is what earned so much; None: what succeeded.
        drop_long: leaves out what is longer than the model takes, in place of refusing the file.

    A pair is two replies, one of either sort, that need not be in one batch. Raises DataError for a broken file, one of
    another kind, one without both sorts, and rows that are too long, naming the lines.
    """

    def __init__(
        self,
        path: str | Path,
        renderer: Renderer,
        *,
        max_length: int,
        seed: int,
        threshold: float | None = None,
        drop_long: bool = False,
    ) -> None:
        file = StoredFile(path, renderer)
        if file.kind not in ("unpaired", "preference", "trajectories"):
            raise file.unfit("replies that are labelled good or bad")
        threshold = threshold if file.kind == "trajectories" else None
        known = {one.trajectory_id for one in labelled(file.episodes, threshold)}
        file.leave_out("it is not known whether they are good", lambda one: one.trajectory_id not in known)
        file.render(max_length=max_length, drop_long=drop_long)
        replies = labelled(file.episodes, threshold)
        if not replies:
            raise file.nothing("reply", f"Such a file is for {HOLDS[file.kind][1]}")
        good = sum(reply.success is True for reply in replies)
        if good in (0, len(replies)):
            sort, mend = ("good", "sft learns from them alone") if good else ("bad", "label_threshold may be too high")
            raise DataError(f"{path}: wanted good and bad replies, came {len(replies)} {sort} ones: {mend}")
        super().__init__(file, [[reply] for reply in replies], seed)
        self.summary = f"{good} good and {len(replies) - good} bad replies"
