import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtune.rewards import Component, Episode
from gymtune.rewards.shaping import (
    SHAPING,
    answer_tag,
    call_count,
    call_tags,
    length,
    repetition,
    repetition_penalty,
    thinking_closed,
    thinking_length,
)
from gymtune.tools import Outcome, ToolResult
from gymtune.tools.formats.hermes import HermesFormat

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def after(*texts: str, gt: Any = None, outcomes: str = "", thinking_open: bool = False) -> Episode:
    """An episode of these turns, as the env would have written it down; `outcomes` of all its calls."""
    turns = [HermesFormat().parse(text, thinking_open=thinking_open, turn=i) for i, text in enumerate(texts)]
    results = [ToolResult("c", "f", Outcome(name), "") for name in outcomes.split()]
    answer = turns[-1].content if turns else ""
    return Episode(gt, [], texts=list(texts), turns=turns, answer=answer, all_results=results, terminated=True)


def test_each_fires_at_the_end_and_has_a_value_for_an_episode_without_a_word() -> None:
    assert {name: component.when for name, component in SHAPING.items()} == dict.fromkeys(SHAPING, "end")
    assert {name: component.value(after()) for name, component in SHAPING.items()} == {
        "answer_tag": 0.0,
        "call_count": 0.5,
        "call_tags": 0.0,
        "length": -0.5,
        "repetition": 0.0,
        "thinking_closed": 0.0,
        "thinking_length": 0.0,
    }
    assert all(component.name == name for name, component in SHAPING.items())


@pytest.mark.parametrize("component", [repetition, call_tags])
def test_no_penalty_is_zero_and_not_minus_zero(component: Component) -> None:
    value = component.value(after("Hello."))
    assert value is not None
    assert math.copysign(1.0, value) == 1.0


@pytest.mark.parametrize(
    ("text", "how_long", "closed"),
    [
        ("No thinking.", 0.0, 0.0),
        (f"<think>{'x' * 19}</think>a", -0.5, 0.25),
        (f"<think>{'x' * 20}</think>a", 1.0, 0.25),
        (f"<think>\n{'x' * 300}\n</think>a", 1.0, 0.25),  # white space at the ends does not count
        (f"<think>{'x' * 301}</think>a", -0.5, 0.25),
        ("<think></think>a", -0.5, 0.25),
        (f"<think>{'x' * 50}</think>a</think>b", 1.0, -0.25),
        (f"<think>{'x' * 50}", 0.0, -0.25),  # never closed
        (f"{'x' * 50}</think>a", 0.0, -0.25),  # never opened
    ],
)
def test_thinking(text: str, how_long: float, closed: float) -> None:
    assert thinking_length.value(after(text)) == how_long
    assert thinking_closed.value(after(text)) == closed
    assert thinking_length.value(after(text, "The last turn counts.")) == 0.0


def test_thinking_that_the_prompt_opened() -> None:
    episode = after(f"{'x' * 50}</think>a", thinking_open=True)
    assert (thinking_length.value(episode), thinking_closed.value(episode)) == (1.0, 0.25)


def slow_penalty(text: str, n: int, cap: float) -> float:
    """Count each n-gram that stood before, one by one."""
    tokens = re.findall(r"\w+|[^\w\s]", text.lower())
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    repeats = sum(gram in grams[:i] for i, gram in enumerate(grams))
    return min(cap, 2 * cap * repeats / len(grams)) if grams else 0.0


@given(st.text("ab ,A我", max_size=40), st.integers(1, 4), st.sampled_from([0.25, 0.5, 1.0]))
def test_the_penalty_equals_a_slow_count(text: str, n: int, cap: float) -> None:
    assert repetition_penalty(text, n, cap) == pytest.approx(slow_penalty(text, n, cap), abs=1e-12)


def test_repetition_by_hand() -> None:
    # a b a b a b: the trigrams aba, bab, aba, bab, of which two of four stood before: 2 * 0.5 * 2/4
    assert repetition.value(after("a b a b a b")) == repetition.value(after("A b a B a b")) == -0.5
    # a b c d a b c: abc, bcd, cda, dab, abc: one of five
    assert repetition.value(after("a b c d a b c")) == pytest.approx(-0.2)
    assert repetition.value(after("<think>a a a a a a a a</think>One word after the other.")) == 0.0
    assert repetition.value(after("a b a b a b", "Said once.")) == 0.0


@pytest.mark.parametrize(("size", "value"), [(4, -0.5), (5, 0.5), (8, 0.5), (9, -0.5)])
def test_length(size: int, value: float) -> None:
    component = length(5, 8)
    assert component.value(after("something longer", f" {'x' * size}\n")) == value


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (["Hello."], 0.0),
        ([CALL, "Done."], 0.0),
        ([CALL + CALL, "Done."], 0.0),
        (["<tool_call>", "Done."], -0.5),
        (["</tool_call>Done."], -0.5),
        (["<tool_call><tool_call>", "</tool_call>Done."], -1.5),  # 2 and 1: turns do not mend each other
        ([CALL.removesuffix("</tool_call>"), "Done."], -0.5),
        (["<think><tool_call></think>Done."], 0.0),  # thought, not said
        ([CALL.replace("{}", '{"x": "<tool_call>"}')], -0.5),
    ],
)
def test_call_tags(texts: list[str], value: float) -> None:
    assert call_tags.value(after(*texts)) == value


@pytest.mark.parametrize(
    ("texts", "gt", "outcomes", "value"),
    [
        ([CALL, "Done."], ["59"], "ok", 0.5),
        (["Done."], [], "", 0.5),
        (["Done."], ["59"], "", -0.5),
        ([CALL * 3, "Done."], ["59"], "ok ok ok", -1.0),
        ([CALL, "Done."], ["1", "2"], "ok", -0.5),
        ([CALL, "Done."], ["59"], "unknown_tool", -1.0),  # one too few, and one that was not run
        ([CALL * 2, "Done."], ["59"], "ok schema_violation", -0.5),
        (["<tool_call>", "Done."], ["59"], "parse_error", -1.0),
        ([CALL, "Done."], ["59"], "timeout", 0.5),  # a valid call, whatever became of it
        ([CALL], ["59"], "", -1.0),  # cut by length: never run
        ([CALL, "Done."], "59", "ok", 0.5),
        (["Done."], None, "", 0.5),
    ],
)
def test_call_count(texts: list[str], gt: Any, outcomes: str, value: float) -> None:
    assert call_count.value(after(*texts, gt=gt, outcomes=outcomes)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>5</answer>", 1.0),
        ("It is <answer>\n5\n</answer>.", 1.0),
        ("<answer></answer>", 1.0),
        ("5", 0.0),
        ("<answer>5", 0.0),
        ("5</answer>", 0.0),
        ("</answer>5<answer>", 0.0),
        ("<answer>5</answer><answer>6</answer>", 0.0),
        ("<answer>5</answer></answer>", 0.0),
        ("<answer><answer>5</answer>", 0.0),
        ("<think><answer>5</answer></think>5", 0.0),
        ("<think><answer>6</answer></think><answer>5</answer>", 1.0),
    ],
)
def test_answer_tag(text: str, value: float) -> None:
    assert answer_tag.value(after(text)) == value


@pytest.mark.parametrize("piece", ["a", "a ", ". ", "<answer>", "</answer>", "<tool_call>", "</think>", "我"])
def test_a_megabyte_of_junk_is_read(piece: str) -> None:
    """In linear time: a quadratic search would take minutes."""
    episode = after(piece * (1_000_000 // len(piece)))
    for name, component in SHAPING.items():
        assert math.isfinite(component.value(episode)), name
