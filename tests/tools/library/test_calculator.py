import ast
import contextlib
import math
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtune.tools import Limits, ParsedCall, Toolbox, calculator_tool, evaluate, number_text
from gymtune.tools.errors import ConfigError, ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 34", 408),
        ("7 × 6 ÷ 2 − 1", 20.0),
        ("2 + 3 * 4", 14),
        ("-2 ** 2", -4),
        ("2 ** 3 ** 2", 512),
        ("7 // 2", 3),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("1 / 4", 0.25),
        ("2 ** -2", 0.25),
        ("10 - 4 - 3", 3),
        ("+(-(3))", -3),
        ("1e3 + .5", 1000.5),
        ("2 ** 64", 18446744073709551616),
        ("  1 + 1\n", 2),
    ],
)
def test_values_by_hand(expression: str, value: float) -> None:
    assert evaluate(expression) == value
    assert type(evaluate(expression)) is type(value)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("9**9**9", "max_exponent"),
        ("2**10**6", "max_exponent"),
        ("2**-65", "max_exponent"),
        ("10**63 * 10**40", "max_digits"),
        ("(10**50)**3", "max_digits"),
        ("9" * 101, "max_digits"),
        ("1 +" * 80 + "1", "max_chars"),
        ("1+" * 33 + "1", "max_operations"),
        ("(" * 17 + "1" + ")" * 17, "max_depth"),
        ("-" * 17 + "1", "max_depth"),
        ("**".join("1" * 18), "max_depth"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("(-8) ** (1/3)", "not a real number"),
        ("1e308 * 10", "too large"),
        ("1e999", "too large"),
        ("1e400 - 1e400", "too large"),
        ("10.0 ** 64 ** 1 * 1e300", "too large"),
        ("2 ^ 3", "Write **"),
        ("True", "'True'"),
        ("x + 1", "'x'"),
        ("π * 2", "'π'"),
        ("abs(1)", "'abs'"),
        ("1(2)", "calls"),
        ("(1).real", "'real'"),
        ("'1'", "strings"),
        ("1 < 2", "comparisons"),
        ("1,000", "tuples"),
        ("[1]", "lists"),
        ("{1}", "sets"),
        ("1 | 2", "BitOr"),
        ("~1", "Invert"),
        ("1 if 1 else 2", "'if'"),
        ("lambda: 1", "'lambda'"),
        ("__import__('os')", "strings"),
        ("2j", "'j'"),
        ("0x10", "'x'"),
        ("1 # 2", "'#'"),
        ("...", "Ellipsis"),
        ("1 2", "not an arithmetic expression"),
        ("1; 2", "not an arithmetic expression"),
        ("12 * 34 =", "not an arithmetic expression"),
        ("", "empty"),
        (" \n", "empty"),
        ("1\x00", "not allowed"),
    ],
)
def test_refusals_name_the_cause(expression: str, says: str) -> None:
    with pytest.raises(ToolError) as caught:
        evaluate(expression)
    assert says in str(caught.value)


@pytest.mark.parametrize("depth", [150, 10_000, 200_000])
def test_parser_limits_do_not_escape(depth: int) -> None:
    wide = Limits(max_chars=10**6, max_depth=10**6, max_operations=10**6)
    for expression in ("(" * depth + "1" + ")" * depth, "-" * depth + "1", "1" + "+1" * depth, "1" + "**1" * depth):
        with contextlib.suppress(ToolError):  # and nothing else
            assert evaluate(expression, limits=wide) in (-1, 1, depth + 1)
        with pytest.raises(ToolError):
            evaluate(expression, limits=Limits(max_chars=10**6))


def test_depth_is_checked_before_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ast, "parse", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(ToolError, match="max_depth"):
        evaluate("(" * 10_000 + "1" + ")" * 10_000, limits=Limits(max_chars=10**6))


def test_digits_are_counted_before_the_work() -> None:
    wide = Limits(max_chars=10**6, max_exponent=10**9)
    for expression in ("9" * 5000, "9**9**9", "(-9)**9**9"):  # beyond Python's own limit; minutes of multiplying
        with pytest.raises(ToolError, match="max_digits"):
            evaluate(expression, limits=wide)


def test_each_limit_is_inclusive() -> None:
    assert evaluate("+".join("1" * 33)) == 33
    assert evaluate("1-(" * 16 + "1" + ")" * 16) == 1
    assert evaluate("1-" * 20 + "1") == -19  # a long sum is not deep
    assert evaluate("1 ** 64") == 1
    assert evaluate("9" * 100) == 10**100 - 1
    assert evaluate("1+1".ljust(200)) == 2
    assert evaluate("(10 ** 50 - 1) * 10 ** 50") == (10**50 - 1) * 10**50  # 100 digits
    with pytest.raises(ToolError, match="max_digits"):
        evaluate("10 ** 50 * 10 ** 50")  # 101


def test_limits_are_themselves_checked() -> None:
    with pytest.raises(ConfigError, match="max_depth"):
        Limits(max_depth=0)


@given(
    st.recursive(
        st.integers(-(10**6), 10**6), lambda part: st.tuples(part, st.sampled_from("+-*"), part), max_leaves=12
    )
)
def test_agrees_with_fractions(tree: object) -> None:
    def text_and_value(node: object) -> tuple[str, Fraction]:
        if isinstance(node, int):
            return (f"({node})" if node < 0 else str(node)), Fraction(node)
        assert isinstance(node, tuple)
        (left, a), (right, b) = text_and_value(node[0]), text_and_value(node[2])
        return f"({left} {node[1]} {right})", {"+": a + b, "-": a - b, "*": a * b}[node[1]]

    text, value = text_and_value(tree)
    assert evaluate(text, limits=Limits(max_chars=10**4)) == value


@given(st.text(alphabet="0123456789.eE+-*/%()^ ,x='\"#\\", max_size=40))
def test_any_text_ends_in_a_number_or_a_tool_error(text: str) -> None:
    with contextlib.suppress(ToolError):  # and nothing else
        assert math.isfinite(float(number_text(evaluate(text))))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (408, "408"),
        (10**99, "1" + "0" * 99),
        (20.0, "20"),
        (-0.0, "0"),
        (-3.0, "-3"),
        (0.1 + 0.2, "0.3"),
        (1 / 3, "0.333333333333"),
        (999999999999999.0, "999999999999999"),
        (1e15, "1e+15"),
        (1.5e-7, "1.5e-07"),
    ],
)
def test_number_text(number: float, text: str) -> None:
    assert number_text(number) == text


def test_number_text_of_an_integer_that_python_will_not_write() -> None:
    with pytest.raises(ToolError, match="too many digits"):
        number_text(10**5000)


def test_tool() -> None:
    tool = calculator_tool()
    assert (tool.name, tool.in_memory) == ("calculator", True)
    assert tool.description == "Evaluate an arithmetic expression, e.g. 12 * (3 + 4)."
    assert "one operation" in calculator_tool(Limits(max_operations=1)).description
    box = Toolbox([pickle.loads(pickle.dumps(tool))])  # travels to the worker of a vector env
    assert box.call(ParsedCall("c", "calculator", {"expression": "6 / 2"}, None, "")).content == "3"
    failed = box.call(ParsedCall("c", "calculator", {"expression": "1 / 0"}, None, ""))
    assert failed.content == "error (exception): division by zero"
    one = Toolbox([calculator_tool(Limits(max_operations=1))])
    assert one.call(ParsedCall("c", "calculator", {"expression": "-2 * -3"}, None, "")).content == "6"
    assert one.call(ParsedCall("c", "calculator", {"expression": "1 + 2 + 3"}, None, "")).failed
