"""A file to learn from: its replies as episodes, all that is wrong with it at once, what is left out by reason.

The data order is a pure function of seed and step, so nothing has to be saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from ..agents.recorded import lacks_results, recorded
from ..agents.renderer import Renderer
from ..agents.replay import render_trajectory
from ..agents.store import numbered_trajectories
from ..agents.trajectory import Trajectory
from ..envs.files import Kind, Record, read_rows
from ..envs.files.detection import main_kind
from ..envs.files.validate import checked_record
from ..tools.errors import DataError

_NAMED = 10  # lines or trajectories named in an error

HOLDS: dict[Kind, tuple[str, str]] = {
    "trajectories": ("episodes", "sft, distill; with groups dpo and its kin, reward; with successes kto"),
    "sft": ("conversations", "sft, distill"),
    "preference": ("pairs", "dpo, ipo, orpo, simpo, reward, kto; of the chosen replies alone sft and distill"),
    "unpaired": ("labelled replies", "kto; of the good ones alone sft and distill"),
    "prompts": ("prompts", "algorithms that sample in an env, as grpo with --env gymtune/Preference-v0"),
    "agentic": ("tasks with tools", "algorithms that sample in an env, as grpo with --env gymtune/ToolUse-v0"),
    "verifiable": (
        "questions",
        "algorithms that sample in an env, as grpo with --env gymtune/Math-v0; where answers are on file sft, distill",
    ),
    "bfcl": ("tasks with tools", "algorithms that sample in an env, as grpo with --env gymtune/ToolUse-v0"),
}
"""By kind: what a file holds, and which algorithms it is for."""


class StoredFile:
    """The replies of a file as episodes; its users say which of them they leave out, and render the others.

    Args:
        path: a file of any kind that `gymtune validate` knows.
        renderer: of the model that learns.

    `episodes`: in the order of the file, those that failed, said nothing, or go on after calls whose results are not on
    file left out. `lines`: of each, by its id. `left_out`: how many, by reason. `unanswered`: lines without a reply.

    Raises DataError: no such file, its kind cannot be told, or all that is wrong with it, with line numbers (ten, then
    a count).
    """

    def __init__(self, path: str | Path, renderer: Renderer) -> None:
        self.path, self.renderer = Path(path), renderer
        self.kind = main_kind(path)
        self.episodes: list[Trajectory] = []
        self.lines: dict[str, int] = {}
        self.left_out: Counter[str] = Counter()
        self.unanswered = 0
        self._most, self._long = 0, dict[str, int]()  # tokens that the model takes, and of what is longer
        faults: list[str] = []
        found = numbered_trajectories(path) if self.kind == "trajectories" else self._of_records()
        for line, episode in found:
            if isinstance(episode, str):
                faults.append(f"line {line}: {episode}")
            elif episode.trajectory_id in self.lines:
                faults.append(f"line {line}: trajectory {episode.trajectory_id} stands there twice: keep one of them")
            else:
                self.lines[episode.trajectory_id] = line
                self.episodes.append(episode)
        self._refuse(faults)
        self.leave_out("they failed", lambda episode: episode.error is not None)
        self.leave_out("nothing is said in them", lambda episode: not spoke(episode))
        if self.kind != "trajectories":
            why = "they go on after calls whose results are not on file (`gymtune rollout --agent scripted` plays them)"
            self.leave_out(why, lacks_results)

    def leave_out(self, why: str, which: Callable[[Trajectory], bool]) -> None:
        """Drop and count the episodes of which `which` is true."""
        kept = [episode for episode in self.episodes if not which(episode)]
        self.left_out[why] += len(self.episodes) - len(kept)
        self.episodes = kept

    def render(self, *, max_length: int, drop_long: bool) -> None:
        """Give the episodes their tokens. Those with a row of more than `max_length` are left out with `drop_long`.

        Raises DataError naming the lines that the chat template refuses.
        """
        rendered, faults = [], []
        for episode in self.episodes:
            try:
                rendered.append(render_trajectory(episode, self.renderer))
            except DataError as error:
                faults.append(f"line {self.lines[episode.trajectory_id]}: {error}")
        self._refuse(faults)
        self.episodes, self._most = rendered, max_length
        self.leave_out("nothing is said in them", lambda episode: not episode.sampled_tokens)
        lengths = {episode.trajectory_id: longest_row(episode) for episode in self.episodes}
        self._long = {name: length for name, length in lengths.items() if length > max_length}
        if drop_long:
            why = f"they are longer than the {max_length} tokens that the model takes"
            self.leave_out(why, lambda episode: episode.trajectory_id in self._long)

    def refuse_long(self, chosen: Iterable[Trajectory]) -> None:
        """Raise DataError naming the lines of those among `chosen` that are longer than the model takes."""
        long = [name for episode in chosen if (name := episode.trajectory_id) in self._long]
        if long:
            told = listed([f"line {self.lines[name]} has {self._long[name]}" for name in long])
            raise DataError(
                f"{self.path}: more tokens than the {self._most} that the model takes: {told}. drop_long=true leaves "
                "them out"
            )

    def unfit(self, wanted: str) -> DataError:
        """Return the error of a file that does not hold what is `wanted`; it says what it is for."""
        holds, algorithms = HOLDS[self.kind]
        return DataError(f"{self.path}: wanted {wanted}, this file has {holds}, for {algorithms}")

    def nothing(self, wanted: str, *more: str) -> DataError:
        """Return the error of a file of the right kind that has no `wanted` to learn from; `more` to say of that."""
        return DataError(". ".join([f"{self.path}: no {wanted} to learn from", *self.notes, *more]))

    @property
    def notes(self) -> list[str]:
        """What was left out and why."""
        what = "episodes" if self.kind == "trajectories" else "replies"
        notes = [f"{count} {what} are left out: {why}" for why, count in self.left_out.items() if count]
        return notes + [f"{self.unanswered} records hold no answer"] * (self.unanswered > 0)

    def _of_records(self) -> Iterator[tuple[int, Trajectory | str]]:
        """Yield line and episode of each reply of a file of records, or line and fault."""
        for row in read_rows(self.path):
            record = checked_record(row, self.kind)
            if not isinstance(record, Record):
                for fault in record:
                    where = f"{fault.path}: " if fault.path else ""
                    yield row.line, f"{where}wanted {fault.wanted}, came {fault.came}"
                continue
            self.unanswered += not record.replies
            try:
                episodes = recorded(record, self.path.stem, self.renderer.chat_format)
            except DataError as error:
                yield row.line, str(error)
                continue
            for episode in episodes:
                yield row.line, episode

    def _refuse(self, faults: Sequence[str]) -> None:
        if faults:
            raise DataError(f"{self.path}: {listed(faults, '; ')}. `gymtune validate {self.path}` shows the file")


class FileDataset:
    """Examples of a file in an order reshuffled every epoch; one is an episode, or several that belong together.

    `lines`: of each episode in use, by its id. `left_out`: how many are not in use. `notes`: what a reader should know
    and need not mend. `summary`: what there is, in words.
    """

    summary = ""

    def __init__(self, file: StoredFile, examples: Sequence[Sequence[Trajectory]], seed: int) -> None:
        self.path, self.kind, self.seed = file.path, file.kind, seed
        self.examples = examples
        file.refuse_long(self.everything())
        self.lines = {one.trajectory_id: file.lines[one.trajectory_id] for one in self.everything()}
        self.left_out, self.notes = file.left_out.total(), file.notes

    def everything(self) -> list[Trajectory]:
        """Return the episodes of all examples, in the order of the file."""
        return [episode for example in self.examples for episode in example]

    def batch(self, step: int, size: int) -> list[Trajectory]:
        """Return the episodes of the `size` examples of step `step` (0-based); epochs follow without a gap."""
        count = len(self.examples)
        orders: dict[int, list[int]] = {}
        chosen: list[Trajectory] = []
        for place in range(step * size, (step + 1) * size):
            epoch, offset = divmod(place, count)
            if epoch not in orders:
                orders[epoch] = epoch_order(count, self.seed, epoch)
            chosen += self.examples[orders[epoch][offset]]
        return chosen


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """Return 0 to `count` - 1 in the order of an epoch."""
    order = list(range(count))
    Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


def longest_row(trajectory: Trajectory) -> int:
    """Return the tokens of the longest segment."""
    return max((end - start for start, end in trajectory.segments), default=0)


def spoke(trajectory: Trajectory) -> bool:
    """Whether the agent said anything."""
    return any(turn.text or turn.end > turn.start for turn in trajectory.turns)


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """Return ten names, then a count."""
    more = f"{separator}and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return separator.join(names[:_NAMED]) + more
