"""ContainsGt on answers as agents give them: what they were asked, called and told is known to `judge`."""

import json
from decimal import Decimal
from typing import Any

import pytest

from gymtune.rewards import Episode, check, check_episode
from gymtune.rewards.attacks import text_attacks
from gymtune.rewards.contains import ContainsGt
from gymtune.rewards.mentions import numbers, tidy, without, words
from gymtune.tools.chat_format import ParsedCall, ParsedTurn
from gymtune.tools.messages import user
from gymtune.tools.outcomes import Outcome, ToolResult

WEATHER = json.dumps({"city": "北京", "temperature": "28°C", "humidity": "65%", "condition": "晴"}, ensure_ascii=False)


def judge(answer: str, gt: Any, question: str = "", results: tuple[str, ...] = (), calls: tuple[Any, ...] = ()) -> Any:
    parsed = tuple(ParsedCall("c", "t", call, None, "") for call in calls)
    episode = Episode(
        gt=gt,
        messages=[user(question)],
        opening=1,
        answer=answer,
        turns=[ParsedTurn("", None, parsed)],
        all_results=[ToolResult("c", "t", Outcome.ok, content) for content in results],
    )
    return check_episode(ContainsGt(), episode)


@pytest.mark.parametrize(
    ("answer", "gt", "question", "results"),
    [
        ("12 + 13 = 25", ["25"], "What is 12 + 13?", ('{"result": "25"}',)),
        ("The sum of 12 and 13 is 25.", ["25"], "What is 12 + 13?", ("25",)),
        ("First 12 + 13 = 25, then 25 * 4 = 100.", ["100"], "(12 + 13) * 4?", ("25", "100")),
        ("25", ["25"], "What is 12 + 13?", ("25",)),
        ("北京今天晴，气温28°C，湿度65%。", ["28", "晴"], "北京天气怎么样？", (WEATHER,)),
        ("北京：晴，28°C", ["28", "晴"], "北京天气怎么样？", (WEATHER,)),
        ("It's 28°C and 晴 in 北京.", ["28°C"], "Weather in 北京?", (WEATHER,)),
        ("The sum is 379; the difference is 133.", ["379", "133"], "256 + 123 and 256 - 123?", ("379", "133")),
        ("结果分别是379和133。", ["379", "133"], "计算256+123和256-123", ("379", "133")),
        ("Hello World, that is the translation.", ["Hello World"], "翻译：你好世界", ('{"t": "Hello World"}',)),
        ("15 km is 9.3206 miles.", ["9.3206"], "How many miles are 15 km?", ("9.3206",)),
    ],
)
def test_natural_answers_are_right(answer: str, gt: Any, question: str, results: tuple[str, ...]) -> None:
    verdict = judge(answer, gt, question, results)
    assert (verdict.kind, verdict.score) == ("right", 1.0), verdict


@pytest.mark.parametrize(
    ("answer", "gt", "question", "results"),
    [
        # echoes
        ("Is 28 more than 15?", ["28"], "Is 28 more than 15?", ()),
        ("Is 28 more than 15", ["28"], "Is 28 more than 15?", ()),
        ("I was asked: say whether 28 beats 15. Done.", ["28"], "Say whether 28 beats 15.", ()),
        ("北京天气晴", ["晴"], "北京天气晴吗？", ()),
        (WEATHER, ["28", "晴"], "北京天气怎么样？", (WEATHER,)),
        (WEATHER.replace(" ", ""), ["28"], "北京天气怎么样？", (WEATHER,)),
        (f"The tool says {WEATHER}", ["28"], "北京天气怎么样？", (WEATHER,)),
        # dumps of what the tools gave
        ("It gave 1. Then 2. Then 3. Then 4. Then 5. So 28.", ["28"], "", ("1", "2", "3", "4", "5", "28")),
        ("15, 28, 32", ["28"], "", ("15", "28", "32")),
        ("15°C, 28°C", ["28"], "", ("15", "28")),
        # an operand, not a result
        ("28 * 2 = 56", ["28"], "", ("28", "56")),
        ("We need 2 * 28", ["28"], "", ("28", "2")),
        # a number from nowhere beside the right one
        ("It is 28 and I like 29.", ["28"], "", ("28",)),
        # the call in place of its result
        ('{"name": "calculate_math", "arguments": {"expression": "25"}}', ["25"], "", ("25",)),
        ('<tool_call>{"name": "x"} 25', ["25"], "", ("25",)),
    ],
)
def test_echoes_and_dumps_earn_nothing(answer: str, gt: Any, question: str, results: tuple[str, ...]) -> None:
    verdict = judge(answer, gt, question, results)
    assert (verdict.success, verdict.score) == (False, 0.0), verdict


