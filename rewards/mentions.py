"""Numbers, words and clauses in free text, in English and Chinese: what `contains` searches. Linear in the text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from .numeric import parse_number

_CJK = r"\u2e80-\u9fff\uac00-\ud7a3"  # scripts without spaces between words, as far as these matter here
_WORD = rf"[^\W{_CJK}]"  # a letter or digit of any other script
_PUNCTUATION = {"，": ", ", "、": ", ", "；": "; ", "：": ": ", "。": ". ", "！": "! ", "？": "? ", "\u3000": " "}
_SPELLING = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {"−": "-", "℃": "°C"} | _PUNCTUATION
)
#: Bullets and the numbers of a list ("1. ", "2) ") at the start of a line, with something after them.
_LIST_MARK = re.compile(r"^[ \t]*+(?:[-*•]|\(?[0-9]{1,2}[.)])[ \t]++(?=\S)", re.MULTILINE)
_RUN = re.compile(r"(?:(?<![\w)\]])[-+])?\$?[0-9](?:[0-9]|[.,/:^*~–-](?=[0-9]))*+(?:[eE][-+]?[0-9]++)?+")
_UNIT = re.compile(r"\s?(?:%|°\s?[CF]?|度|(?:km|cm|mm|kg|lbs?|ft|mi|[CF])\b)")
_ATTACHED = re.compile(rf"{_WORD}|\^")
_BEFORE = re.compile(rf"(?:{_WORD}-?|[.,/:^])\Z")
_CLAUSE_END = re.compile(r"[.!?;,]+(?=\s|\Z)|\n")


@dataclass(frozen=True, slots=True)
class Mention:
    """A place in the text; for a number its value and the unit written after it."""

    start: int
    end: int
    number: Decimal | None = None
    unit: str = ""


def tidy(text: str) -> str:
    """Return the text with ASCII spelling of full-width signs, without bullets and numbers of list items."""
    return _LIST_MARK.sub("", text.translate(_SPELLING)).strip()


def numbers(text: str) -> list[Mention]:
    """Return the numbers of a tidied text. 5/2, 1.5.2, 14:30, 3-5, x5 and 5x hold none."""
    found = []
    for run in _RUN.finditer(text):
        number = parse_number(run[0])
        unit = _UNIT.match(text, run.end())
        end = unit.end() if unit else run.end()
        before = text[max(0, run.start() - 2) : run.start()]
        if number is not None and not _BEFORE.search(before) and not _ATTACHED.match(text, end):
            found.append(Mention(run.start(), end, number, unit[0].strip() if unit else ""))
    return found


def words(text: str, phrase: str) -> list[Mention]:
    """Return where a tidied text holds a phrase: case aside, on word boundaries where its script has any."""
    parts = [re.escape(part) for part in phrase.split()]
    left = rf"(?<!{_WORD})" if re.match(_WORD, phrase[0]) else "(?<![A-Za-z_])"
    right = rf"(?!{_WORD})" if re.match(_WORD, phrase[-1]) else r"(?![A-Za-z_]|\d+[A-Za-z])"
    left += r"(?<![\d.,/:-])" if phrase[0].isdigit() else ""
    right += r"(?![.,/:-]?\d)" if phrase[-1].isdigit() else ""
    pattern = re.compile(left + r"\s+".join(parts) + right, re.IGNORECASE)
    return [Mention(match.start(), match.end()) for match in pattern.finditer(text)]


class Clauses:
    """The clauses of a text, found by position."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.ends = [(match.start(), match.end()) for match in _CLAUSE_END.finditer(text)]

    def around(self, mention: Mention, reach: int) -> tuple[str, str, str, str]:
        """Return of the clause of a mention what is before and after it, its closing sign, and the next clause.

        None is longer than `reach` characters.
        """
        index = bisect_right(self.ends, (mention.start, 0))
        start = self.ends[index - 1][1] if index else 0
        after = bisect_right(self.ends, (mention.end, 0))  # a phrase may hold a sign that ends clauses
        if after and self.ends[after - 1][0] == mention.end:
            after -= 1
        end, following = self.ends[after] if after < len(self.ends) else (len(self.text), len(self.text))
        next_end = self.ends[after + 1][0] if after + 1 < len(self.ends) else len(self.text)
        before = self.text[max(start, mention.start - reach) : mention.start]
        rest = self.text[mention.end : min(end, mention.end + reach)]
        return before, rest, self.text[end:following], self.text[following : min(next_end, following + reach)]


def without(text: str, copies: Iterable[str]) -> str:
    """Return the text with verbatim copies taken out, white space and case aside; each leaves a full stop behind."""
    places = [index for index, char in enumerate(text) if not char.isspace()]
    squeezed = "".join(_fold(text[index]) for index in places)
    taken: list[tuple[int, int]] = []
    for copy in copies:
        wanted = "".join(_fold(char) for char in copy if not char.isspace())
        at = squeezed.find(wanted) if wanted else -1
        while at >= 0:
            end = at + len(wanted)
            if not _cuts(squeezed, at) and not _cuts(squeezed, end):
                taken.append((places[at], places[end - 1] + 1))
            at = squeezed.find(wanted, end)
    kept, last = [], 0
    for start, end in sorted(taken):
        if start >= last:
            kept.append(text[last:start])
        last = max(last, end)
    return ". ".join([*kept, text[last:]])


def _fold(char: str) -> str:
    lower = char.lower()
    return lower if len(lower) == 1 else char


def _cuts(text: str, at: int) -> bool:
    """Tell whether a cut at this place would part a number."""
    return 0 < at < len(text) and text[at - 1].isdigit() and text[at].isdigit()
