"""Replies on file become the episodes that they would have been, had they been played in an env."""

import json

import pytest

from gymtune.agents import Renderer, ScriptedAgent, rollout
from gymtune.agents.recorded import lacks_results, recorded
from gymtune.agents.replay import render_trajectory
from gymtune.envs.files import example_path, parse_record, read_records
from gymtune.envs.files.records import Row
from gymtune.tools.chat_format import get_chat_format
from gymtune.tools.errors import DataError

REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content + '!' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # changes what was said as soon as something follows: no history can be gone on with
HERMES = get_chat_format("hermes")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "call_0_0"}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "call_0_0"}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def episodes(value, kind="sft", chat_format=HERMES):
    return recorded(parse_record(Row(7, value), kind), "file", chat_format)


@pytest.fixture(params=["tiny", "rewrites history"])
def renderer(request, tiny_renderer):
    return Renderer(tiny_renderer.tokenizer, chat_template=REWRITES if request.param != "tiny" else None)


# -- as if it had been played ------------------------------------------------------------------------------------------


def test_pairs_are_what_the_scripted_agent_plays_in_the_env_of_preferences(renderer):
    played = rollout("gymtune/Preference-v0", ScriptedAgent(renderer), 10, num_generations=2)
    on_file = [
        render_trajectory(one, renderer)
        for record in read_records(example_path("preference"))
        for one in recorded(record, "preference", renderer.chat_format)
    ]
    for one, other in zip(on_file, played, strict=True):
        for field in ("tokens", "response_mask", "segment_starts", "messages", "tools", "task_id", "opening"):
            assert getattr(one, field) == getattr(other, field), field
        assert [turn.text for turn in one.turns] == [turn.text for turn in other.turns]
        assert (one.reward, one.success) == (other.reward, other.success)
    assert [one.reward for one in on_file] == [1.0, 0.0] * 10
    assert len({one.group_id for one in on_file}) == 10


def test_a_conversation_with_tools_is_what_an_expert_did_in_the_env(renderer):
    """Calls, results and answers of played episodes, written as an SFT file: the same tokens are trained."""
    played = rollout("gymtune/Calculator-v0", ScriptedAgent(renderer), 8)
    for one in played:
        (again,) = episodes({"messages": one.messages, "tools": one.tools}, chat_format=renderer.chat_format)
        again = render_trajectory(again, renderer)
        assert (again.tokens, again.response_mask) == (one.tokens, one.response_mask)
        assert [turn.text for turn in again.turns] == [turn.text for turn in one.turns]
    assert max(len(one.turns) for one in played) > 2


def test_calls_and_reasoning_are_written_as_the_model_writes_them():
    talk = [user("q"), said("", tool_calls=[CALL], reasoning_content="r"), RESULT, said("five")]
    (one,) = episodes({"messages": talk})
    calls, answer = [HERMES.parse(turn.text) for turn in one.turns]
    assert (calls.reasoning, [(call.name, call.arguments) for call in calls.calls]) == ("r", [("f", {"x": 1})])
    assert (answer.content, answer.reasoning, answer.calls) == ("five", None, ())
    assert one.messages == talk
    other = get_chat_format("qwen3_coder")
    assert episodes({"messages": talk}, chat_format=other)[0].turns[0].text != one.turns[0].text


def test_every_assistant_turn_of_a_reply_is_trained_and_none_of_the_prompt(renderer):
    pair = {
        "prompt": [user("a"), said("not this"), user("b")],
        "chosen": [said("1"), user("c"), said("2")],
        "rejected": [said("3")],
    }
    chosen, rejected = (render_trajectory(one, renderer) for one in episodes(pair, "preference"))

    def trained(trajectory):
        return [renderer.decode(trajectory.tokens[turn.start : turn.end]) for turn in trajectory.turns]

    assert (trained(chosen), trained(rejected)) == (["1", "2"], ["3"])
    assert chosen.sampled_tokens == sum(turn.end - turn.start for turn in chosen.turns)
    first, other = (one.response_mask.index(1) for one in (chosen, rejected))
    assert chosen.tokens[:first] == rejected.tokens[:other] == renderer.prompt(pair["prompt"])
    assert len(chosen.segments) == (1 if renderer.chat_template != REWRITES else 2)


# -- what is told of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "preference",
            [("chosen", 1.0, True), ("rejected", 0, False)],
        ),
        ({"prompt": "q", "completion": "a", "label": True}, "unpaired", [("good", 1.0, True)]),
        ({"prompt": "q", "completion": "a", "label": False}, "unpaired", [("bad", 0.0, False)]),
        ({"messages": [user("q"), said("a")]}, "sft", [("reference", 1.0, None)]),
        ({"question": "q", "answer": "1 + 1 #### 2"}, "verifiable", [("reference", 1.0, None)]),
        ({"prompt": "q"}, "prompts", []),
    ],
)
def test_labels_are_rewards_and_successes(value, kind, told):
    found = episodes(value, kind)
    assert [(one.trajectory_id, one.reward, one.success) for one in found] == [
        (f"file/7/{label}", reward, success) for label, reward, success in told
    ]
    assert {one.group_id for one in found} <= {"file/7"}
    assert {(one.task_index, one.terminated, one.truncated, one.error) for one in found} <= {(7, True, False, None)}


def test_other_columns_and_the_tools_come_along():
    schema = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    for one in episodes({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2, "tools": [schema]}, "preference"):
        assert one.metadata == {"margin": 2}
        assert json.loads(one.tools) == [schema]
        one.to_json()


def test_what_a_format_cannot_write_is_an_error():
    coder = get_chat_format("qwen3_coder")
    with pytest.raises(DataError):
        episodes({"messages": [user("q"), said("", tool_calls=[call_of("<x>")])]}, chat_format=coder)


def call_of(argument):
    return {"type": "function", "id": "c", "function": {"name": "f", "arguments": {argument: 1}}}


@pytest.mark.parametrize(
    ("reply", "lacks"),
    [
        ([said("", tool_calls=[CALL])], False),  # ends with the call: a file that teaches calling
        ([said("", tool_calls=[CALL]), RESULT, said("five")], False),
        ([said("", tool_calls=[CALL]), said("five")], True),
        ([said("well"), said("five")], False),
        ([said("", tool_calls=[CALL]), RESULT, said("", tool_calls=[{**CALL, "id": "c2"}]), said("five")], True),
    ],
)
def test_going_on_without_results_is_noticed(reply, lacks):
    (one,) = episodes({"messages": [user("q"), *reply]})
    assert lacks_results(one) is lacks
