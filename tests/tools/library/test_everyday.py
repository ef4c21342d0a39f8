import json
import zoneinfo
from datetime import UTC, datetime
from itertools import permutations

import pytest

from gymtune.tools import Outcome, ParsedCall, ToolResult
from gymtune.tools.library import everyday_toolbox, everyday_tools
from gymtune.tools.library.everyday import CLOCK

BOX = everyday_toolbox()


def call(name: str, **arguments: object) -> ToolResult:
    return BOX.call(ParsedCall("call_0_0", name, arguments, None, ""))


def value(name: str, **arguments: object) -> dict[str, object]:
    result = call(name, **arguments)
    assert result.outcome is Outcome.ok, result.content
    return json.loads(result.content)


def refused(name: str, **arguments: object) -> str:
    result = call(name, **arguments)
    assert result.outcome is Outcome.exception
    assert "error (exception): " in result.content
    assert "Error:" not in result.content, "a ToolError, not an accident"
    return result.content


def test_names_arguments_and_required_are_minimind_s() -> None:
    shapes = {t.name: (list(t.parameters["properties"]), t.parameters.get("required", [])) for t in everyday_tools()}
    assert shapes == {
        "calculate_math": (["expression"], ["expression"]),
        "unit_converter": (["value", "from_unit", "to_unit"], ["value", "from_unit", "to_unit"]),
        "get_current_weather": (["location"], ["location"]),
        "get_current_time": (["timezone"], []),
        "get_exchange_rate": (["from_currency", "to_currency"], ["from_currency", "to_currency"]),
        "translate_text": (["text", "target_language"], ["text", "target_language"]),
    }
    for each in everyday_tools():
        assert each.in_memory
        assert each.parameters["additionalProperties"] is False
        assert each.description
        assert all(part["description"] for part in each.parameters["properties"].values())


# What MiniMind's tables answer at its commit d65ef2c0.
@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("calculate_math", {"expression": "（12＋47）×1"}, {"result": "59"}),
        ("calculate_math", {"expression": "2^10 − 24"}, {"result": "1000"}),
        ("unit_converter", {"value": 1000, "from_unit": "km", "to_unit": "miles"}, {"result": 621.371}),
        ("unit_converter", {"value": 100, "from_unit": "miles", "to_unit": "km"}, {"result": 160.934}),
        ("unit_converter", {"value": 150, "from_unit": "pounds", "to_unit": "kg"}, {"result": 68.0388}),
        ("unit_converter", {"value": 70, "from_unit": "kg", "to_unit": "pounds"}, {"result": 154.3234}),
        ("unit_converter", {"value": 100, "from_unit": "meters", "to_unit": "feet"}, {"result": 328.084}),
        ("unit_converter", {"value": 10, "from_unit": "feet", "to_unit": "meters"}, {"result": 3.048}),
        (
            "get_current_weather",
            {"location": "北京"},
            {"city": "北京", "temperature": "28°C", "humidity": "65%", "condition": "晴"},
        ),
        (
            "get_current_weather",
            {"location": "London"},
            {"city": "London", "temperature": "5°C", "humidity": "65%", "condition": "小雨"},
        ),
        ("get_current_time", {}, {"datetime": "2025-03-07 14:30:00", "timezone": "Asia/Shanghai"}),
        (
            "get_current_time",
            {"timezone": "America/New_York"},
            {"datetime": "2025-03-07 01:30:00", "timezone": "America/New_York"},
        ),
        ("translate_text", {"text": "你好世界", "target_language": "english"}, {"translated_text": "Hello World"}),
        ("translate_text", {"text": "Good morning", "target_language": "chinese"}, {"translated_text": "早上好"}),
    ],
)
def test_published_answers(name: str, arguments: dict[str, object], answer: dict[str, object]) -> None:
    assert value(name, **arguments) == answer


@pytest.mark.parametrize(
    ("source", "target", "rate"),
    [
        ("USD", "CNY", 7.21),
        ("EUR", "CNY", 7.85),
        ("GBP", "CNY", 9.12),
        ("JPY", "CNY", 0.048),
        ("USD", "EUR", 0.92),
        ("USD", "GBP", 0.79),
        ("CNY", "JPY", 20.83),
        ("AUD", "CNY", 4.72),
        ("CNY", "USD", 0.1387),  # 1 / 7.21
        ("GBP", "USD", 1.266),  # 1 / 0.79
        ("EUR", "GBP", 0.8607),  # 7.85 / 9.12
        ("JPY", "USD", 0.006657),  # 0.048 / 7.21
        ("EUR", "EUR", 1.0),
    ],
)
def test_rates_published_inverse_and_cross(source: str, target: str, rate: float) -> None:
    assert value("get_exchange_rate", from_currency=source, to_currency=target) == {
        "from": source,
        "to": target,
        "rate": rate,
    }


