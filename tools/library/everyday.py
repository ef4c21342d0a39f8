"""The six tools of MiniMind's agentic data (`agent_rl.jsonl`): its names, its arguments, its shapes of results.

They answer from small fixed tables, so that an episode can be repeated. What is in no table is a `ToolError` that
tells what there is, never a made-up default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from ..errors import ToolError
from ..tool import Tool, tool
from ..toolbox import Toolbox
from .calculator import evaluate, number_text

CLOCK = datetime(2025, 3, 7, 6, 30, tzinfo=UTC)
"""The moment at which time stands still for the tools."""

T = TypeVar("T")

_SHOWN = 40  # characters of what the model gave, told back to it


def _by_alias(table: Mapping[str, T]) -> dict[str, tuple[str, T]]:
    """Return `name, value` by each alias; the keys are aliases joined by `|`, the first of which is the name."""
    return {alias: (key.split("|")[0], value) for key, value in table.items() for alias in key.casefold().split("|")}


def _find(kind: str, given: str, table: Mapping[str, tuple[str, T]]) -> tuple[str, T]:
    found = table.get(given.strip().casefold())
    if found is None:
        known = dict.fromkeys(name for name, _ in table.values())
        raise ToolError(f"no {kind} {given[:_SHOWN]!r} here. Known: {', '.join(known)}.")
    return found


# Kind, scale, offset: (value + offset) * scale is the value in meters, kilograms, kelvin.
_UNITS = _by_alias(
    {
        "mm|millimeter|millimeters|millimetre|millimetres|毫米": ("length", 0.001, 0.0),
        "cm|centimeter|centimeters|centimetre|centimetres|厘米": ("length", 0.01, 0.0),
        "meters|m|meter|metre|metres|米": ("length", 1.0, 0.0),
        "km|kilometer|kilometers|kilometre|kilometres|公里|千米": ("length", 1000.0, 0.0),
        "inches|in|inch|英寸": ("length", 0.0254, 0.0),
        "feet|ft|foot|英尺": ("length", 0.3048, 0.0),
        "yards|yd|yard|码": ("length", 0.9144, 0.0),
        "miles|mi|mile|英里": ("length", 1609.344, 0.0),
        "g|gram|grams|克": ("mass", 0.001, 0.0),
        "kg|kilogram|kilograms|公斤|千克": ("mass", 1.0, 0.0),
        "tonnes|t|tonne|吨": ("mass", 1000.0, 0.0),
        "ounces|oz|ounce|盎司": ("mass", 0.028349523125, 0.0),
        "pounds|lb|lbs|pound|磅": ("mass", 0.45359237, 0.0),
        "celsius|c|°c|℃|摄氏度": ("temperature", 1.0, 273.15),
        "fahrenheit|f|°f|℉|华氏度": ("temperature", 5 / 9, 459.67),
        "kelvin|k|开尔文": ("temperature", 1.0, 0.0),
    }
)
# MiniMind's own factors (six digits) come before the exact ones, so that the answers in its data stay reachable.
_FACTORS = {
    ("km", "miles"): 0.621371,
    ("miles", "km"): 1.60934,
    ("kg", "pounds"): 2.20462,
    ("pounds", "kg"): 0.453592,
    ("meters", "feet"): 3.28084,
}

_WEATHER = _by_alias(
    {
        "Beijing|北京": ("28°C", "晴"),
        "Shanghai|上海": ("15°C", "多云"),
        "Guangzhou|广州": ("32°C", "闷热"),
        "Shenzhen|深圳": ("30°C", "晴"),
        "Hangzhou|杭州": ("22°C", "阴"),
        "Chengdu|成都": ("18°C", "小雨"),
        "Wuhan|武汉": ("25°C", "多云"),
        "Nanjing|南京": ("20°C", "晴"),
        "Xi'an|Xian|西安": ("16°C", "大风"),
        "Chongqing|重庆": ("26°C", "阴"),
        "Tokyo|东京": ("12°C", "晴"),
        "New York|纽约": ("8°C", "多云"),
        "London|伦敦": ("5°C", "小雨"),
        "Paris|巴黎": ("10°C", "阴"),
        "Sydney|悉尼": ("25°C", "晴朗"),
    }
)

# Hours ahead of UTC on the day of CLOCK.
_HOURS = _by_alias(
    {
        "Asia/Shanghai": 8,
        "Asia/Tokyo": 9,
        "Europe/London": 0,
        "Europe/Paris": 1,
        "America/New_York": -5,
        "Australia/Sydney": 11,
        "UTC": 0,
    }
)

_IN_CNY = _by_alias({"CNY": 1.0, "USD": 7.21, "EUR": 7.85, "GBP": 9.12, "JPY": 0.048, "AUD": 4.72})
# Quoted, not derived; JPY to CNY is not quite the inverse.
_RATES = {("USD", "EUR"): 0.92, ("USD", "GBP"): 0.79, ("CNY", "JPY"): 20.83, ("JPY", "CNY"): 0.048}

_LANGUAGES = _by_alias({"english|en|英语|英文": 0, "chinese|zh|中文|汉语": 1})
_PHRASES = (
    ("Hello World", "你好世界"),
    ("Good morning", "早上好"),
    ("The weather is nice today", "今天天气真好"),
    ("I love programming", "我喜欢编程"),
    ("Machine learning is interesting", "机器学习很有趣"),
    ("Happy birthday", "生日快乐"),
)
_TRANSLATIONS = [_by_alias({pair[1 - language]: pair[language] for pair in _PHRASES}) for language in (0, 1)]

_SIGNS = str.maketrans({"^": "**", "（": "(", "）": ")", "＋": "+", "－": "-", "＊": "*", "／": "/"})


def everyday_tools() -> list[Tool]:
    """Return the six tools, in MiniMind's order."""
    make = tool(in_memory=True)
    functions = (
        calculate_math,
        unit_converter,
        get_current_weather,
        get_current_time,
        get_exchange_rate,
        translate_text,
    )
    return [make(function) for function in functions]


