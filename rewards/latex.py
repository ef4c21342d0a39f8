"""Answers in LaTeX or plain mathematics, read by value: numbers, fractions, roots, variables, tuples, sets, intervals.

A text is evaluated exactly, with each variable at a fixed rational point: two texts of equal value at every point are
taken for equal. pi, e and infinity are variables of their own. What is not understood has no value (`NotExactError`);
then only its normalised text can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from random import Random

from .stated import is_unit, unwrap
from .surds import NotExactError, Surd

POINTS = 3  # at which variables are evaluated
MAX_CHARS = 500  # of an answer that is read by value
_MAX_DEPTH = 20
_MAX_DIGITS = 100
#: A value: a number, or a kind of collection and its parts; a set's parts are sorted.
Value = Surd | tuple[str, tuple["Value", ...]]

_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "，": ","})
_REWRITES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\\)\\[!,;:]|\{,\}(?=\d{3})", ""),
        (r"(?<!\\)\\ |~|\\quad(?![A-Za-z])", " "),
        (r"\\[dt]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])|\*(?!\*)", "*"),
        (r"\*\*", "^"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\%", "%"),
        (r"\\?\$", ""),
        (r"\^\s*+\{?+\s*+\\circ\s*+\}?+|\\degree(?![A-Za-z])|°|[ ]?\bdegrees?\b", ""),
        (r"(?<![\\A-Za-z])(pi|sqrt|infty)(?![A-Za-z])", r"\\\1"),
        (r"√(\d++)", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt"),
    )
)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\w})])\s*\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}(?:\^\{?[23]\}?)?\Z|(?<=\d)\s+([A-Za-z]{2,20})\Z"
)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")
_NAME = re.compile(r"([A-Za-z](?:\([A-Za-z]\))?)\s*(?:=|\\in(?![A-Za-z]))")
_NUMBER = r"\d++(?:\.\d++)?+|\.\d++"
_TOKEN = re.compile(rf"\s*(?:({_NUMBER})|(\\[A-Za-z]++|\\[{{}}]|[A-Za-z]++|[-+*/^(){{}}\[\],%]))")
_DECIMAL = re.compile(rf"[-+]?(?:{_NUMBER})%?")
_FRACTION = re.compile(r"[-+]?(?P<whole>\d*)(?:\\frac\{?(-?\d+)\}?\{?(\d+)\}?|(\d+)/(\d+))%?")
_RUN = re.compile(r"[abcdfghjklmnpqrstuvwxyz]{2,3}|[A-Z]{2,3}")  # letters that may be a product; "or", "not" are none
_SYMBOL = re.compile(r"\\(?:pi|infty|alpha|beta|gamma|[dD]elta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|[oO]mega)")
_OPEN = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_CLOSERS = frozenset(_OPEN.values())


def respell(text: str) -> str:
    """Return the text with one spelling for each sign; formula signs and degrees are dropped."""
    text = text.translate(_SIGNS)
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    return text


def normalise(text: str) -> str:
    """Return an answer with one spelling for each sign, without dress and units of measure."""
    text = respell(unwrap(text))
    if len(text) > MAX_CHARS:
        return text
    unit = _UNIT.search(text)
    if unit and all(is_unit(word) for word in (unit[1] or unit[2] or "").replace(".", " ").split()):
        text = text[: unit.start()]
    return _TEXT.sub(r"\1", text).strip()


def split_name(text: str) -> tuple[str, str]:
    """Return the variable that a normalised text names before "=" or "\\in" ("" for none), and the rest."""
    name = _NAME.match(text)
    return (name[1], text[name.end() :].strip()) if name else ("", text)


def key(text: str) -> str:
    """Return what two texts must share to be the same text: white space, braces of one sign and case of words aside."""
    bare = re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s+", "", text))
    return bare.casefold() if re.fullmatch(r"[^\W\d_]{2,}", bare) else bare


def finished(text: str) -> bool:
    """Tell whether a normalised text is a number worked out: a decimal, or a fraction in lowest terms."""
    text = re.sub(r"\s+", "", text)
    if _DECIMAL.fullmatch(text) or _THOUSANDS.fullmatch(text):
        return True
    fraction = _FRACTION.fullmatch(text)
    if fraction is None or len(text) > _MAX_DIGITS:
        return False
    numerator, denominator = (int(fraction[a] or fraction[b]) for a, b in ((2, 4), (3, 5)))
    if fraction["whole"] and fraction[4]:  # "11/2" is no mixed number
        numerator = int(fraction["whole"] + fraction[4])
    return denominator > 1 and Fraction(numerator, denominator).denominator == denominator


def leaves(text: str) -> list[str]:
    """Return the expressions of which a normalised text is made. Raises NotExactError for what is not understood."""
    found: list[str] = []

    def note(tokens: list[str]) -> Surd:
        found.append(" ".join(tokens))
        return Surd.of(len(found))

    _collection(_read(text), note, 0)
    return found


def value(text: str, point: int) -> Value:
    """Evaluate a normalised text at one of the points. Raises NotExactError for what is not understood."""
    return _collection(_read(text), lambda tokens: _Reader(tokens, point).all(), 0)


def _read(text: str) -> list[str]:
    if len(text) > MAX_CHARS:
        raise NotExactError("too long")
    return list(_tokens(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text))


def _tokens(text: str) -> Iterator[str]:
    at = 0
    text = text.rstrip()
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None or len(token[1] or "") > _MAX_DIGITS:
            raise NotExactError(f"{text[at : at + 10]!r} is not understood")
        at = token.end()
        word = token[2] or ""
        if len(word) > 1 and word[0] != "\\":
            if not _RUN.fullmatch(word):
                raise NotExactError(f"{word!r} is no product of variables")
            yield from word
        else:
            yield token[1] or word


def _collection(tokens: list[str], leaf: Callable[[list[str]], Surd], depth: int) -> Value:
    """Read a list, a union, a bracketed collection or a single expression, which `leaf` evaluates."""
    if depth > _MAX_DEPTH or not tokens:
        raise NotExactError("too deep, or empty")
    for separator, kind in ((",", "set"), ("\\cup", "union")):
        parts = _split(tokens, separator)
        if len(parts) > 1:
            return _sorted(kind, [_collection(part, leaf, depth + 1) for part in parts])
    if tokens[0] in _OPEN and _closed_by(tokens) == len(tokens) - 1:
        parts = _split(tokens[1:-1], ",")
        kind = tokens[0].removeprefix("\\") + tokens[-1].removeprefix("\\")
        if len(parts) > 1 or tokens[0] == "\\{":
            values = [_collection(part, leaf, depth + 1) for part in parts]
            return _sorted("set", values) if kind == "{}" else (kind, tuple(values))
    return leaf(tokens)


def _sorted(kind: str, values: list[Value]) -> Value:
    return kind, tuple(sorted(values, key=repr))


def _split(tokens: list[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPEN) - (token in _CLOSERS)
        if token == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _closed_by(tokens: list[str]) -> int:
    """Return where the first bracket is closed, by a bracket of any sort (intervals), or -1."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token in _OPEN) - (token in _CLOSERS)
        if depth == 0:
            return index
    return -1


