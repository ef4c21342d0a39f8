"""The driver: many episodes at once, each ending as it should, none harming another, every env closed."""

import asyncio
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from gymtune.agents import (
    Agent,
    FunctionAgent,
    GenerateRequest,
    Generation,
    Limits,
    ModelAgent,
    Renderer,
    Sampling,
    ScriptedAgent,
    Trajectory,
    env_factory,
    plan_episodes,
    rollout,
    run_episodes,
)
from gymtune.agents.models import load_model
from gymtune.agents.torch_engine import TorchEngine
from gymtune.envs import ChatEnv, Task
from gymtune.envs.action import Action
from gymtune.rewards.components import Component, failed_calls
from gymtune.rewards.episode import Episode
from gymtune.tools import Toolbox, tool
from gymtune.tools.errors import ConfigError, DataError
from gymtune.tools.messages import Message, user

CALL = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'


def score(episode: Episode) -> float:
    episode.success = episode.answer == episode.gt
    return float(episode.success)


GT = Component("gt", "scored", score)


class WordEnv(ChatEnv):
    """Say `word 0`, `word 1`, ... ; counts what is open; `on_step` may misbehave."""

    open = 0
    made = 0

    def __init__(self, tools: Sequence = (), size: int = 50, on_step: Callable = lambda env, action: None, **options):
        tasks = [Task(f"word/{i}", (user(f"Say word {i}"),), f"word {i}", None, {"place": i}) for i in range(size)]
        super().__init__(tasks, [GT, failed_calls], toolbox=Toolbox(list(tools)), **options)
        self.on_step = on_step
        WordEnv.open += 1
        WordEnv.made += 1

    def step(self, action):
        self.on_step(self, action)
        return super().step(action)

    def close(self):
        WordEnv.open -= 1


@pytest.fixture(autouse=True)
def every_env_is_closed():
    WordEnv.open = WordEnv.made = 0
    yield
    assert WordEnv.open == 0


def answer(messages: Sequence[Message]) -> str:
    return messages[0]["content"].removeprefix("Say ")


def after_call(name: str) -> FunctionAgent:
    """An agent that calls a tool once, then answers."""
    return FunctionAgent(lambda messages: answer(messages) if len(messages) > 1 else CALL.format(name))


def specs(n: int, samples: int = 1):
    return plan_episodes(range(n), samples, run_id="run", seed=5)


class ScriptedBackend:
    """Samples what it was told to, turn by turn, with log-probs -1, -2, ... of each turn."""

    max_model_length = 2000

    def __init__(self, renderer: Renderer, *texts: str, reason: str = "stop"):
        self.turns = [renderer.assistant_ids(text) for text in texts]
        self.reason = reason
        self.requests: list[GenerateRequest] = []
        self.released: list[str] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        ids = self.turns[sum(r.session == request.session for r in self.requests)]
        self.requests.append(request)
        ids = ids if self.reason == "stop" else ids[:-1]
        return Generation(ids, [-1.0 - i for i in range(len(ids))], self.reason, 7)

    def release(self, session: str) -> None:
        self.released.append(session)

    def load_weights(self, version, weights) -> None:
        raise NotImplementedError


@tool(in_memory=True)
def echo() -> str:
    """Echo."""
    return "echoed <|im_end|>"


# -- what is recorded --------------------------------------------------------------------------------------------


def test_the_scripted_agent_solves_every_calculator_task():
    trajectories = rollout("gymtune/Calculator-v0", ScriptedAgent(), 200)
    assert sum(t.success is True and t.reward == 1.0 and t.terminated for t in trajectories) == 200
    assert all(t.error is None and t.tokens == [] and t.stop_reason == "stop" for t in trajectories)
    assert {len(t.turns) for t in trajectories} == {2, 3}


def test_results_come_in_the_order_of_the_specs_whatever_ends_first():
    class Slow(FunctionAgent):
        async def act(self, trajectory, env):
            await asyncio.sleep(0.02 * (5 - trajectory.task_index))
            return await super().act(trajectory, env)

    finished: list[int] = []
    planned = specs(6, 2)
    trajectories = run_episodes(
        WordEnv, Slow(answer), planned, on_finish=lambda trajectory: finished.append(trajectory.task_index)
    )
    assert [t.trajectory_id for t in trajectories] == [spec.trajectory_id for spec in planned]
    assert [(t.task_index, t.sample) for t in trajectories] == [(i, k) for i in range(6) for k in range(2)]
    assert [len({t.group_id for t in trajectories[i : i + 2]}) for i in range(0, 12, 2)] == [1] * 6
    assert len({t.group_id for t in trajectories}) == 6
    assert finished == sorted(finished, reverse=True)


