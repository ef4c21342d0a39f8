"""gymtune/Dialog-v0: a table is booked in a conversation with a scripted user; no tools.

It shows how a user simulator plugs in: `ChatEnv.user_reply` hears the episode so far and answers, or has nothing more
to say. Yours may be another model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any, Protocol

from ..rewards.components import Component, gt_component, unfinished
from ..rewards.episode import Episode
from ..rewards.exact import ExactChecker
from ..tools.messages import assistant, system, user
from .chat_env import ChatEnv
from .tasks import GeneratedTasks, Split, Task

_SYSTEM = "Book a table: ask for the day, the time and the number of people, then say `Booked: DAY, TIME, N people.`"
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TIMES = tuple(f"{hour}:{minute}" for hour in range(17, 22) for minute in ("00", "15", "30", "45"))
_HELD_OUT_SHARE = 5  # one booking in so many is held out
_DONE = "Booked:"
_QUESTIONS = {"day": "Which day?", "time": "At what time?", "people": "How many people?"}


class User(Protocol):
    """Whoever the agent talks to."""

    def reply(self, episode: Episode) -> str | None:
        """Answer the agent's last turn; None ends the conversation, and the episode is scored."""
        ...


class BookingUser:
    """Knows what it wants, answers one question at a time, and is done when the agent says that it has booked."""

    def reply(self, episode: Episode) -> str | None:
        """Answer by what the agent's last turn asks for."""
        if episode.answer.startswith(_DONE):
            return None
        words = set(re.findall(r"[a-z]+", episode.answer.lower()))
        asked = [wish for wish in _QUESTIONS if wish in words]
        if len(asked) != 1:
            return "Pardon? One question at a time."
        return str(episode.metadata[asked[0]])


def held_out(day: str, time: str, people: int) -> bool:
    """Tell whether a booking belongs to the held-out tasks."""
    number = (_DAYS.index(day) * len(_TIMES) + _TIMES.index(time)) * 16 + people
    return (number * 2654435761 >> 16) % _HELD_OUT_SHARE == 0


def make_task(rng: Random, split: Split) -> Task:
    """Make one booking, with the conversation that asks for everything once."""
    while True:
        day, time, people = rng.choice(_DAYS), rng.choice(_TIMES), rng.randint(2, 12)
        if held_out(day, time, people) == (split == "test"):
            break
    answer = f"{_DONE} {day}, {time}, {people} people."
    gold = tuple(assistant(text) for text in (*_QUESTIONS.values(), answer))
    wishes = {"day": day, "time": time, "people": people}
    return Task("", (system(_SYSTEM), user("I would like a table, please.")), answer, gold, wishes)


class DialogEnv(ChatEnv):
    """Ask a user for three things, then book what was said.

    Args:
        split: `train` or `test`; their bookings are disjoint.
        size, seed: how many tasks there are and which.
        rewards: weights of `gt` (default 1), `unfinished` and `turns` (-1 a turn; default 0: seen, not paid).
        user: who answers; a `User` of yours in place of the scripted one.
    """

    def __init__(
        self,
        split: Split = "train",
        size: int = 10_000,
        seed: int = 0,
        rewards: Mapping[str, float] | str | None = None,
        max_turns: int = 6,
        user: User | None = None,
        **options: Any,
    ) -> None:
        self.user = user or BookingUser()
        super().__init__(
            GeneratedTasks("dialog", make_task, size=size, split=split, seed=seed),
            [gt_component(ExactChecker()), unfinished, Component("turns", "turn", lambda episode: -1.0)],
            rewards=rewards,
            max_turns=max_turns,
            **options,
        )

    def user_reply(self, episode: Episode) -> str | None:
        """Let the user answer."""
        return self.user.reply(episode)