def everyday_toolbox() -> Toolbox:
    """Return a toolbox of the six tools."""
    return Toolbox(everyday_tools())


def calculate_math(expression: str) -> dict[str, str]:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / ** and parentheses; ^ is a power.

    Raises:
        ToolError: As `evaluate`.
    """
    return {"result": number_text(evaluate(expression.translate(_SIGNS)))}


def unit_converter(value: float, from_unit: str, to_unit: str) -> dict[str, float]:
    """Convert a length, mass or temperature from one unit to another.

    Args:
        value: Amount in from_unit.
        from_unit: For example km, miles, kg, pounds, celsius.
        to_unit: Of the same kind.

    Raises:
        ToolError: An unknown unit, or two of different kinds.
    """
    # MiniMind's own temperatures lack the offset: its 100 °C are 180 °F, ours 212 °F.
    source, (kind, scale, offset) = _find("unit", from_unit, _UNITS)
    target, (to_kind, to_scale, to_offset) = _find("unit", to_unit, _UNITS)
    if kind != to_kind:
        raise ToolError(f"{source} measures {kind} and {target} {to_kind}: not convertible")
    if (source, target) in _FACTORS:
        result = value * _FACTORS[source, target]
    else:
        result = (value + offset) * scale / to_scale - to_offset
    if not math.isfinite(result):
        raise ToolError("the value is too large to be converted")
    if kind == "temperature" or abs(result) >= 0.01:
        return {"result": round(result, 4) + 0.0}  # 32 °F are 0.0 °C, not -0.0 or 6e-14
    return {"result": float(f"{result:.4g}")}


def get_current_weather(location: str) -> dict[str, str]:
    """Get the current weather of a city.

    Args:
        location: City, such as 北京 or London.

    Raises:
        ToolError: A city that is not in the table.
    """
    _, (temperature, condition) = _find("weather of", location.strip().removesuffix("市"), _WEATHER)
    return {"city": location, "temperature": temperature, "humidity": "65%", "condition": condition}


def get_current_time(timezone: str = "Asia/Shanghai") -> dict[str, str]:
    """Get the current date and time in a time zone.

    Args:
        timezone: IANA name, such as Europe/London.

    Raises:
        ToolError: A zone that is not in the table.
    """
    name, hours = _find("time zone", timezone, _HOURS)
    return {"datetime": f"{CLOCK + timedelta(hours=hours):%Y-%m-%d %H:%M:%S}", "timezone": name}


def get_exchange_rate(from_currency: str, to_currency: str) -> dict[str, str | float]:
    """Get how much of one currency a unit of another buys.

    Args:
        from_currency: Three-letter code, such as USD.
        to_currency: Three-letter code, such as CNY.

    Raises:
        ToolError: A currency that is not in the table.
    """
    source, in_cny = _find("currency", from_currency, _IN_CNY)
    target, to_cny = _find("currency", to_currency, _IN_CNY)
    if (source, target) in _RATES:
        rate = _RATES[source, target]
    elif (target, source) in _RATES:
        rate = 1 / _RATES[target, source]
    else:
        rate = in_cny / to_cny
    return {"from": source, "to": target, "rate": float(f"{rate:.4g}")}


def translate_text(text: str, target_language: str) -> dict[str, str]:
    """Translate a phrase.

    Args:
        text: The phrase.
        target_language: english or chinese.

    Raises:
        ToolError: A language or phrase that is not in the tables.
    """
    _, language = _find("language", target_language, _LANGUAGES)
    _, translated = _find("translation of", text.strip().rstrip(".!。！"), _TRANSLATIONS[language])
    return {"translated_text": translated}