def test_the_score_is_the_share_of_gts() -> None:
    assert judge("The sum is 379.", ["379", "133"]).score == 0.5
    assert judge("The sum is 379.", ["379", "133"]).kind == "wrong"
    assert judge("The sum is 379. The rest is not 133.", ["379", "133"]).score == 0.5
    assert judge("It is sunny, and 379, and 133.", ["379", "133", "sunny", "x"]).score == 0.75


def test_an_attack_on_a_single_gt_earns_no_share() -> None:
    for right in ("28", "-5", "7.21", "Paris", "Hello World", "晴"):
        for kind, attack in text_attacks(right):
            assert check(ContainsGt(), attack, [right]).score == 0.0, (kind, attack)


def test_numbers_of_calls_count_as_known_within_a_limit() -> None:
    calls = tuple({"expression": str(n)} for n in (11, 12, 13, 14, 15))
    assert judge("From 11 and 12 I get 28.", ["28"], calls=calls).success is True
    assert judge("Of 11. Of 12. Of 13. Of 14. I get 28.", ["28"], calls=calls).success is True
    assert judge("Of 11. Of 12. Of 13. Of 14. Of 15. I get 28.", ["28"], calls=calls).kind == "unparsed"
    assert judge("From 11 and 12 I get 28.", ["28"]).kind == "unparsed"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,234.50 and -5 and +3", ["1234.50", "-5", "3"]),
        ("28°C 65% $12 9km", ["28", "65", "12", "9"]),
        ("是28度，共3个", ["28", "3"]),
        ("256-123=133", ["133"]),
        ("5/2 1.5.2 14:30 2025-03-07 3-5 1,2345 x5 5x 2nd GPT-4 5^2", []),
        ("5e3", ["5000"]),
        ("\uff12\uff18", ["28"]),
        ("1. ten\n2) twenty\n- 30", ["30"]),
        ("28.", ["28"]),
        ("5² and 5½", []),
    ],
)
def test_numbers_in_text(text: str, values: list[str]) -> None:
    assert [m.number for m in numbers(tidy(text))] == [Decimal(value) for value in values]


def test_words_in_text() -> None:
    assert len(words("Sunny, sunny. Sunnyish unsunny sunny_", "sunny")) == 2
    assert len(words("New  York\nNew York", "new york")) == 2
    assert len(words("今天晴转多云", "晴")) == 1
    assert len(words("-28°C 128°C 28°C", "28°C")) == 1
    assert len(words("a+b", "a+b")) == 1  # no pattern of the gt's own


def test_copies_are_taken_out_whole() -> None:
    assert without("He said: One Two  three!", ["one two three"]) == "He said: . !"
    assert without("15 m", ["5 m"]) == "15 m"  # not out of another number
    assert without("nothing here", ["one two", ""]) == "nothing here"


@pytest.mark.parametrize("gt", [None, [], "", [""], " ", [None], True, {"a": 1}, ["5", []], object()])
def test_a_gt_that_cannot_be_looked_for_is_broken(gt: Any) -> None:
    assert check(ContainsGt(), "5", gt).kind == "broken"


def test_too_long_or_too_often_is_refused() -> None:
    assert check(ContainsGt(), "It is sunny. " * 20, ["sunny"]).success is True
    assert check(ContainsGt(), "It is sunny. " * 21, ["sunny"]).success is False
    assert check(ContainsGt(), "It is sunny. " + " " * 100_000, ["sunny"]).kind == "unparsed"