def test_the_mask_is_one_exactly_on_what_was_sampled(tiny_renderer: Renderer):
    call = CALL.format("echo")
    backend = ScriptedBackend(tiny_renderer, call, "word 0")
    agent = ModelAgent(backend, tiny_renderer)
    (trajectory,) = run_episodes(lambda: WordEnv([echo]), agent, specs(1))
    tokenizer = tiny_renderer.tokenizer
    rows = list(zip(trajectory.tokens, trajectory.response_mask, trajectory.logprobs, strict=True))
    for place, (token, mask, logprob) in enumerate(rows):
        print(f"{place:4} {tokenizer.decode([token])!r:24} {mask} {'' if logprob is None else logprob}")
    text = "".join(("[" if mask else "") + tokenizer.decode([token]) + ("]" if mask else "") for token, mask, _ in rows)
    schema = json.dumps(json.loads(trajectory.tools)[0]["function"], separators=(",", ":"))
    assert text.replace("][", "") == (
        f"<|im_start|>system\n<tools>\n{schema}\n</tools><|im_end|><|im_start|>user\nSay word 0<|im_end|>"
        "<|im_start|>assistant\n"
        f"[{call}<|im_end|>]"
        "<|im_start|>tool\nechoed <|im_end|><|im_end|><|im_start|>assistant\n"
        "[word 0<|im_end|>]"
    )
    sampled = [*backend.turns[0], *backend.turns[1]]
    assert [token for token, mask, _ in rows if mask] == sampled
    assert [token for token, mask, _ in rows if mask].count(tiny_renderer.stop_ids[0]) == 2
    assert [logprob for _, mask, logprob in rows if mask] == [-1.0 - i for t in backend.turns for i in range(len(t))]
    assert all(logprob is None for _, mask, logprob in rows if not mask)
    # Each turn's prompt is the history as it stands.
    assert [list(r.prompt_ids) for r in backend.requests] == [trajectory.tokens[: t.start] for t in trajectory.turns]
    assert [(t.finish_reason, t.policy_version, t.reward) for t in trajectory.turns] == [
        ("stop", 7, 0.0),
        ("stop", 7, 1.0),
    ]
    assert [(use.name, use.outcome) for use in trajectory.turns[0].tools] == [("echo", "ok")]
    assert (trajectory.rewards, trajectory.reward) == ({"gt": 1.0, "failed_calls": 0.0}, 1.0)
    assert trajectory.metadata == {"place": 0}
    assert trajectory.gt == "word 0"
    assert backend.released == [trajectory.trajectory_id]


def test_the_seed_of_a_turn_depends_on_run_task_sample_and_turn(tiny_renderer: Renderer):
    def seeds(seed: int) -> list[int]:
        backend = ScriptedBackend(tiny_renderer, CALL.format("echo"), "x")
        agent = ModelAgent(backend, tiny_renderer)
        run_episodes(lambda: WordEnv([echo]), agent, plan_episodes([0, 1, 1], 2, run_id="r", seed=seed))
        return [request.seed for request in backend.requests]

    assert len(set(seeds(1))) == 12
    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))


def test_a_template_that_cannot_continue_begins_a_segment_with_ids_of_its_own(tiny_renderer: Renderer):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content + '!' }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(tiny_renderer.tokenizer, chat_template=template)
    backend = ScriptedBackend(renderer, CALL.format("echo"), "word 0")
    (trajectory,) = run_episodes(lambda: WordEnv([echo]), ModelAgent(backend, renderer), specs(1))
    assert trajectory.reward == 1.0
    assert len(trajectory.segments) == 2
    (_, middle), (start, end) = trajectory.segments
    assert middle == start == trajectory.turns[0].end
    messages, schemas = trajectory.messages, json.loads(trajectory.tools)
    assert trajectory.tokens[:middle] == [*renderer.prompt(messages[:1], schemas), *backend.turns[0]]
    assert trajectory.tokens[start:end] == [*renderer.prompt(messages[:-1], schemas), *backend.turns[1]]
    assert trajectory.sampled_tokens == sum(map(len, backend.turns))


# -- how episodes end --------------------------------------------------------------------------------------------


def test_a_turn_cut_by_length_ends_the_episode(tiny_renderer: Renderer):
    backend = ScriptedBackend(tiny_renderer, "word 0", reason="length")
    (trajectory,) = run_episodes(WordEnv, ModelAgent(backend, tiny_renderer), specs(1))
    assert (trajectory.stop_reason, trajectory.truncated, trajectory.terminated) == ("length", True, False)
    assert trajectory.turns[0].finish_reason == "length"
    assert trajectory.reward == 1.0  # what is there is scored
    assert trajectory.tokens[-1] != tiny_renderer.stop_ids[0]


