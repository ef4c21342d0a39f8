"""The presets against the seeds' own formulas, written out slowly here, on episodes played in a real env."""

import json
import math
import re
from typing import Any

import pytest

from gymtune.envs import ChatEnv, Task
from gymtune.envs.action import Action
from gymtune.rewards import ExactChecker, gt_component
from gymtune.rewards.presets import PRESETS
from gymtune.tools import Toolbox, tool
from gymtune.tools.messages import user

THOUGHT = "First I add the numbers, then I answer.</think>\n\n"  # the prompt opened it
LONG = "word " * 100


@tool(in_memory=True)
def calculate_math(expression: str) -> dict[str, str]:
    """Calculate."""
    return {"result": {"15 + 44": "59", "3 * 4": "12"}.get(expression, "0")}


@tool(in_memory=True)
def get_current_time(timezone: str = "Asia/Shanghai") -> dict[str, str]:
    """Tell the time."""
    return {"datetime": "2025-03-07 14:30:00", "timezone": timezone}


def write(name: str = "calculate_math", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD, MULTIPLY, TIME = write(expression="15 + 44"), write(expression="3 * 4"), write("get_current_time")
WRONG_NAME, WRONG_ARGUMENTS = write("calculator", expression="15 + 44"), write(formula="15 + 44")


def play(
    preset: str, gt: Any, texts: list[str], thinking: bool = False, question: str = "What is 15 + 44, and 3 * 4?"
) -> tuple[float, dict[str, float | None], bool | None]:
    """Play the texts; return the sum of the rewards, the components of the last turn, and the success."""
    tools = Toolbox([calculate_math, get_current_time])
    env = ChatEnv([Task("t", (user(question),), gt)], [], toolbox=tools, rewards=preset, max_turns=3)
    env.reset(options={"task_index": 0})
    total, over, info = 0.0, False, {}
    for text in texts:
        assert not over
        last = text is texts[-1]
        _, reward, terminated, truncated, info = env.step(Action(text, thinking_open=thinking and last))
        total, over = total + reward, terminated or truncated
    assert over
    return total, info["rewards"], info["success"]


# MiniMind's calculate_rewards, in its order, without the reward model and without tensors


def seed_penalty(text: str) -> float:
    tokens = re.findall(r"\w+|[^\w\s]", text.lower())
    grams = [tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)]
    return min(0.5, (len(grams) - len(set(grams))) * 0.5 * 2 / len(grams)) if grams else 0.0


def seed_calls(text: str) -> list[Any]:
    return [json.loads(found) for found in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]


def seed_thinking(response: str) -> tuple[float, str]:
    if "</think>" not in response:
        return 0.0, response
    thinking, answer = response.split("</think>", 1)
    reward = 1.0 if 20 <= len(thinking.strip()) <= 300 else -0.5
    return reward + (0.25 if response.count("</think>") == 1 else -0.25), answer.strip()


def seed_hits(text: str, gt: list[str]) -> int:
    numbers = [float(x) for x in re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.])", text.replace(",", ""))]
    return sum(g.lower() in text.lower() or any(abs(float(g) - n) < 1e-6 for n in numbers) for g in gt)


def seed_agent(gt: list[str], turns: list[str]) -> float:
    response = turns[-1]
    said = [turn.split("</think>", 1)[-1].strip() for turn in turns]
    calls = [call for text in said for call in seed_calls(text)]
    unfinished = len(turns) == 3 and bool(seed_calls(said[-1]))
    reward = -0.5 * sum(abs(text.count("<tool_call>") - text.count("</tool_call>")) for text in said)
    if not calls:
        reward += 0.5 if 5 <= len(response.strip()) <= 800 else -0.5
        thinking, answer = seed_thinking(response)
        return max(min(reward + thinking - seed_penalty(answer), 3.0), -3.0)
    valid = sum(
        call["name"] == "get_current_time"
        or (call["name"] == "calculate_math" and bool(call["arguments"].get("expression")))
        for call in calls
    )
    gap = abs(valid - len(gt)) + max(0, len(calls) - valid)
    reward += 0.5 if gap == 0 else -0.5 * gap
    final = "" if unfinished else said[-1].split("</tool_call>")[-1]
    reward += 2.5 * seed_hits(final, gt) / len(gt) if gt else 0.0
    reward -= 0.5 * unfinished
    # what is searched for repetition when unfinished is the one thing left out here: markup there, the answer in ours
    return max(min(reward - seed_penalty(final), 3.0), -3.0)


