"""Datasets: what of a file is imitated, and the groups of a file of sampled episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..agents.renderer import Renderer
from ..agents.store import read_trajectories
from ..agents.trajectory import Sampling, Trajectory
from ..envs.files import Kind
from ..tools.errors import DataError
from .stored import HOLDS, FileDataset, StoredFile, epoch_order, listed, longest_row, spoke

_IMITATED: dict[Kind, str] = {
    "trajectories": "episodes",
    "sft": "conversations",
    "preference": "chosen replies",
    "unpaired": "good replies",
    "prompts": "answers",
    "agentic": "answers",
    "verifiable": "answers",
    "bfcl": "answers",
}


class TrajectoryDataset(FileDataset):
    """What a file has to imitate: episodes, conversations, chosen or good replies, answers to questions.

    Args:
        path: a file of any kind with replies in it.
        renderer: gives tokens to what has none (or another model's).
        max_length: longest row the model takes.
        seed: of the order.
        min_reward: of a file of episodes, leaves out those that earned less, or whose reward is not known.
        best_of: of a file of episodes, leaves out all but so many of each group: the best, the earlier of equals.
        drop_long: leaves out what is longer than the model takes, in place of refusing the file.

    Raises DataError for a broken file, nothing left, and rows that are too long, naming the lines.
    """

    def __init__(
        self,
        path: str | Path,
        renderer: Renderer,
        *,
        max_length: int,
        seed: int,
        min_reward: float | None = None,
        best_of: int | None = None,
        drop_long: bool = False,
    ) -> None:
        file = StoredFile(path, renderer)
        if file.kind == "trajectories":
            _keep_rewarded(file, min_reward, known=best_of is not None)
        else:
            file.leave_out("their label is bad", lambda episode: episode.success is False)
        file.render(max_length=max_length, drop_long=drop_long)
        if file.kind == "trajectories" and best_of is not None:
            best = _best(file.episodes, best_of)
            file.leave_out(f"{best_of} better ones are in their group", lambda one: one.trajectory_id not in best)
        if not file.episodes and not file.left_out.total():
            raise file.unfit("replies to imitate")
        if not file.episodes:
            raise file.nothing(_IMITATED[file.kind], f"Such a file is for {HOLDS[file.kind][1]}")
        super().__init__(file, [[episode] for episode in file.episodes], seed)
        self.summary = f"{len(self.examples)} {_IMITATED[file.kind]}"


def _keep_rewarded(file: StoredFile, min_reward: float | None, *, known: bool) -> None:
    """Leave out what earned less than `min_reward`; where rewards count or are to be `known`, what has none."""
    if min_reward is not None or known:
        file.leave_out("their reward is not known", lambda episode: episode.reward is None)
    if min_reward is not None:
        file.leave_out(f"they earned less than {min_reward:g}", lambda episode: (episode.reward or 0.0) < min_reward)


def _best(episodes: Sequence[Trajectory], count: int) -> set[str]:
    """Return the ids of the `count` episodes of each group that earned most; the earlier of equals."""
    groups: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    ranked = (sorted(group, key=lambda episode: -(episode.reward or 0.0)) for group in groups.values())
    return {episode.trajectory_id for group in ranked for episode in group[:count]}


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
            if trajectory.reward is None or not spoke(trajectory):
                self.left_out += 1
                continue
            if fault := _unfit(trajectory, renderer):
                faults.setdefault(fault, []).append(f"{name} (agent {trajectory.agent!r})")
            elif (length := longest_row(trajectory)) > max_length:
                long.append(f"{name} has {length} tokens")
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        told = [f"{path}: {fault}: {listed(names)}" for fault, names in faults.items()]
        if long:
            told.append(f"{path}: trajectory {listed(long)}; the model takes {max_length}")
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


Dataset = FileDataset | GroupDataset


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
