"""Rendering stored episodes: a trajectory without tokens, or with another model's, gets the tokens of this one."""

from __future__ import annotations

import json

from ..tools.errors import DataError
from .renderer import Renderer
from .trajectory import SPOKEN, Trajectory


def whole_conversation(trajectory: Trajectory, renderer: Renderer) -> Trajectory:
    """Return an episode as a reward model reads it: all that was said, in one segment.

    Behind the last real token stands one more, with mask 1, which no model is given: the state that would predict it is
    the state after the last real token, from which the score is read. What the turns earned stays. Raises DataError
    when the chat template refuses the conversation.
    """
    ids = renderer.conversation(trajectory.messages, json.loads(trajectory.tools))
    return trajectory.model_copy(
        update={
            "tokens": [*ids, renderer.stop_ids[0]],
            "response_mask": [0] * len(ids) + [1],
            "logprobs": [None] * (len(ids) + 1),
            "segment_starts": [0],
            "tokenizer": renderer.fingerprint,
            "turns": [turn.model_copy(update={"start": 0, "end": 0}) for turn in trajectory.turns],
        }
    )


def render_trajectory(trajectory: Trajectory, renderer: Renderer) -> Trajectory:
    """Return `trajectory` with tokens, mask and turn spans of `renderer`; its own when they are this renderer's.

    What the agent wrote gets mask 1 and no log-prob, since nobody sampled these tokens. Raises DataError when the
    messages and the turns do not belong together.
    """
    if trajectory.tokens and trajectory.tokenizer == renderer.fingerprint:
        return trajectory
    fresh = trajectory.model_copy(
        update={
            "tokens": [], "response_mask": [], "logprobs": [], "segment_starts": [], "turns": [],
            "tokenizer": renderer.fingerprint,
        }
    )  # fmt: skip
    messages, turns = trajectory.messages, [turn for turn in trajectory.turns if turn.finish_reason in SPOKEN]
    spoken = [index for index in range(trajectory.opening, len(messages)) if messages[index]["role"] == "assistant"]
    if len(spoken) != len(turns):
        raise DataError(
            f"trajectory {trajectory.trajectory_id}: {len(spoken)} assistant messages but {len(turns)} turns"
        )
    before = 0
    for index, turn in zip(spoken, turns, strict=True):
        said = messages[before:index]
        delta = renderer.delta(said, fresh.tokens[-1]) if before else None
        if delta is None:
            fresh.start_segment()
            delta = renderer.prompt(messages[:index], json.loads(trajectory.tools))
        fresh.append_context(delta)
        ids = renderer.assistant_ids(turn.text)
        ids = ids if turn.finish_reason == "stop" else ids[:-1]  # a cut turn never had its stop token
        fresh.append_turn(turn.text, turn.finish_reason, ids, [None] * len(ids))
        fresh.turns[-1] = turn.model_copy(update={"start": fresh.turns[-1].start, "end": fresh.turns[-1].end})
        before = index + 1
    if not turns:  # cut before the first word; what the env made of that stays
        fresh.turns = [turn.model_copy(update={"start": 0, "end": 0}) for turn in trajectory.turns]
    return fresh
