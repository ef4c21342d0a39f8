"""The contract over the whole registry; and each promise seen broken, on an env made to break it."""

import re
from typing import Any

import gymnasium
import pytest

from gymtune.envs import ChatEnv, Task, check_contract, env_ids, make_env
from gymtune.envs.chat_env import Observation
from gymtune.envs.contract import check_briefly
from gymtune.envs.files import example_path
from gymtune.rewards import Checker, Component, Episode, NumericChecker, Verdict, gt_component
from gymtune.tools import Tool, Toolbox
from gymtune.tools.errors import ConfigError
from gymtune.tools.messages import Message, user

PROMISES = [
    "gymnasium's check_env is clean",
    "the gold episode scores full",
    "saying nothing scores nothing",
    "junk scores nothing",
    "the same seed gives the same episode",
    "a bad call is answered, not run",
    "a broken checker is no score",
    "no attack is taken for the answer",
]


#: Arguments under which an env is checked beside its defaults.
OTHER: dict[str, list[dict[str, Any]]] = {
    "gymtune/Arithmetic-v0": [{"split": "test", "seed": 3, "levels": [1, 2, 3]}, {"warmup": 0.5}],
    "gymtune/Calculator-v0": [{"split": "test", "seed": 3}],
    "gymtune/Dialog-v0": [{"split": "test", "seed": 3}],
    "gymtune/Math-v0": [
        {"checker": "math"}, {"checker": "math_verify"}, {"tools": ["calculator", "python"]},
    ],
    "gymtune/Preference-v0": [{"data": str(example_path("unpaired"))}, {"data": str(example_path("prompts"))}],
    "gymtune/ToolUse-v0": [{"data": str(example_path("bfcl"))}, {"rewards": {"gt": 1.0, "failed_calls": 0.1}}],
}  # fmt: skip
CHECKED = [(env_id, kwargs) for env_id in env_ids() for kwargs in [{}, *OTHER[env_id]]]


@pytest.mark.parametrize(("env_id", "kwargs"), CHECKED)
def test_every_env_keeps_the_contract(env_id: str, kwargs: dict[str, Any]) -> None:
    findings = check_contract(env_id, **kwargs)
    assert [finding.promise for finding in findings] == PROMISES
    assert [finding for finding in findings if not finding.holds] == []
    attacks = findings[-1].attacks
    assert attacks or "prompts" in str(kwargs)  # prompts alone have no gt to be fooled about
    assert all(tried > 0 and taken == 0 for tried, taken in attacks.values())


class Lenient(Checker):
    """Right when the gt stands anywhere in the answer: the classic hole."""

    def verdict(self, answer: str, gt: Any) -> Verdict:
        return Verdict.of(str(gt) in answer)


class Easy(Checker):
    def verdict(self, answer: str, gt: Any) -> Verdict:
        return Verdict.of(answer in ("", str(gt)))


def says(text: str) -> tuple[Message, ...]:
    return ({"role": "assistant", "content": text},)


class Good(ChatEnv):
    """Keeps every promise; the others below break one each."""

    checker: Checker = NumericChecker()
    gold: tuple[Message, ...] | None = says("5")

    def __init__(self, **options: Any) -> None:
        echo = Tool("echo", "", {"type": "object"}, lambda **arguments: arguments, in_memory=True)
        tasks = [Task(f"t{i}", (user(f"2 + 3? ({i})"),), 5, self.gold) for i in range(30)]
        super().__init__(tasks, [gt_component(self.checker)], toolbox=Toolbox([echo]), **options)


class Quiet(Good):
    """Forgets to seed: gymnasium's own check sees it, and so does ours."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        return super().reset(options=options)


class Warns(Good):
    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # no render_fps


class WrongGold(Good):
    gold = says("6")


class EndlessGold(Good):
    gold = ({"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "echo", "arguments": {}}}]},)  # fmt: skip  # noqa: E501


class NeverOver(Good):
    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, _, *rest = super().step(action)
        return observation, reward, False, *rest


class CrashingGold(Good):
    gold = (*says("5"), *says("5"))  # a step too many


class PaysSilence(Good):
    checker = Easy()


class PaysJunk(Good):
    checker = Lenient()


class PaysTurns(Good):
    """Nothing is a success, and yet every turn is paid."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.components["turns"] = Component("turns", "turn", lambda episode: 1.0)
        self.weights["turns"] = 0.1