@pytest.mark.parametrize("room", [0, 1])
def test_an_episode_ends_by_context_when_the_next_turn_cannot_fit(tiny_renderer: Renderer, room: int):
    backend = ScriptedBackend(tiny_renderer, CALL.format("echo"), "word 0")
    (whole,) = run_episodes(lambda: WordEnv([echo]), ModelAgent(backend, tiny_renderer), specs(1))
    backend = ScriptedBackend(tiny_renderer, CALL.format("echo"), "word 0")
    backend.max_model_length = whole.turns[1].start + room
    (trajectory,) = run_episodes(lambda: WordEnv([echo]), ModelAgent(backend, tiny_renderer), specs(1))
    if room:
        assert trajectory.stop_reason == "stop"
        return
    assert (trajectory.stop_reason, trajectory.truncated) == ("context", True)
    assert trajectory.tokens == whole.tokens[: whole.turns[0].end]  # nothing is appended that no turn follows
    assert len(trajectory.turns) == 1
    assert (trajectory.success, trajectory.reward) == (False, 0.0)


def test_a_prompt_that_does_not_fit_ends_by_context_before_the_first_turn(tiny_renderer: Renderer):
    backend = ScriptedBackend(tiny_renderer)
    backend.max_model_length = 3
    (trajectory,) = run_episodes(WordEnv, ModelAgent(backend, tiny_renderer), specs(1))
    assert (trajectory.stop_reason, trajectory.error) == ("context", None)
    assert [(turn.start, turn.end, turn.finish_reason) for turn in trajectory.turns] == [
        (len(trajectory.tokens), len(trajectory.tokens), "context")
    ]
    assert trajectory.sampled_tokens == 0


class Sleeper(Agent):
    """Calls a tool without end; turn `n` takes `seconds[n]`, asleep or (`busy`) without giving the loop a chance."""

    def __init__(self, *seconds: float, busy: bool = False):
        self.seconds, self.busy = seconds, busy

    async def act(self, trajectory: Trajectory, env: ChatEnv) -> Action:
        seconds = self.seconds[min(len(trajectory.turns), len(self.seconds) - 1)]
        time.sleep(seconds) if self.busy else await asyncio.sleep(seconds)
        trajectory.append_turn(CALL.format("echo"), "stop")
        return Action(CALL.format("echo"))


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(
    ("limits", "agent"),
    [
        (Limits(turn_seconds=0.1), Sleeper(0.0, 30.0)),
        (Limits(turn_seconds=20, episode_seconds=0.1), Sleeper(0.0, 30.0)),
        (Limits(turn_seconds=20, episode_seconds=20, rollout_seconds=0.1), Sleeper(0.0, 30.0)),
        (Limits(turn_seconds=None, episode_seconds=0.1), Sleeper(0.02)),
        (Limits(episode_seconds=0.05), Sleeper(0.02, busy=True)),
    ],
    ids=["turn", "episode", "rollout", "many turns", "never waits"],
)
def test_a_deadline_ends_the_episode_and_the_last_text_is_scored(limits, agent, in_thread):
    began = time.perf_counter()
    tools = [replace(echo, in_memory=not in_thread)]
    (trajectory,) = run_episodes(lambda: WordEnv(tools, max_turns=1000), agent, specs(1), limits=limits)
    assert time.perf_counter() - began < 5
    assert (trajectory.stop_reason, trajectory.truncated, trajectory.terminated) == ("deadline", True, False)
    assert trajectory.error is None
    assert len(trajectory.turns) >= 1
    assert trajectory.success is False


def test_the_deadline_of_the_rollout_leaves_what_was_finished():
    def run(rollout_seconds: float | None) -> list[str | None]:
        limits = Limits(rollout_seconds=rollout_seconds)
        agent = Sleeper(0.05)
        make = lambda: WordEnv([echo], max_turns=1)  # noqa: E731
        return [t.stop_reason for t in run_episodes(make, agent, specs(8), limits=limits, concurrency=1)]

    assert run(None) == ["max_turns"] * 8
    reasons = run(0.18)
    assert reasons[0] == "max_turns"
    assert reasons[-1] == "deadline"
    assert reasons == sorted(reasons, reverse=True)


