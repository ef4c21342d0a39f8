"""gymtune/Preference-v0: one turn in reply to a prompt, worth what people, a reward model or a judge think of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..rewards.components import Component, gt_component, unfinished
from ..rewards.preference import PreferenceChecker
from ..rewards.registry import get_checker
from ..tools.errors import DataError
from ..tools.messages import Message
from .chat_env import ChatEnv
from .files import FileTasks, Record, example_path, kind_for
from .tasks import MadeTasks, Task

_GOOD, _BAD = ("chosen", "good", "reference"), ("rejected", "bad")


def make_task(record: Record, name: str) -> Task:
    """Make the task of a record; every reply on file is an episode, the good ones first.

    Raises DataError where a reply is more than one message.
    """
    replies: dict[str, list[Message]] = {"chosen": [], "rejected": []}
    for reply in record.replies:
        if len(reply.messages) != 1:
            raise DataError(
                f"{name}, line {record.line}: a reply must be one assistant message after the common prompt, got "
                f"{len(reply.messages)} messages; train on such a file by sft, or cut the earlier turns into the prompt"
            )
        replies["chosen" if reply.label in _GOOD else "rejected"].append(reply.messages[0])
    gt = record.gt
    if gt is None and record.replies:
        gt = {label: [message["content"] for message in messages] for label, messages in replies.items()}
    recorded = tuple((message,) for messages in replies.values() for message in messages)
    gold = recorded[0] if replies["chosen"] else None
    return Task(f"{name}/{record.line}", record.prompt, gt, gold, record.metadata, recorded)


class PreferenceEnv(ChatEnv):
    """One prompt, one reply.

    Without more, a file of pairs pays 1 for the chosen text and 0 for any other; the scripted agent replays the pairs,
    one text a sample (`--agent scripted --num-generations 2`: a pair is one group). A policy's own texts are scored by
    a reward model or a judge: `--reward-model FOLDER`, `--reward module:function`.

    Args:
        data: a file of preference pairs, of prompts alone (RLAIF), or of labelled replies (KTO); a small file of pairs
            that ships is the default.
        checker: name of a checker for files whose records have a `gt`.
        rewards: weights of `gt` (default 1) and `unfinished` (default 0: seen, not paid). Prompts alone have no `gt`.
    """

    def __init__(
        self,
        data: str | None = None,
        checker: str | None = None,
        rewards: Mapping[str, float] | str | None = None,
        **options: Any,
    ) -> None:
        path = Path(data) if data is not None else example_path("preference")
        kind = kind_for(path, "preference", "unpaired", "prompts", reader="gymtune/Preference-v0")
        components: list[Component] = []
        if checker is not None:
            components.append(gt_component(get_checker(checker)))
        elif kind in ("preference", "unpaired"):
            components.append(gt_component(PreferenceChecker()))
        if rewards is None and not components:
            rewards = {"unfinished": 0.0}
        super().__init__(
            MadeTasks(FileTasks(path, kind=kind), partial(make_task, name=path.stem)),
            [*components, unfinished],
            rewards=rewards,
            max_turns=1,
            **options,
        )
