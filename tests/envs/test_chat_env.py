"""ChatEnv: the table of endings, rewards by turn, what `reset` and `step` refuse."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gymtune.envs import Action, ChatEnv, Task
from gymtune.rewards import Checker, Component, Episode, NumericChecker, Verdict, failed_calls, gt_component, unfinished
from gymtune.tools import Tool, Toolbox, get_chat_format
from gymtune.tools.errors import ConfigError, EnvError
from gymtune.tools.messages import system, user

CALL = '<tool_call>\n{"name": "double", "arguments": {"n": 21}}\n</tool_call>'
TASKS = [Task(f"t{i}", (system("Be brief."), user(f"Twice {i}?")), str(2 * i)) for i in range(50)]
RIGHT, WRONG = "42", "41"  # for task 21


class Doubler:
    """A tool that remembers with what it was called."""

    def __init__(self) -> None:
        self.called: list[int] = []

    def __call__(self, n: int) -> int:
        self.called.append(n)
        return 2 * n

    def tool(self) -> Tool:
        parameters = {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        }
        return Tool("double", "Twice n.", parameters, self, in_memory=True)


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def make(doubler: Doubler) -> Callable[..., ChatEnv]:
    def env(**options: Any) -> ChatEnv:
        components = options.pop("components", [gt_component(NumericChecker()), failed_calls, unfinished])
        options = {"rewards": {"gt": 1.0, "failed_calls": 0.25, "unfinished": 0.5}, "max_turns": 3, **options}
        made = ChatEnv(TASKS, components, toolbox=Toolbox([doubler.tool()]), **options)
        made.reset(options={"task_index": 21})
        return made

    return env


def play(env: ChatEnv, *actions: str) -> tuple[list[float], bool, bool, dict[str, Any]]:
    """Step; only the last action may end the episode."""
    rewards = []
    for action in actions:
        assert env.episode is not None
        assert not env.episode.over
        _, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
    return rewards, terminated, truncated, info


#: actions -> terminated, truncated, stop_reason, success, components of the last turn, calls run.
#: A truncated episode bootstraps, a terminated one does not; no ending is both.
ENDINGS: dict[str, tuple[list[str], bool, bool, str | None, bool | None, Mapping[str, float], int]] = {
    "stop, with calls, turns left": ([CALL], False, False, None, None, {"failed_calls": 0.0}, 1),
    "stop, with calls, at max_turns": (
        [CALL] * 3, False, True, "max_turns", None, {"failed_calls": 0.0, "unfinished": -1.0}, 3,
    ),
    "stop, no calls, right": ([RIGHT], True, False, "stop", True, {"gt": 1.0, "failed_calls": 0.0}, 0),
    "stop, no calls, wrong": ([WRONG], True, False, "stop", False, {"gt": 0.0, "failed_calls": 0.0}, 0),
    "stop, no calls, at max_turns": (
        [CALL, CALL, RIGHT], True, False, "stop", True, {"gt": 1.0, "failed_calls": 0.0}, 2,
    ),
    "length, right so far": (
        [Action(RIGHT, "length")], False, True, "length", True, {"gt": 1.0, "failed_calls": 0.0, "unfinished": -1.0}, 0,
    ),
    "length, with calls": (
        [Action(CALL, "length")], False, True, "length", False, {"gt": 0.0, "failed_calls": 0.0, "unfinished": -1.0}, 0,
    ),
    "length, while thinking": (
        [Action(f"<think>{RIGHT}", "length")], False, True, "length", False,
        {"gt": 0.0, "failed_calls": 0.0, "unfinished": -1.0}, 0,
    ),
    "context, the last text right": (
        [f"{RIGHT}{CALL}", Action("", "context")], False, True, "context", True,
        {"gt": 1.0, "failed_calls": 0.0, "unfinished": -1.0}, 1,
    ),
    "deadline, the last text wrong": (
        [CALL, Action("", "deadline")], False, True, "deadline", False,
        {"gt": 0.0, "failed_calls": 0.0, "unfinished": -1.0}, 1,
    ),
    "context, before any turn": (
        [Action("", "context")], False, True, "context", False, {"gt": 0.0, "failed_calls": 0.0, "unfinished": -1.0}, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_table_of_endings(ending: str, make: Callable[..., ChatEnv], doubler: Doubler) -> None:
    actions, terminated, truncated, stop_reason, success, components, runs = ENDINGS[ending]
    env = make()
    rewards, *flags, info = play(env, *actions)
    assert flags == [terminated, truncated]
    assert (info["stop_reason"], info["success"]) == (stop_reason, success)
    assert info["rewards"] == components
    weights = {"gt": 1.0, "failed_calls": 0.25, "unfinished": 0.5}
    assert rewards[-1] == sum(weights[name] * value for name, value in components.items())
    assert rewards[:-1] == [0.0] * (len(actions) - 1)
    assert doubler.called == [21] * runs
    assert env.episode is not None
    assert len(env.episode.all_results) == runs
    assert env.episode.over is (terminated or truncated)


@pytest.mark.parametrize("ending", [name for name, row in ENDINGS.items() if row[1] or row[2]])
def test_no_step_after_the_end(ending: str, make: Callable[..., ChatEnv]) -> None:
    env = make()
    play(env, *ENDINGS[ending][0])
    with pytest.raises(EnvError, match=r"over.*reset\(\) first"):
        env.step(RIGHT)
    env.reset(options={"task_index": 21})
    assert env.step(RIGHT)[1] == 1.0


def test_no_step_before_the_first_reset(doubler: Doubler) -> None:
    with pytest.raises(EnvError, match=r"reset\(\) first"):
        ChatEnv(TASKS, [unfinished]).step("hi")


def test_results_come_back_in_call_order_as_tool_messages(make: Callable[..., ChatEnv]) -> None:
    env = make()
    replies, *_, info = env.step("Let me see." + CALL + CALL.replace("21", "4"))
    assert replies == (
        {"role": "tool", "tool_call_id": "call_0_0", "name": "double", "content": "42"},
        {"role": "tool", "tool_call_id": "call_0_1", "name": "double", "content": "8"},
    )
    assert [r.tool_call_id for r in info["tool_results"]] == ["call_0_0", "call_0_1"]
    assert env.episode is not None
    assert [m["role"] for m in env.episode.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert env.episode.messages[2]["content"] == "Let me see."
    assert env.step(CALL)[0][0]["tool_call_id"] == "call_1_0"


@pytest.mark.parametrize(
    "action", [f"<think>{CALL}</think>{RIGHT}", Action(f"{CALL}</think>{RIGHT}", thinking_open=True)]
)
def test_calls_inside_thinking_are_not_calls(action: str, make: Callable[..., ChatEnv], doubler: Doubler) -> None:
    rewards, terminated, _, info = play(make(), action)
    assert (rewards, terminated, info["success"], info["tool_results"], doubler.called) == ([1.0], True, True, [], [])


def test_an_answer_inside_thinking_is_no_answer(make: Callable[..., ChatEnv]) -> None:
    assert play(make(), f"<think>{RIGHT}</think>")[3]["success"] is False


BAD_CALLS = {
    "parse_error": '<tool_call>{"name": "double", "arguments": {"n": 21}</tool_call>',
    "unknown_tool": CALL.replace("double", "dobule"),
    "schema_violation": CALL.replace("21", '"21"'),
}


@pytest.mark.parametrize("outcome", BAD_CALLS)
def test_a_bad_call_is_answered_counted_and_not_run(
    outcome: str, make: Callable[..., ChatEnv], doubler: Doubler
) -> None:
    env = make()
    replies, reward, terminated, truncated, info = env.step(BAD_CALLS[outcome])
    assert [r.outcome for r in info["tool_results"]] == [outcome]
    assert [m["role"] for m in replies] == ["tool"]
    assert replies[0]["content"].startswith(f"error ({outcome})")
    assert (reward, info["rewards"]) == (-0.25, {"failed_calls": -1.0})
    assert (terminated, truncated, doubler.called) == (False, False, [])


def test_rewards_are_those_of_the_turn(make: Callable[..., ChatEnv]) -> None:
    bad = BAD_CALLS["unknown_tool"]
    assert play(make(), bad + bad, CALL, RIGHT)[0] == [-0.5, 0.0, 1.0]
    assert play(make(), CALL, CALL, CALL + bad)[0] == [0.0, 0.0, -0.25 - 0.5]


class Broken(Checker):
    def verdict(self, answer: str, gt: Any) -> Verdict:
        raise RuntimeError("out of order")


def test_a_broken_checker_is_none_and_left_out_of_the_reward(make: Callable[..., ChatEnv]) -> None:
    bonus = Component("bonus", "end", lambda episode: 0.5)
    env = make(components=[gt_component(Broken()), bonus], rewards={"gt": 1.0, "bonus": 2.0})
    rewards, terminated, _, info = play(env, RIGHT)
    assert (rewards, terminated, info["rewards"], info["success"]) == ([1.0], True, {"gt": None, "bonus": 0.5}, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_component_that_is_not_finite_is_an_error(value: float, make: Callable[..., ChatEnv]) -> None:
    env = make(components=[Component("odd", "turn", lambda episode: value)], rewards={"odd": 1.0})
    with pytest.raises(EnvError, match="component 'odd' must be a finite number"):
        env.step(CALL)


def test_by_default_the_first_component_pays(make: Callable[..., ChatEnv]) -> None:
    rewards, *_, info = play(make(rewards=None), BAD_CALLS["parse_error"], Action(RIGHT, "length"))
    assert rewards == [0.0, 1.0]
    assert info["rewards"] == {"gt": 1.0, "failed_calls": 0.0, "unfinished": -1.0}  # seen, not paid


def test_an_env_may_have_no_component_of_its_own() -> None:
    env = ChatEnv(TASKS, [])
    env.reset(seed=0)
    assert env.step("hi")[1:4] == (0.0, True, False)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rewards": {"unfinishd": 1.0}}, ConfigError, r"no component 'unfinishd'.*Did you mean 'unfinished'"),
        ({"components": [unfinished, unfinished], "rewards": None}, ConfigError, "two components have one name"),
        ({"max_turns": 0}, ConfigError, "max_turns must be at least 1, got 0"),
        ({"sytem_prompt": "x"}, ConfigError, "no argument 'sytem_prompt'. Did you mean 'system_prompt'"),
        ({"render_mode": "human"}, ConfigError, "render_mode must be 'ansi' or None, got 'human'"),
        ({"chat_format": "hermse"}, ConfigError, "Did you mean 'hermes'"),
    ],
)
def test_what_an_env_cannot_be_made_of(
    options: dict[str, Any], error: type[Exception], words: str, make: Callable[..., ChatEnv]
) -> None:
    with pytest.raises(error, match=words):
        make(**options)


def test_an_env_without_tasks() -> None:
    with pytest.raises(EnvError, match="at least one task"):
        ChatEnv([], [unfinished])


def test_reset_gives_the_messages_and_the_tools(make: Callable[..., ChatEnv]) -> None:
    env = make()
    messages, info = env.reset(options={"task_index": 3})
    assert messages == TASKS[3].messages
    assert info == {"task_id": "t3", "tools": env.toolbox.schemas()}
    assert env.task is TASKS[3]
    assert messages in env.observation_space


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task_idx": 1}, r"unknown option 'task_idx'\. Did you mean 'task_index'"),
        ({"task_index": 50}, "whole number below 50, got 50"),
        ({"task_index": -1}, "got -1"),
        ({"task_index": "1"}, "got '1'"),
        ({"task_index": 1.0}, "got 1.0"),
    ],
)
def test_reset_refuses(options: dict[str, Any], words: str, make: Callable[..., ChatEnv]) -> None:
    with pytest.raises(ConfigError, match=words):
        make().reset(options=options)


def test_one_seed_one_sequence_of_episodes(make: Callable[..., ChatEnv]) -> None:
    first, second = make(), make()
    ids = [[env.reset(seed=3)[1]["task_id"], *(env.reset()[1]["task_id"] for _ in range(9))] for env in (first, second)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) > 5
    assert first.reset(seed=3)[1]["task_id"] == ids[0][0]


def test_reset_forgets_the_episode_before(make: Callable[..., ChatEnv]) -> None:
    env = make()
    play(env, CALL, "41")
    env.reset(options={"task_index": 21})
    fresh = Episode("42", list(TASKS[21].messages), toolbox=env.toolbox, state=env.state, opening=2)
    assert env.episode == fresh
    assert TASKS[21].messages == (system("Be brief."), user("Twice 21?"))


def test_a_system_prompt_replaces_the_tasks_own(make: Callable[..., ChatEnv]) -> None:
    messages, _ = make(system_prompt="Think.").reset(options={"task_index": 1})
    assert messages == (system("Think."), user("Twice 1?"))


def test_tools_of_an_episode_of_their_own() -> None:
    class Own(ChatEnv):
        def make_toolbox(self, task: Task) -> Toolbox:
            return Toolbox([Tool(f"tool_{task.task_id}", "", {"type": "object"}, lambda: task.gt, in_memory=True)])

    env = Own(TASKS, [unfinished])
    for index in (4, 5):
        assert env.reset(options={"task_index": index})[1]["tools"][0]["function"]["name"] == f"tool_t{index}"
        call = get_chat_format("hermes").render_call({"name": f"tool_t{index}", "arguments": {}})
        assert env.step(call)[0][0]["content"] == str(2 * index)


@pytest.mark.parametrize("action", [None, 5, b"42", ["42"]])
def test_an_action_is_text(action: Any, make: Callable[..., ChatEnv]) -> None:
    with pytest.raises(EnvError, match=f"an action must be a str, got {type(action).__name__}"):
        make().step(action)


def test_render_is_the_conversation(make: Callable[..., ChatEnv]) -> None:
    env = make(render_mode="ansi")
    env.step(CALL)
    env.step(RIGHT)
    lines = (env.render() or "").splitlines()
    assert lines[:2] == ["[system] Be brief.", "[user] Twice 21?"]
    assert "'name': 'double'" in lines[2]
    assert lines[3:] == ["[tool] 42", "[assistant] 42"]
    assert make().render() is None
