"""Calculator: arithmetic by the syntax tree (never `eval`), each limit enforced before the work that it bounds."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from ..errors import ConfigError, ToolError
from ..tool import Tool

Number = int | float

_ALLOWED = "Only numbers, + - * / // % ** and parentheses are"
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[^\W0-9]\w*")
_STRAY = re.compile("[\"'#\\\\\\x00]")
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_PLURALS: dict[type[ast.AST], str] = {
    ast.Call: "calls",
    ast.Attribute: "attributes",
    ast.Compare: "comparisons",
    ast.Tuple: "tuples (a comma between numbers)",
    ast.List: "lists",
    ast.Set: "sets",
    ast.Dict: "dicts",
    ast.Subscript: "subscripts",
    ast.Starred: "starred expressions",
}


@dataclass(frozen=True)
class Limits:
    """Bounds of one expression.

    Args:
        max_chars: Characters of the expression.
        max_depth: Levels of nesting, by parentheses, signs and powers of powers; a long sum is not deep.
        max_operations: Operators between two operands; signs do not count.
        max_exponent: Largest exponent by absolute value.
        max_digits: Decimal digits of a number given and of an integer computed.

    Raises:
        ConfigError: A limit below 1.
    """

    max_chars: int = 200
    max_depth: int = 16
    max_operations: int = 32
    max_exponent: int = 64
    max_digits: int = 100

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ConfigError(f"calculator: {item.name} must be at least 1, got {getattr(self, item.name)!r}")


_DEFAULT = Limits()


def evaluate(expression: str, *, limits: Limits = _DEFAULT) -> Number:
    """Return the value of an arithmetic expression: `+ - * / // % **`, signs, parentheses, decimal numbers, `× ÷ −`.

    Raises:
        ToolError: The expression is none, breaks a limit (named), or has no finite real value.
    """
    text = _scan(expression, limits)
    try:
        tree = ast.parse(text, mode="eval").body
        _check(tree, limits)
        return _value(tree, limits)
    except SyntaxError:
        raise ToolError(f"{expression!r} is not an arithmetic expression") from None
    except (RecursionError, MemoryError):  # the parser's, or Python's, own bound is below max_depth
        raise ToolError(f"the expression is nested too deeply (max_depth {limits.max_depth})") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large for a floating-point number") from None


def number_text(x: Number) -> str:
    """Return a number as a person writes it: integers exact, whole floats below 1e15 without `.0`, else 12 digits.

    Raises:
        ToolError: An integer beyond Python's limit for conversion to text.
    """
    if isinstance(x, float):
        return str(int(x)) if x.is_integer() and abs(x) < 1e15 else f"{x:.12g}"
    try:
        return str(x)
    except ValueError:
        raise ToolError("the integer has too many digits to be written") from None


def calculator_tool(limits: Limits = _DEFAULT) -> Tool:
    """Return the tool `calculator`, which takes an expression and answers with `number_text` of its value."""
    return Tool(
        name="calculator",
        description="Evaluate one operation, e.g. 12 * 34."
        if limits.max_operations == 1
        else "Evaluate an arithmetic expression, e.g. 12 * (3 + 4).",
        parameters={
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
        function=partial(_calculate, limits=limits),
        in_memory=True,
    )


def _calculate(expression: str, limits: Limits) -> str:
    return number_text(evaluate(expression, limits=limits))


def _scan(expression: str, limits: Limits) -> str:
    """Refuse by the text alone what the parser should not see, and return the text for the parser."""
    if not isinstance(expression, str):
        raise ToolError(f"the expression must be a string, got {type(expression).__name__}")
    if len(expression) > limits.max_chars:
        raise ToolError(f"the expression has {len(expression)} characters (max_chars {limits.max_chars})")
    text = expression.translate(_SIGNS).strip()
    if not text:
        raise ToolError("the expression is empty")
    if "^" in text:
        raise ToolError("'^' is not allowed. Write ** for a power.")
    for number in _NUMBER.findall(text):
        if sum(map(str.isdigit, number)) > limits.max_digits:
            raise ToolError(f"a number has too many digits (max_digits {limits.max_digits})")
    rest = _NUMBER.sub(" ", text)
    if found := _STRAY.search(rest) or _WORD.search(rest):
        what = "strings are" if found[0] in "\"'" else f"{found[0]!r} is"
        raise ToolError(f"{what} not allowed. {_ALLOWED}.")
    depth = 0
    for char in rest:
        depth += (char == "(") - (char == ")")
        if depth > limits.max_depth:
            raise ToolError(f"the parentheses are nested too deeply (max_depth {limits.max_depth})")
    return text


def _check(tree: ast.expr, limits: Limits) -> None:
    """Walk the tree without recursion; refuse what is not arithmetic, too deep or too long."""
    operations = 0
    todo: list[tuple[ast.expr, int]] = [(tree, 0)]
    while todo:
        node, depth = todo.pop()
        if depth > limits.max_depth:
            raise ToolError(f"the expression is nested too deeply (max_depth {limits.max_depth})")
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            operations += 1
            todo += [(node.left, depth), (node.right, depth + 1)]
        elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            todo.append((node.operand, depth + 1))
        elif not (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
            raise ToolError(f"{_what(node)} not allowed. {_ALLOWED}.")
        if operations > limits.max_operations:
            raise ToolError(f"the expression has too many operations (max_operations {limits.max_operations})")


def _what(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        return f"the operator {type(node.op).__name__} is"
    if isinstance(node, ast.Constant):
        return f"{node.value!r} is"
    return f"{_PLURALS.get(type(node), type(node).__name__)} are"


def _value(node: ast.expr, limits: Limits) -> Number:
    """Evaluate a checked tree; every value on the way is finite, real and within `max_digits`."""
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, limits), _value(node.right, limits)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right, limits)
        return _bounded(_BINARY[type(node.op)](left, right), limits)
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, limits))
    assert isinstance(node, ast.Constant)
    return _bounded(node.value, limits)


def _check_power(base: Number, exponent: Number, limits: Limits) -> None:
    """Refuse a power before it is computed: an integer power has `floor(exponent * log10|base|) + 1` digits."""
    if abs(exponent) > limits.max_exponent:
        raise ToolError(f"the exponent {number_text(exponent)} is too large (max_exponent {limits.max_exponent})")
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base
        and exponent * math.log10(abs(base)) > limits.max_digits + 1
    ):
        raise ToolError(f"the result has too many digits (max_digits {limits.max_digits})")


def _bounded(number: object, limits: Limits) -> Number:
    """Return the number, if it is one to go on with (a product of two bounded integers is cheap: checked after)."""
    if isinstance(number, complex):
        raise ToolError("the result is not a real number")
    assert isinstance(number, int | float)
    if isinstance(number, int):
        if abs(number) >= 10**limits.max_digits:
            raise ToolError(f"the result has too many digits (max_digits {limits.max_digits})")
    elif not math.isfinite(number):
        raise ToolError("the result is too large for a floating-point number")
    return number
