"""Which episodes think: drawn from the seed, told to the template in every turn, written into the trajectory."""

from copy import deepcopy
from itertools import pairwise

import pytest

from gymtune.agents import FunctionAgent, ModelAgent, Renderer, Sampling, rollout
from gymtune.agents.loading import load_agent
from gymtune.agents.models import load_model
from gymtune.agents.torch_engine import TorchEngine
from gymtune.envs import make_env
from gymtune.envs.tasks import Task
from gymtune.tools.errors import ConfigError

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>

</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if open_thinking is true %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}"""
"""As MiniMind's."""

OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def renderer(tiny_renderer):
    return Renderer(deepcopy(tiny_renderer.tokenizer), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def engine(tiny_model):
    return TorchEngine(load_model(tiny_model))


@pytest.fixture(scope="module")
def episodes(engine, renderer):
    soon = Sampling(
        max_new_tokens=64, stop=tuple("aeiou 0123456789")
    )  # the weights are random: nothing else ends a turn
    agent = ModelAgent(engine, renderer, soon, thinking_ratio=0.5)
    return rollout("gymtune/Dialog-v0", agent, 6, num_generations=4, seed=3)


def test_some_episodes_think_in_every_turn_and_say_so(episodes, renderer):
    marks = {True: OPEN, False: CLOSED}
    said = [trajectory.metadata["chat_template_kwargs"] for trajectory in episodes]
    assert {frozenset(kwargs.items()) for kwargs in said} == {frozenset({("open_thinking", b)}) for b in (True, False)}
    assert max(len(trajectory.turns) for trajectory in episodes) > 1
    for trajectory, kwargs in zip(episodes, said, strict=True):
        assert trajectory.error is None
        for before, turn in pairwise([None, *trajectory.turns]):
            start = before.end if before else 0
            if turn.start < turn.end:
                context = renderer.tokenizer.decode(trajectory.tokens[start : turn.start])
                assert context.endswith(f"<|im_start|>assistant\n{marks[kwargs['open_thinking']]}")


def test_the_draw_is_a_function_of_run_task_and_sample(engine, renderer, episodes):
    def thinks(ratio, seed=3):
        agent = ModelAgent(engine, renderer, Sampling(max_new_tokens=1), thinking_ratio=ratio)
        found = rollout("gymtune/Dialog-v0", agent, 6, num_generations=4, seed=seed)
        return [trajectory.metadata["chat_template_kwargs"]["open_thinking"] for trajectory in found]

    half = thinks(0.5)
    assert half == [trajectory.metadata["chat_template_kwargs"]["open_thinking"] for trajectory in episodes]
    assert any(len(set(half[first : first + 4])) == 2 for first in range(0, 24, 4))  # not one draw for a whole group
    assert half != thinks(0.5, seed=4)
    assert all(few <= many for few, many in zip(half, thinks(0.8), strict=True))  # a larger share holds the smaller
    assert thinks(0.0) == [False] * 24
    assert thinks(1.0) == [True] * 24


def test_the_env_hears_whether_the_span_was_open(engine, renderer):
    """It skips calls inside of it."""
    heard = []

    def make():
        env = make_env("gymtune/Arithmetic-v0")
        plain = env.step
        env.step = lambda action: heard.append(action.thinking_open) or plain(action)
        return env

    for ratio in (0.0, 1.0):
        rollout(make, ModelAgent(engine, renderer, Sampling(max_new_tokens=1), thinking_ratio=ratio), 1)
    assert heard == [False, True]


def test_arguments_of_the_run_are_recorded_and_a_ratio_covers_them(engine, renderer):
    def kwargs(options, **given):
        agent = ModelAgent(engine, renderer.with_options(options), Sampling(max_new_tokens=1), **given)
        (trajectory,) = rollout("gymtune/Arithmetic-v0", agent, 1)
        return trajectory.metadata.get("chat_template_kwargs"), trajectory.tokenizer

    plain, told = kwargs({}), kwargs({"open_thinking": True})
    assert (plain[0], told[0]) == (None, {"open_thinking": True})
    assert plain[1] == told[1] == renderer.fingerprint
    assert kwargs({"open_thinking": True}, thinking_ratio=0.0)[0] == {"open_thinking": False}


def test_a_task_cannot_tell_the_template(engine, renderer):
    """Its text is data: arguments of a template are rendered as they are."""

    def make():
        env = make_env("gymtune/Arithmetic-v0")
        metadata = {"chat_template_kwargs": {"open_thinking": True}, "level": 1}
        env.tasks = [
            Task(task_id="t", messages=({"role": "user", "content": "What is 1 + 1?"},), gt="2", metadata=metadata)
        ]
        return env

    (trajectory,) = rollout(make, ModelAgent(engine, renderer, Sampling(max_new_tokens=1)), 1)
    assert trajectory.error is None
    assert trajectory.metadata == {"level": 1}
    assert renderer.tokenizer.decode(trajectory.tokens[: trajectory.turns[0].start]).endswith(CLOSED)


def test_an_agent_that_writes_text_goes_on_inside_the_open_span(renderer):
    agent = FunctionAgent(lambda messages: "2", renderer.thinking(True))
    (trajectory,) = rollout("gymtune/Arithmetic-v0", agent, 1)
    assert "<think>\n\n</think>\n\n2<|im_end|>" in renderer.tokenizer.decode(trajectory.tokens)


def test_what_the_template_cannot_do_is_told_before_an_episode(engine, tiny_renderer, tiny_model):
    with pytest.raises(ConfigError, match=r"thinking_ratio: the chat template of .* reads neither open_thinking nor"):
        ModelAgent(engine, tiny_renderer, thinking_ratio=0.5)
    with pytest.raises(ConfigError, match=r"'open_thinking': the template of .* does not read it"):
        load_agent(tiny_model, chat_template_kwargs={"open_thinking": True})
