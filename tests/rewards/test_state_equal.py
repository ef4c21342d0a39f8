from typing import Any

import pytest

from gymtune.envs import ChatEnv, Task
from gymtune.rewards import Episode, check, check_episode, gt_component
from gymtune.rewards.state_equal import StateEqual
from gymtune.rewards.trial import try_checker
from gymtune.tools import Toolbox, tool
from gymtune.tools.formats.hermes import HermesFormat
from gymtune.tools.messages import user

GT = {"light": {"on": True, "level": 3}, "log": ["a", {"b": 1}]}


def test_no_attack_passes_in_full_or_in_part() -> None:
    gts: list[Any] = [GT, {"a": {}}, {"a": []}, {"a": [{}, None, 0]}]
    for checker in (StateEqual(), StateEqual(partial=True)):
        for gt in gts:
            assert check(checker, gt, gt).success is True
        assert {k: r.accepted for k, r in try_checker(checker, gts).items() if r.accepted} == {}
    assert {k: r.accepted for k, r in try_checker(StateEqual(), [{}]).items() if r.accepted} == {}


@pytest.mark.parametrize(
    ("state", "full", "partial"),
    [
        ({**GT, "more": 1}, False, True),
        ({**GT, "light": {**GT["light"], "hue": 7}}, False, True),  # type: ignore[dict-item]
        ({**GT, "log": ["a", {"b": 1}, "c"]}, False, False),
        ({"light": {"on": True, "level": 3.0}, "log": ["a", {"b": 1}]}, True, True),
        ({"light": GT["light"]}, False, False),
        ({**GT, "log": ("a", {"b": 1})}, False, False),  # not JSON: the env's mistake, never right
    ],
)
def test_keys_that_gt_does_not_name_are_free_only_in_part(state: Any, full: bool, partial: bool) -> None:
    assert check(StateEqual(), state, GT).success is full
    assert check(StateEqual(partial=True), state, GT).success is partial


def test_the_detail_is_a_short_diff_of_paths() -> None:
    state = {"light": {"on": 1, "level": 3}, "extra": 1, "log": []}
    assert check(StateEqual(), state, GT).detail == "$.light.on differs; $.log differs; $.extra is extra"


def test_what_a_hostile_agent_stored_is_wrong_and_breaks_nothing() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for state in (
        deep,
        {"a": deep},
        {"a": "x" * 1_000_000},
        {"\ud800": 1, "a": 1},
        dict.fromkeys(map(str, range(10**5))),
    ):
        verdict = check(StateEqual(), state, {"a": 1})
        assert verdict.kind == "wrong"
        assert len(verdict.detail) < 300
        assert verdict.detail.encode()


def test_a_partial_gt_that_names_nothing_and_an_env_without_state_are_broken() -> None:
    assert check(StateEqual(partial=True), {"a": 1}, {}).kind == "broken"
    verdict = check_episode(StateEqual(), Episode(gt={"a": 1}, messages=[]))
    assert (verdict.kind, verdict.score) == ("broken", None)
    assert "override ChatEnv.state" in verdict.detail


class LampEnv(ChatEnv):
    def make_toolbox(self, task: Task) -> Toolbox:
        self.level = 0

        def set_level(level: int) -> str:
            """Set the lamp's level."""
            self.level = level
            return "ok"

        return Toolbox([tool(set_level)])

    def state(self) -> Any:
        return {"level": self.level}


@pytest.mark.parametrize(("level", "success"), [(3, True), (4, False), (None, False)])
def test_an_episode_is_judged_by_what_was_done_not_by_what_was_said(level: int | None, success: bool) -> None:
    env = LampEnv([Task("t", (user("Set it to 3."),), {"level": 3})], [gt_component(StateEqual())])
    env.reset(options={"task_index": 0})
    if level is not None:
        env.step(HermesFormat().render("", [{"name": "set_level", "arguments": {"level": level}}]))
    _, reward, terminated, _, info = env.step('Done: {"level": 3}')
    assert (terminated, info["success"], reward) == (True, success, float(success))