@cache
def _at(name: str, point: int) -> Surd:
    """Return the fixed rational value of a variable at a point, the last one negative."""
    rng = Random(f"{name}/{point}")
    sign = -1 if point == POINTS - 1 else 1
    return Surd.of(Fraction(sign * rng.randint(2, 199), rng.choice((3, 5, 7))))


class _Reader:
    """Evaluates the tokens of one expression by recursive descent."""

    def __init__(self, tokens: list[str], point: int) -> None:
        self.tokens, self.point, self.at, self.depth = [*tokens, ""], point, 0, 0

    def all(self) -> Surd:
        """Evaluate the whole expression."""
        result = self.sum()
        if self.left():
            raise NotExactError(f"{self.left()!r} is not understood")
        return result

    def left(self) -> str:
        """Return the next token, "" at the end."""
        return self.tokens[self.at]

    def take(self, *wanted: str) -> str:
        """Take the next token if it is one of `wanted`, else return ""."""
        token = self.left()
        if token and token in wanted:
            self.at += 1
            return token
        return ""

    def sum(self) -> Surd:
        """Read terms joined by + and -."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotExactError("too deep")
        total = self.product()
        while sign := self.take("+", "-"):
            term = self.product()
            total = total + term if sign == "+" else total - term
        self.depth -= 1
        return total

    def product(self) -> Surd:
        """Read signs, then factors joined by *, / or nothing."""
        negative = False
        while sign := self.take("+", "-"):
            negative ^= sign == "-"
        start, whole = self.at, self.left().isdecimal()
        result = self.power()
        while True:
            token = self.left()
            if self.take("*", "/"):
                factor = -self.power() if self.take("-") else self.power()
                result = result * (factor if token == "*" else factor.inverse())
            elif token == "\\frac" and whole and self.at == start + 1:
                result = result + self.power()  # 1\frac{1}{2} is one and a half
            elif token in ("(", "[", "{") or token.lstrip("\\")[:1].isalpha():
                result = result * self.power()
            else:
                return -result if negative else result

    def power(self) -> Surd:
        """Read an atom with its exponent and percent sign."""
        base = self.atom()
        if self.take("^"):
            base = _power(base, -self.atom() if self.take("-") else self.atom())
        return base * Surd.of(Fraction(1, 100)) if self.take("%") else base

    def argument(self) -> Surd:
        """Read what a command applies to: a group, or one sign, which of a number is its first digit (\\frac12)."""
        token = self.left()
        if token.isdecimal() and len(token) > 1:
            self.tokens[self.at] = token[1:]
            return Surd.of(int(token[0]))
        return self.atom()

    def atom(self) -> Surd:
        """Read a number, a variable, a group, a fraction or a root."""
        token = self.left()
        self.at += 1
        if token[:1].isdecimal() or token[:1] == ".":
            return Surd.of(Fraction(token))
        if token in ("(", "[", "{"):
            inner = self.sum()
            if not self.take(_OPEN[token]):
                raise NotExactError("a bracket is not closed")
            return inner
        if token == "\\frac":
            above = self.argument()
            return above * self.argument().inverse()
        if token == "\\sqrt" and self.left() != "[":
            return self.argument().root()
        if token == "i":
            return Surd.of(-1).root()
        if (len(token) == 1 and token.isalpha()) or _SYMBOL.fullmatch(token):
            return _at(token, self.point)
        raise NotExactError(f"{token!r} is not understood")


def _power(base: Surd, exponent: Surd) -> Surd:
    number = exponent.rational
    if number is None or number.denominator > 2:
        raise NotExactError("no whole exponent")
    return (base.root() if number.denominator == 2 else base).power(number.numerator)