def seed_chat(turns: list[str]) -> float:
    thinking, answer = seed_thinking(turns[-1])
    return (0.5 if 20 <= len(turns[-1].strip()) <= 800 else -0.5) + thinking - seed_penalty(answer)


ONE, TWO = ["59"], ["59", "12"]
AGENT_EPISODES: dict[str, tuple[list[str], list[str]]] = {
    "no call, too short": (ONE, ["59"]),
    "no call": (ONE, ["The answer is 59."]),
    "no call, too long": (ONE, [LONG * 2]),
    "no call, repeating itself": (ONE, ["I do not know. I do not know. I do not know."]),
    "no call, good thinking": (ONE, [f"{THOUGHT}The answer is 59."]),
    "no call, short thinking": (ONE, ["Hm.</think>\n\nThe answer is 59."]),
    "no call, long thinking": (ONE, [f"{LONG}</think>\n\nThe answer is 59."]),
    "no call, closed twice": (ONE, [f"{THOUGHT}The answer</think> is 59."]),
    "no call, a stray tag": (ONE, ["</tool_call>The answer is 59."]),
    "right": (ONE, [ADD, "The result is 59."]),
    "right, with words beside the call": (ONE, [f"Let me see. {ADD}", "The result is 59."]),
    "right, with thinking, which then is not paid": (ONE, [ADD, f"{THOUGHT}The result is 59."]),
    "wrong": (ONE, [ADD, "I cannot say."]),
    "both in one turn": (TWO, [ADD + MULTIPLY, "The results are 59 and 12."]),
    "both in two turns": (TWO, [ADD, MULTIPLY, "The results are 59 and 12."]),
    "half": (TWO, [ADD + MULTIPLY, "The first result is 59."]),
    "half, with one call": (TWO, [ADD, "The first result is 59."]),
    "a call too many": (ONE, [ADD + TIME, "The result is 59."]),
    "calls where none was wanted": ([], [TIME, "It is late."]),
    "an unknown tool": (ONE, [WRONG_NAME, "The tool is not there."]),
    "wrong arguments, then right ones": (ONE, [WRONG_ARGUMENTS, ADD, "The result is 59."]),
    "unfinished": (ONE, [ADD, TIME, ADD]),
    "right, repeating itself": (ONE, [ADD, "The result is 59. The result is 59. The result is 59."]),
    "so many calls that the clip bites": (ONE, [TIME * 9, "I called the clock."]),
    "a stray tag beside a call": (ONE, [ADD, "</tool_call>The result is 59."]),
}


@pytest.mark.parametrize("name", AGENT_EPISODES)
def test_minimind_agent(name: str) -> None:
    gt, turns = AGENT_EPISODES[name]
    total, values, _ = play("minimind_agent", gt, turns, thinking="</think>" in turns[-1])
    assert total == pytest.approx(seed_agent(gt, turns), abs=1e-9), values


def test_minimind_agent_by_hand() -> None:
    assert play("minimind_agent", ONE, [ADD, "The result is 59."]) == (
        3.0,
        {
            "gt": 1.0,
            "call_count": 0.5,
            "length": 0.0,
            "thinking_length": 0.0,
            "thinking_closed": 0.0,
            "call_tags": 0.0,
            "repetition": 0.0,
            "clip": 0.0,
        },
        True,
    )
    total, values, success = play("minimind_agent", ONE, [TIME * 9, "I called the clock."])
    # 8 calls too many: -4, which the clip lifts to -3
    assert (total, values["call_count"], values["clip"], success) == (-3.0, -4.0, 1.0, False)
    total, values, success = play("minimind_agent", ONE, [ADD, TIME, ADD])
    assert (total, values["unfinished"], values["call_count"], success) == (-0.5 - 1.0, -1.0, -1.0, None)
    assert "gt" not in values


def test_an_answer_without_a_call_is_a_success_that_the_agents_reward_does_not_pay() -> None:
    total, values, success = play("minimind_agent", ONE, ["The answer is 59."])
    assert (total, values["gt"], success) == (0.5, 0.0, True)


