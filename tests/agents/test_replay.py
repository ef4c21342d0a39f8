"""A stored episode gets the tokens that the same agent would have written with this renderer."""

from collections.abc import Sequence

import pytest

from gymtune.agents import (
    FunctionAgent,
    Renderer,
    ScriptedAgent,
    TextAgent,
    Trajectory,
    env_factory,
    plan_episodes,
    rollout,
    run_episodes,
)
from gymtune.agents.replay import render_trajectory
from gymtune.envs import ChatEnv, Task
from gymtune.rewards import NumericChecker, gt_component
from gymtune.tools.errors import DataError
from gymtune.tools.messages import Message, assistant, user

REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content + '!' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = REWRITES.replace(" if loop.last else m.content + '!'", "").replace(
    "assistant\n{% endif", "assistant\n<think>\n{% endif"
)


@pytest.fixture(params=["tiny", "two segments", "opened thinking"])
def renderer(request: pytest.FixtureRequest, tiny_renderer: Renderer) -> Renderer:
    templates = {"tiny": None, "two segments": REWRITES, "opened thinking": OPENED}
    return Renderer(tiny_renderer.tokenizer, chat_template=templates[request.param])


def run(agent: TextAgent, n: int = 12) -> list[Trajectory]:
    return run_episodes(
        env_factory("gymtune/Calculator-v0", agent), agent, plan_episodes(range(n), 1, run_id="r", seed=0)
    )


def stray(messages: Sequence[Message]) -> str:
    """An agent that says nothing, breaks a call, or calls without end, by the length of the question."""
    return ["", "<tool_call>{</tool_call>", "<think>\nhm\n</think>\n\n7"][len(messages[1]["content"]) % 3]


def same(left: Trajectory, right: Trajectory) -> bool:
    seconds = {"generate_seconds", "step_seconds", "tools"}
    return left.model_dump(exclude={"turns": {"__all__": seconds}}) == right.model_dump(
        exclude={"turns": {"__all__": seconds}}
    )


@pytest.mark.parametrize("make", [ScriptedAgent, lambda renderer=None: FunctionAgent(stray, renderer)])
def test_rendered_later_equals_rendered_while_acting(renderer, make):
    acted = run(make(renderer))
    for later, now in zip(run(make()), acted, strict=True):
        assert later.tokens == []
        rendered = render_trajectory(later, renderer)
        assert same(rendered, now)
        assert [turn.step_seconds for turn in rendered.turns] == [turn.step_seconds for turn in later.turns]
        assert later.tokens == []  # the stored one is left alone
        rendered.to_json()
    assert max(len(t.turns) for t in acted) >= 2


def test_its_own_tokens_are_kept_and_anothers_are_replaced(tiny_renderer: Renderer):
    (trajectory,) = run(ScriptedAgent(tiny_renderer), 1)
    trajectory.logprobs[-1] = -0.5
    assert render_trajectory(trajectory, tiny_renderer) is trajectory
    other = Renderer(tiny_renderer.tokenizer, chat_template=REWRITES)
    rendered = render_trajectory(trajectory, other)
    assert rendered.tokenizer == other.fingerprint != trajectory.tokenizer
    assert rendered.tokens != trajectory.tokens
    assert set(rendered.logprobs) == {None}  # nobody sampled these


def test_a_turn_that_was_cut_gets_no_stop_token(tiny_renderer: Renderer):
    (trajectory,) = run(ScriptedAgent(), 1)
    trajectory.turns[-1].finish_reason = "length"
    rendered = render_trajectory(trajectory, tiny_renderer)
    whole = run(ScriptedAgent(tiny_renderer), 1)[0]
    assert rendered.tokens == whole.tokens[:-1]
    assert rendered.turns[-1].end == len(rendered.tokens)


def test_an_episode_that_said_nothing_keeps_what_it_earned(tiny_renderer: Renderer):
    class Late(FunctionAgent):
        async def act(self, trajectory, env):
            raise AssertionError("never asked")

        def open(self, trajectory, messages, tools):
            return False

    (trajectory,) = run(Late(stray), 1)
    trajectory.turns[0].reward = -0.5
    assert trajectory.stop_reason == "context"
    rendered = render_trajectory(trajectory, tiny_renderer)
    assert rendered.sampled_tokens == 0
    assert rendered.reward == -0.5
    rendered.to_json()


def test_messages_and_turns_that_do_not_belong_together_are_refused(tiny_renderer: Renderer):
    (trajectory,) = run(ScriptedAgent(), 1)
    turns = len(trajectory.turns)
    trajectory.turns.pop()
    with pytest.raises(DataError, match=f"{turns} assistant messages but {turns - 1} turns"):
        render_trajectory(trajectory, tiny_renderer)


def test_what_a_task_shows_of_an_assistant_is_not_the_agent_s(tiny_renderer: Renderer):
    """Few-shot examples stand before the question; only what the agent said has mask 1."""
    shown: tuple[Message, ...] = (user("What is 1 + 1?"), assistant("2"), user("What is 2 + 3?"))
    env = ChatEnv([Task("t", shown, "5", (assistant("5"),))], [gt_component(NumericChecker())], max_turns=1)
    (trajectory,) = rollout(lambda: env, ScriptedAgent(), 1)
    assert (trajectory.opening, trajectory.reward) == (3, 1.0)
    rendered = render_trajectory(trajectory, tiny_renderer)
    said = [i for i, mask in zip(rendered.tokens, rendered.response_mask, strict=True) if mask]
    assert tiny_renderer.decode(said) == "5"
    assert rendered.tokens[: -len(said)] == tiny_renderer.prompt(shown)