class HidesBroken(Good):
    """Takes a crash of the checker for a wrong answer."""

    def _reward(self, episode: Episode) -> tuple[float, dict[str, float | None]]:
        reward, values = super()._reward(episode)
        return reward, {name: value or 0.0 for name, value in values.items()}


class PaysShaping(PaysTurns):
    """Pays for turns too, and says so."""

    pays_without_success = True


class RunsAnything(Good):
    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        return super().step(action.replace("no_such_tool", "echo"))


class Unanswered(Good):
    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        return ((), *super().step(action)[1:])


class Crashes(Good):
    def _take_turn(self, episode: Episode, action: Any) -> list[Message]:
        raise KeyError("lost")


GYMNASIUM, GOLD, SILENCE, JUNK, SEED, BAD_CALL, BROKEN, ATTACK = PROMISES
BREAKS: dict[type[Good], tuple[set[str], str]] = {
    Good: (set(), ""),
    Quiet: ({GYMNASIUM, SEED}, "seed 7 gave"),
    Warns: ({GYMNASIUM}, "render_fps"),
    WrongGold: ({GOLD}, "'success': False"),
    EndlessGold: ({GOLD}, "'terminated': False"),
    NeverOver: ({GYMNASIUM, GOLD, BROKEN}, "'terminated': False"),
    CrashingGold: ({GOLD}, "over"),
    PaysSilence: ({SILENCE, ATTACK}, "'' earned 1.0"),
    PaysJunk: ({JUNK, ATTACK}, "'0 1 2 3 4 5 6 7 8 9' earned 1.0"),
    PaysShaping: (set(), ""),
    HidesBroken: ({BROKEN}, "the checker crashed, and gt is 0.0"),
    PaysTurns: ({SILENCE, JUNK}, "earned 0.1, success False"),
    RunsAnything: ({BAD_CALL}, "ended in .*ok"),
    Unanswered: ({BAD_CALL}, r"answered by \(\)"),
    Crashes: (set(PROMISES), "KeyError: 'lost'"),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_promise_is_found(broken: type[Good]) -> None:
    env_id = f"tests/{broken.__name__}-v0"
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, entry_point=broken)
    expected, words = BREAKS[broken]
    findings = check_contract(env_id)
    assert {finding.promise for finding in findings if not finding.holds} == expected
    details = "\n".join(finding.detail for finding in findings if not finding.holds)
    assert re.search(words, details), details


@pytest.mark.parametrize("broken", BREAKS)
def test_the_brief_check_finds_what_learning_leans_on(broken: type[Good]) -> None:
    expected = BREAKS[broken][0] & {GOLD, SILENCE, JUNK, BAD_CALL}
    assert {finding.promise for finding in check_briefly(broken) if not finding.holds} == expected


@pytest.mark.parametrize(("env_id", "kwargs"), CHECKED)
def test_the_brief_check_is_no_stricter(env_id: str, kwargs: dict[str, Any]) -> None:
    assert all(finding.holds for finding in check_briefly(lambda: make_env(env_id, **kwargs)))


def test_a_gold_is_not_required_and_its_lack_is_said() -> None:
    class NoGold(Good):
        gold = None

    gymnasium.register("tests/NoGold-v0", entry_point=NoGold)
    finding = check_contract("tests/NoGold-v0")[1]
    assert (finding.holds, finding.detail) == (True, "0 of 20 tasks have a gold episode")


def test_every_env_made_is_closed() -> None:
    opened: list[int] = []
    closed: list[int] = []

    class Counted(Crashes):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            opened.append(id(self))

        def close(self) -> None:
            closed.append(id(self))

    gymnasium.register("tests/Counted-v0", entry_point=Counted)
    check_contract("tests/Counted-v0")
    assert len(opened) == len(closed) > 0


@pytest.mark.parametrize(("env_id", "kwargs"), [("gymtune/Nothing-v0", {}), ("gymtune/Calculator-v0", {"levle": 1})])
def test_what_cannot_be_made_is_the_callers_mistake(env_id: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_contract(env_id, **kwargs)