def test_where_minimind_agent_differs_from_its_seed() -> None:
    # a malformed call is a call: tags -0.5, one call too many -0.5, right 2.5; the seed sees no call, and ends there
    assert play("minimind_agent", ONE, ['<tool_call>\n{"name": }', ADD, "The result is 59."])[0] == 1.5
    # a superstring and a dump of numbers earn the seed's whole 2.5, and nothing here
    for text in ("The result is 1590.", " ".join(map(str, range(100)))):
        assert seed_hits(text, ONE) == 1
        assert play("minimind_agent", ONE, [ADD, text])[1]["gt"] == 0.0
    # thinking that never closes costs 0.25, and is no answer
    total, values, success = play("minimind_agent", ONE, ["The answer is 59, I think."], thinking=True)
    assert (total, values["thinking_closed"], success) == (0.25, -0.25, False)
    # a tag that closes nothing earns the seed's thinking reward, and costs here
    assert seed_agent(ONE, [f"{THOUGHT}The answer is 59."]) == 1.75
    assert play("minimind_agent", ONE, [f"{THOUGHT}The answer is 59."])[0] == 0.25


def test_a_task_without_gt_is_trained_on_its_form() -> None:
    total, values, success = play("minimind_agent", [], [TIME, "It is late."])
    assert (total, values["gt"], success) == (-0.5, 0.0, None)


def test_a_broken_gt_is_none_and_the_rest_is_paid() -> None:
    total, values, success = play("minimind_agent", object(), [ADD, "The result is 59."])
    assert (values["gt"], success) == (None, None)
    assert total == values["call_count"]


@pytest.mark.parametrize(
    "turns",
    [
        ["Too short."],
        ["Long enough to be paid for."],
        [LONG * 2],
        [f"{THOUGHT}Good morning to you."],
        ["Hm.</think>\n\nGood morning to you."],
        [f"{LONG}</think>\n\nGood morning to you."],
        [f"{THOUGHT}Good </think>morning to you."],
        ["and so on and so on and so on and so on"],
    ],
)
def test_minimind_chat(turns: list[str]) -> None:
    total, values, success = play("minimind_chat", None, turns, thinking="</think>" in turns[-1])
    assert total == pytest.approx(seed_chat(turns), abs=1e-9), values
    assert success is None


def seed_gsm8k(text: str, gold: float) -> float:
    blocks = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", blocks[0] if blocks else text)
    found = float((numbers[0] if blocks else numbers[-1]).replace(",", "")) if numbers else math.nan
    reward = 1.0 * math.isclose(found, gold, abs_tol=1e-4, rel_tol=0) + 0.2 * (len(blocks) == 1)
    return min(reward, 1.2)


@pytest.mark.parametrize(
    "text",
    [
        "<think>48 / 2 = 24, and 48 + 24 = 72.</think><answer>72</answer>",
        "<think>48 / 2 = 24.</think><answer>24</answer>",
        "<answer>1,072</answer>",
        "48 / 2 = 24.\n#### 72",
        "#### 71",
        "72",
        "<answer></answer>",
        "I do not know.",
        "",
    ],
)
def test_gsm8k(text: str) -> None:
    total, values, success = play("gsm8k", "72", [text])
    assert total == pytest.approx(seed_gsm8k(text, 72.0), abs=1e-9), values
    assert success is (total >= 1.0)


def test_where_gsm8k_differs_from_its_seed() -> None:
    for text in ("It is not 72", "70 71 72", "<answer>72 or 71</answer>"):
        assert seed_gsm8k(text, 72.0) >= 1.0
        assert play("gsm8k", "72", [text])[0] < 1.0


def test_a_preset_compares_with_the_env_s_own_checker_and_clips_what_was_paid() -> None:
    env = ChatEnv([Task("t", (user("?"),), "5")], [gt_component(ExactChecker())], rewards="minimind_agent")
    env.weigh({"length": 9.0})
    env.reset(options={"task_index": 0})
    *_, reward, _, _, info = env.step("It is 5.")  # not exactly 5; the form alone is worth 4.5
    assert (info["rewards"]["length"], info["rewards"]["clip"], reward) == (0.5, -1.5, 3.0)
    assert info["success"] is False


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_it_is(name: str) -> None:
    preset = PRESETS[name](None)
    assert preset.name == name
    assert preset.source
    assert [part.name for part in preset.parts] == list(preset.components) == list(preset.weights)
    scoring = [part.name for part in preset.parts if part.checker is not None]
    assert scoring == (["gt"] if preset.name != "minimind_chat" else [])
