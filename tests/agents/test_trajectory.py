"""The one currency: tokens enter by two doors, and what is written reads back the same or is refused."""

import json
import math

import pytest
from pydantic import ValidationError

from gymtune.agents import Sampling, ToolUse, Trajectory

IDS = {"trajectory_id": "run/s0", "group_id": "run", "task_id": "sum/0", "env_id": "Sum-v0", "task_index": 0}


def two_turns() -> Trajectory:
    trajectory = Trajectory(**IDS, sampling=Sampling(temperature=0.7), gt={"answer": ["15", None]})
    trajectory.start_segment()
    trajectory.append_context([5, 6, 7])
    trajectory.append_turn("call", "stop", [8, 2], [-0.5, -0.25], policy_version=3, seconds=0.1)
    trajectory.append_context([9])
    trajectory.append_turn("15", "stop", [4, 2], [-1.5, -0.125])
    trajectory.messages = [
        {"role": "user", "content": "7 + 8 = \u4e2d?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "easy",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": [1, None]}}}],
        },
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": "15"},
        {"role": "assistant", "content": "15"},
    ]
    trajectory.turns[0].reward, trajectory.turns[1].reward = -0.25, 1.0
    trajectory.turns[0].tools.append(ToolUse(name="add", outcome="ok", seconds=0.5))
    trajectory.rewards = {"gt": 1.0, "format": -0.25}
    return trajectory


def test_the_mask_is_one_exactly_on_what_the_agent_produced():
    trajectory = two_turns()
    assert trajectory.tokens == [5, 6, 7, 8, 2, 9, 4, 2]
    assert trajectory.response_mask == [0, 0, 0, 1, 1, 0, 1, 1]
    assert trajectory.logprobs == [None, None, None, -0.5, -0.25, None, -1.5, -0.125]
    assert [(turn.start, turn.end) for turn in trajectory.turns] == [(3, 5), (6, 8)]
    assert trajectory.sampled_tokens == 4
    assert trajectory.segments == [(0, 8)]
    assert trajectory.current_ids == trajectory.tokens


def test_segments_are_sequences_of_their_own():
    trajectory = two_turns()
    trajectory.start_segment()
    trajectory.append_context([1, 2])
    assert trajectory.segments == [(0, 8), (8, 10)]
    assert trajectory.current_ids == [1, 2]


@pytest.mark.parametrize("logprobs", [[], [-1.0], [-1.0, -1.0, -1.0]])
def test_an_append_of_unequal_lengths_is_refused_and_changes_nothing(logprobs):
    trajectory = two_turns()
    before = trajectory.model_copy(deep=True)
    with pytest.raises(ValueError, match=f"2 ids came with {len(logprobs)} log-probs"):
        trajectory.append_turn("x", "stop", [1, 2], logprobs)
    assert trajectory == before


def test_tokens_before_any_segment_are_refused():
    with pytest.raises(ValueError, match="before any segment"):
        Trajectory(**IDS).append_context([1])


@pytest.mark.parametrize(
    ("error", "rewards", "reward"),
    [
        (None, {"gt": 1.0, "format": -0.25}, 0.75),
        (None, {"gt": None, "format": -0.25}, None),
        ("Traceback ...", {"gt": 1.0}, None),
    ],
)
def test_the_reward_is_the_sum_over_turns_and_unknown_after_a_failure(error, rewards, reward):
    trajectory = two_turns()
    trajectory.error, trajectory.rewards = error, rewards
    assert trajectory.reward == reward
    assert json.loads(trajectory.model_dump_json())["reward"] == reward


def test_json_round_trip_is_exact():
    trajectory = two_turns()
    trajectory.logprobs[3] = -math.pi  # every bit of a float survives
    trajectory.to_json()
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


def changed(**values) -> str:
    return json.dumps(json.loads(two_turns().model_dump_json()) | values)


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"logprobs": [None] * 7}, "8, 8, 7"),
        ({"response_mask": [0, 0, 0, 1, 1, 0, 1, 2]}, "response_mask.7"),
        ({"segment_starts": []}, "segment_starts"),
        ({"segment_starts": [1]}, "segment_starts"),
        ({"segment_starts": [0, 9]}, "segment_starts"),
        ({"turns": [{"start": 3, "end": 9, "text": "", "finish_reason": "stop"}]}, "spans"),
        ({"turns": [{"start": 3, "end": 2, "text": "", "finish_reason": "stop"}]}, "spans"),
        ({"reward": 1.0}, "the turns earned 0.75"),
        ({"schema_version": 2}, "schema_version"),
        ({"rewrads": {}}, "rewrads"),
        ({"sampling": {"temprature": 1.0}}, "sampling.temprature"),
        ({"messages": [MESSAGE | {"weight": 1}]}, "messages.0.weight"),
        ({"messages": [MESSAGE | {"content": None}]}, "messages.0.content"),
        ({"messages": [MESSAGE | {"tool_calls": [{"index": 0}]}]}, "messages.0.tool_calls.0.index"),
        ({"logprobs": [None, None, None, math.nan, -0.25, None, -1.5, -0.125]}, "logprobs.3"),
    ],
)
def test_a_record_that_cannot_be_right_is_refused_by_path(values, told):
    with pytest.raises(ValidationError) as caught:
        Trajectory.model_validate_json(changed(**values))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.messages.append({"role": "user", "content": "\ud800"}),
        lambda t: t.messages.append({"role": "user", "content": None}),
        lambda t: t.messages.append({"role": "user", "content": "x", "weight": 1}),
        lambda t: t.metadata.update(thing=object()),
        lambda t: setattr(t, "gt", "\udfff"),
        lambda t: setattr(t.turns[0], "reward", math.inf),
        lambda t: setattr(t.turns[0], "reward", None),
        lambda t: t.logprobs.__setitem__(3, math.nan),
    ],
)
@pytest.mark.parametrize("check", [Trajectory.to_json, Trajectory.check_writable])
def test_what_was_written_past_the_model_is_refused(spoil, check):
    trajectory = two_turns()
    check(trajectory)
    spoil(trajectory)
    with pytest.raises(ValueError, match=r"error|Error|serializ|finite"):
        check(trajectory)
