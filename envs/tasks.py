"""Task and TaskSet: what an episode starts from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Any, Literal, Protocol, get_args

from ..tools.chat_format import ChatFormat
from ..tools.errors import ConfigError
from ..tools.messages import Message
from .lazy import Lazy

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    `messages` open the episode, `gt` is what the checker compares with, `gold` holds the assistant messages of an
    episode that must score full (calls as `tool_calls`, whatever the call format of the model). `recorded` holds
    episodes that are on file, good and bad: the scripted agent replays one a sample, and `gold` where there is none.
    `tools` are the schemas of a task that names its own.
    """

    task_id: str
    messages: tuple[Message, ...]
    gt: Any
    gold: tuple[Message, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    recorded: tuple[tuple[Message, ...], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


def gold_texts(gold: Sequence[Message], chat_format: ChatFormat) -> list[str]:
    """Return the texts a policy of this chat format would write for a task's gold messages."""
    return [
        chat_format.render(m["content"], [c["function"] for c in m.get("tool_calls", [])], m.get("reasoning_content"))
        for m in gold
    ]


class TaskSet(Protocol):
    """A sequence of tasks."""

    def __len__(self) -> int:
        """Return the number of tasks."""
        ...

    def __getitem__(self, index: int) -> Task:
        """Return the task at `index`."""
        ...


class GeneratedTasks(Lazy[Task]):
    """Tasks made on demand from a seed: task `i` is the same in every process, and nothing is stored.

    `generate(rng, split)` returns the task without its id; the rng is seeded by (name, split, seed, index). Raises
    ConfigError for a size below 1 or an unknown split.
    """

    def __init__(
        self, name: str, generate: Callable[[Random, Split], Task], *, size: int, split: Split = "train", seed: int = 0
    ) -> None:
        if size < 1:
            raise ConfigError(f"{name}: size must be at least 1, got {size}")
        if split not in get_args(Split):
            raise ConfigError(f"{name}: split must be 'train' or 'test', got {split!r}")
        self.name, self.generate, self.size, self.split, self.seed = name, generate, size, split, seed

    def __len__(self) -> int:
        return self.size

    def item(self, index: int) -> Task:
        """Generate a task."""
        task_id = f"{self.name}/{self.split}/{self.seed}/{index}"
        return replace(self.generate(Random(task_id), self.split), task_id=task_id)


class MadeTasks(Lazy[Task]):
    """Tasks made from the items of another sequence, such as the records of a file."""

    def __init__(self, source: Sequence[Any], make: Callable[[Any], Task]) -> None:
        self.source, self.make = source, make

    def __len__(self) -> int:
        return len(self.source)

    def item(self, index: int) -> Task:
        """Make a task."""
        return self.make(self.source[index])


class JoinedTasks(Lazy[Task]):
    """Several task sets one after another. `starts` are the indices at which each begins."""

    def __init__(self, parts: Sequence[TaskSet]) -> None:
        self.parts = tuple(parts)
        self.starts = list(accumulate((len(part) for part in self.parts), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def item(self, index: int) -> Task:
        """Return a task of the part that holds it."""
        part = bisect_right(self.starts, index) - 1
        return self.parts[part][index - self.starts[part]]