def test_every_rate_agrees_with_its_inverse() -> None:
    for source, target in permutations(["CNY", "USD", "EUR", "GBP", "JPY", "AUD"], 2):
        there = value("get_exchange_rate", from_currency=source, to_currency=target.lower())["rate"]
        back = value("get_exchange_rate", from_currency=target, to_currency=source)["rate"]
        assert there * back == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("amount", "source", "target", "result"),
    [
        (100, "celsius", "fahrenheit", 212.0),
        (32, "°F", "C", 0.0),
        (31.99999, "°F", "C", 0.0),
        (-40, "Celsius", "Fahrenheit", -40.0),
        (0, "celsius", "kelvin", 273.15),
        (36.6, "摄氏度", "华氏度", 97.88),
        (1, "inch", "cm", 2.54),
        (1, "公里", "米", 1000.0),
        (3, "Feet", " yard ", 1.0),
        (1, "lb", "oz", 16.0),
        (2, "tonnes", "kg", 2000.0),
        (5, "mm", "km", 0.000005),
        (1, "mile", "foot", 5280.0),
        (7, "kg", "kg", 7.0),
    ],
)
def test_conversions_by_hand(amount: float, source: str, target: str, result: float) -> None:
    given = value("unit_converter", value=amount, from_unit=source, to_unit=target)
    assert str(given["result"]) == str(result)


def test_same_city_in_two_languages() -> None:
    for chinese, english in [("北京", "beijing"), ("西安市", "Xi'an"), ("东京", "TOKYO"), ("纽约", "new york")]:
        one, two = (value("get_current_weather", location=city) for city in (chinese, english))
        assert (one.pop("city"), two.pop("city")) == (chinese, english)
        assert one == two


def test_translation_both_ways_whatever_the_case() -> None:
    assert value("translate_text", text="happy birthday!", target_language="ZH") == {"translated_text": "生日快乐"}
    assert value("translate_text", text="生日快乐。", target_language="English") == {
        "translated_text": "Happy birthday"
    }


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "Asia/Tokyo", "Europe/London", "Europe/Paris", "America/New_York"])
def test_times_agree_with_the_time_zone_database(zone: str) -> None:
    try:
        expected = CLOCK.astimezone(zoneinfo.ZoneInfo(zone))
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("no time zone database on this machine")
    assert datetime(2025, 3, 7, 6, 30, tzinfo=UTC) == CLOCK
    assert value("get_current_time", timezone=zone)["datetime"] == f"{expected:%Y-%m-%d %H:%M:%S}"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("get_current_weather", {"location": "Atlantis"}, "Beijing"),
        ("get_current_weather", {"location": ""}, "Beijing"),
        ("get_current_time", {"timezone": "Mars/Olympus"}, "Asia/Shanghai"),
        ("get_exchange_rate", {"from_currency": "USD", "to_currency": "XXX"}, "EUR"),
        ("translate_text", {"text": "no such phrase", "target_language": "english"}, "生日快乐"),
        ("translate_text", {"text": "Happy birthday", "target_language": "english"}, "生日快乐"),
        ("translate_text", {"text": "你好世界", "target_language": "klingon"}, "chinese"),
        ("unit_converter", {"value": 1, "from_unit": "parsec", "to_unit": "km"}, "miles"),
        ("unit_converter", {"value": 1, "from_unit": "km", "to_unit": "kg"}, "not convertible"),
        ("unit_converter", {"value": 1e308, "from_unit": "km", "to_unit": "mm"}, "too large"),
        ("calculate_math", {"expression": "__import__('os')"}, "not allowed"),
        ("calculate_math", {"expression": "9^9^9"}, "max_exponent"),
        ("calculate_math", {"expression": "1/0"}, "division by zero"),
    ],
)
def test_what_is_unknown_is_told(name: str, arguments: dict[str, object], says: str) -> None:
    assert says in refused(name, **arguments)


def test_hostile_texts_are_told_back_short() -> None:
    for junk in ("x" * 1_000_000, "北京" + " " * 1_000_000 + "x", "\x00\n<|im_end|>" * 1000):
        for name, arguments in [
            ("get_current_weather", {"location": junk}),
            ("get_current_time", {"timezone": junk}),
            ("get_exchange_rate", {"from_currency": junk, "to_currency": junk}),
            ("unit_converter", {"value": 1, "from_unit": junk, "to_unit": "km"}),
            ("translate_text", {"text": junk, "target_language": "english"}),
            ("calculate_math", {"expression": junk}),
        ]:
            result = call(name, **arguments)
            assert result.failed
            assert len(result.content) < 600


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculate_math", {"expression": 3}),
        ("calculate_math", {}),
        ("calculate_math", {"expression": "1", "precision": 2}),
        ("unit_converter", {"value": "10", "from_unit": "km", "to_unit": "miles"}),
        ("unit_converter", {"value": True, "from_unit": "km", "to_unit": "miles"}),
        ("get_current_weather", {"location": None}),
        ("get_current_time", {"timezone": ["UTC"]}),
        ("translate_text", {"text": "x"}),
    ],
)
def test_wrong_types_are_schema_violations(name: str, arguments: dict[str, object]) -> None:
    assert call(name, **arguments).outcome is Outcome.schema_violation


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), 10**400])
def test_numbers_without_a_float_are_refused(amount: float) -> None:
    assert call("unit_converter", value=amount, from_unit="km", to_unit="miles").outcome is Outcome.exception


def test_lone_surrogates_are_refused() -> None:
    assert call("get_current_weather", location="\ud800").failed
