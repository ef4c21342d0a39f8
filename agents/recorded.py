"""Recorded replies: what stands on file of a record becomes the episode that it would have been, had it been played."""

from __future__ import annotations

import json
from itertools import pairwise

from ..envs.files.records import Label, Record, Reply
from ..envs.tasks import gold_texts
from ..tools.chat_format import ChatFormat
from .trajectory import Trajectory

AGENT = "recorded"
"""Name of the agent of such an episode."""
EARNED: dict[Label, float] = {"chosen": 1.0, "good": 1.0, "reference": 1.0, "rejected": 0.0, "bad": 0.0}
"""What a reply earns by its label."""


def recorded(record: Record, source: str, chat_format: ChatFormat) -> list[Trajectory]:
    """Return the replies of a record as episodes without tokens, in the order of the file; they make up one group.

    Each assistant message of a reply is a turn, written as a policy of `chat_format` would have: calls and thinking as
    its markup. Those that stand in the prompt are no turns. `success` is what the label says, None of a reference;
    columns that nobody else reads (as `margin`) are `metadata`. Ids begin with `source` and the record's line.

    Raises DataError for calls that the chat format has no way to write.
    """
    group = f"{source}/{record.line}"
    return [_episode(record, reply, group, chat_format) for reply in record.replies]


def _episode(record: Record, reply: Reply, group: str, chat_format: ChatFormat) -> Trajectory:
    earned = EARNED[reply.label]
    trajectory = Trajectory(
        trajectory_id=f"{group}/{reply.label}",
        group_id=group,
        task_id=group,
        env_id=record.kind,
        task_index=record.line,
        agent=AGENT,
        gt=record.gt,
        metadata=dict(record.metadata),
        messages=[*record.prompt, *reply.messages],
        prompt_messages=len(record.prompt),
        tools=json.dumps(record.tools, ensure_ascii=False),
        rewards={"label": earned},
        success=None if reply.label == "reference" else earned > 0,
        terminated=True,
        stop_reason="stop",
    )
    said = [message for message in reply.messages if message["role"] == "assistant"]
    for text in gold_texts(said, chat_format):
        trajectory.append_turn(text, "stop")
    trajectory.turns[-1].reward = earned
    return trajectory


def lacks_results(trajectory: Trajectory) -> bool:
    """Whether the agent goes on after calls whose results are not there: to imitate that is to make them up."""
    spoken = trajectory.messages[trajectory.opening :]
    return any(one["role"] == other["role"] == "assistant" and "tool_calls" in one for one, other in pairwise(spoken))