def test_a_timeout_of_the_backend_is_a_failure_and_no_deadline():
    class Server(Agent):
        async def act(self, trajectory, env):
            raise TimeoutError("the server did not answer")

    (trajectory,) = run_episodes(WordEnv, Server(), specs(1))
    assert "the server did not answer" in (trajectory.error or "")
    assert trajectory.stop_reason is None


# -- failures ----------------------------------------------------------------------------------------------------


def test_an_env_that_raises_fails_its_own_episode_and_no_other():
    def on_step(env, action):
        if env.task.task_id in ("word/3", "word/7"):
            raise ZeroDivisionError("in the env \ud800")

    for concurrency in (1, 4):
        WordEnv.made = 0
        trajectories = run_episodes(
            lambda: WordEnv(on_step=on_step), FunctionAgent(answer), specs(12), concurrency=concurrency
        )
        failed = [t for t in trajectories if t.error is not None]
        assert [t.task_id for t in failed] == ["word/3", "word/7"]
        assert all("in the env" in t.error and "on_step" in t.error for t in failed)  # message and traceback
        assert all(t.reward is None and not t.terminated and not t.truncated for t in failed)
        assert [m["content"] for m in failed[0].messages] == ["Say word 3"]
        assert [t.reward for t in trajectories if t.error is None] == [1.0] * 10
        assert WordEnv.made <= concurrency + 2  # envs are used again, those that failed are not


def test_an_env_that_cannot_be_closed_harms_nobody():
    class Stuck(WordEnv):
        def close(self):
            super().close()
            raise OSError("still busy")

    trajectories = run_episodes(
        lambda: Stuck(on_step=lambda env, action: 1 / 0 if env.task.task_id == "word/1" else None),
        FunctionAgent(answer),
        specs(3),
    )
    assert [t.error is None for t in trajectories] == [True, False, True]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda env: env.episode.messages.append({"role": "user", "content": "\ud800"}), "messages has no JSON form"),
        (lambda env: env.episode.messages.append({"role": "user", "content": "x", "wieght": 1}), "messages.2.wieght"),
        (lambda env: setattr(env.episode, "stop_reason", object()), "stop_reason has no JSON form"),
    ],
)
def test_what_has_no_json_form_fails_its_own_episode(spoil, told):
    class Odd(WordEnv):
        def step(self, action):
            result = super().step(action)
            if self.task.task_id == "word/1":
                spoil(self)
                result[-1]["stop_reason"] = self.episode.stop_reason
            return result

    trajectories = run_episodes(Odd, FunctionAgent(answer), specs(3))
    bad = trajectories[1]
    assert [t.error is None for t in trajectories] == [True, False, True]
    assert told in bad.error
    assert Trajectory.model_validate_json(bad.model_dump_json()) == bad
    assert (bad.task_index, bad.trajectory_id) == (1, specs(3)[1].trajectory_id)


def test_a_task_that_cannot_be_had_is_an_error_of_its_episode():
    trajectories = run_episodes(lambda: WordEnv(size=2), FunctionAgent(answer), specs(3))
    assert [t.error is None for t in trajectories] == [True, True, False]


@pytest.mark.parametrize("where", ["make", "on_finish"])
def test_what_is_no_episodes_fault_ends_the_rollout(where):
    def make():
        if where == "make" and WordEnv.made == 3:
            raise ConfigError("no such env")
        return WordEnv()

    def on_finish(trajectory):
        if where == "on_finish" and trajectory.task_index == 5:
            raise DataError("disk full")

    with pytest.raises(ConfigError if where == "make" else DataError, match=r"no such env|disk full"):
        run_episodes(make, Sleeper(0.01), specs(8), on_finish=on_finish, concurrency=4)


def test_concurrency_below_one_is_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        run_episodes(WordEnv, FunctionAgent(answer), specs(1), concurrency=0)


# -- tools beside everything else --------------------------------------------------------------------------------


@pytest.fixture
def hung():
    """Two tools that hang until the test is over."""
    over = threading.Event()

    @tool(time_limit=0.4)
    def hang() -> str:
        """Hang."""
        over.wait(30)
        return "late"

    @tool(time_limit=0.4)
    async def sleep() -> str:
        """Sleep."""
        await asyncio.sleep(30)
        return "late"

    yield hang, sleep
    over.set()


@pytest.mark.parametrize("name", ["hang", "sleep"])
def test_a_hung_tool_delays_nobody_and_ends_in_timeout(hung, name):
    finished: list[int] = []

    def act(messages: Sequence[Message]) -> str:
        if len(messages) > 1:
            return answer(messages)
        return CALL.format(name if messages[0]["content"] == "Say word 0" else "echo")

    trajectories = run_episodes(
        lambda: WordEnv([*hung, echo]), FunctionAgent(act), specs(6), on_finish=lambda t: finished.append(t.task_index)
    )
    assert finished[-1] == 0
    assert [t.turns[0].tools[0].outcome for t in trajectories] == ["timeout"] + ["ok"] * 5
    assert all(t.success for t in trajectories)
    assert trajectories[0].turns[0].step_seconds == pytest.approx(0.4, abs=0.3)
    assert max(t.turns[0].step_seconds for t in trajectories[1:]) < 0.3


def test_a_tool_at_work_when_the_deadline_passes_ends_by_its_own_limit(hung):
    limits = Limits(episode_seconds=0.1, grace_seconds=5)
    (trajectory,) = run_episodes(lambda: WordEnv(hung), after_call("hang"), specs(1), limits=limits)
    assert trajectory.stop_reason == "deadline"
    assert [use.outcome for use in trajectory.turns[0].tools] == ["timeout"]


def test_an_env_that_hangs_past_the_deadline_is_a_failure(hung):
    over = threading.Event()

    def on_step(env, action):
        if env.task.task_id == "word/0":
            over.wait(30)

    trajectories = run_episodes(
        lambda: WordEnv(hung, on_step=on_step),
        FunctionAgent(answer),
        specs(3),
        limits=Limits(episode_seconds=0.2, grace_seconds=0.2),
    )
    over.set()
    assert "did not return within 0.2 seconds of the deadline" in (trajectories[0].error or "")
    assert trajectories[0].reward is None
    assert [t.success for t in trajectories[1:]] == [True, True]


def test_a_stall_says_what_is_pending():
    stalls: list[list[str]] = []
    agent = Sleeper(0.35)
    limits = Limits(stall_seconds=0.1)
    make = lambda: WordEnv([echo], max_turns=1)  # noqa: E731
    run_episodes(make, agent, specs(2), limits=limits, concurrency=1, on_stall=stalls.append)
    assert stalls
    assert all(len(names) == 1 and names[0].startswith("run/v0/t") for names in stalls)
    stalls.clear()
    run_episodes(make, Sleeper(0.0), specs(2), limits=limits, on_stall=stalls.append)
    assert stalls == []


# -- interrupts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_keyboard_interrupt_passes(hung, in_thread):
    def on_step(env, action):
        if env.task.task_id == "word/2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_episodes(
            lambda: WordEnv(hung if in_thread else (), on_step=on_step), FunctionAgent(answer), specs(6), concurrency=2
        )
    assert WordEnv.made >= 1


def test_an_interrupt_is_heard_while_no_episode_ever_waits():
    finished = Counter[str]()

    def on_step(env, action):
        if env.task.task_id == "word/5":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_episodes(
            lambda: WordEnv(on_step=on_step),
            FunctionAgent(answer),
            specs(50, 10),
            on_finish=lambda trajectory: finished.update([trajectory.task_id]),
            concurrency=4,
        )
    assert finished.total() < 100


# -- the same again ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tiny_model, tiny_renderer: Renderer) -> Callable[[], ModelAgent]:
    def make() -> ModelAgent:
        engine = TorchEngine(load_model(tiny_model), max_sequences=6)
        return ModelAgent(engine, tiny_renderer, Sampling(max_new_tokens=12))

    return make


def bits(trajectories: Sequence[Trajectory]) -> list[dict]:
    times = {"generate_seconds": ..., "step_seconds": ..., "tools": {"__all__": {"seconds"}}}
    return [t.model_dump(exclude={"turns": {"__all__": times}}) for t in trajectories]


def test_the_same_rollout_twice_gives_the_same_bits(policy):
    runs = [rollout("gymtune/Calculator-v0", policy(), 5, num_generations=4, seed=3) for _ in range(2)]
    assert bits(runs[0]) == bits(runs[1])
    assert all(t.error is None and t.sampled_tokens for t in runs[0])
    assert len({tuple(t.tokens) for t in runs[0]}) == 20  # samples of a group differ
    other = rollout("gymtune/Calculator-v0", policy(), 5, num_generations=4, seed=4)
    assert [t.tokens for t in other] != [t.tokens for t in runs[0]]


def test_scripted_episodes_do_not_depend_on_concurrency(tiny_renderer: Renderer):
    agent = ScriptedAgent(tiny_renderer)
    make = env_factory("gymtune/Calculator-v0", agent)
    runs = [bits(run_episodes(make, agent, specs(20), concurrency=c)) for c in (1, 3, 64)]
    assert runs[0] == runs[1] == runs[2]
