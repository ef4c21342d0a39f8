"""The one answer that a text states: alone or marked ("The answer is X.", "#### X", "\\boxed{X}", <answer>X</answer>).

What casts doubt on it, gives another one beside it, or goes on after it makes a text state nothing: checkers do not
guess. Everything here takes time linear in the text.
"""

from __future__ import annotations

import re

#: Ways of saying "this is the answer" that the seeds' data and most models use; a box and a tag come on top.
MARK = r"\banswer(?:\s+is\b:?+|:|\s*=)|####|答案(?:是|为|[:：])"
#: Words that take a statement back or leave it open, in English and Chinese.
DOUBT = re.compile(
    r"\b(?:not|no|never|nor|neither|cannot|wrong|incorrect|false|doubt|doubtful|unlikely|maybe|perhaps|possibly|probably"
    r"|or|either|unsure|guess)\b|n['’]t\b|不|没|未必|或|可能|也许|大概|错误|猜",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"[.!?;,]\s|\n|[。！？；，]")
_LOOK_BACK = 200  # characters before a mark in which its clause is looked for
_STATEMENT_END = re.compile(r"[.!?](?=\s|\Z)|\n|[。！？]")
_MARKS = re.compile(rf"(?P<box>\\boxed\s*\{{)|(?P<tag><answer>)|(?:{MARK})[\s*]*+(?!<answer>)", re.IGNORECASE)
_TAG_END = "</answer>"
_CLOSING = re.compile(r"(?:[\s.。*$)\]}\\]|</answer>)*+")  # full stop, end of bold, box or formula
_PAIRS = (("$$", "$$"), ("$", "$"), ("**", "**"), (r"\(", r"\)"), (r"\[", r"\]"))
_BOX = re.compile(r"\\boxed\s*\{")
_BRACES = re.compile(r"(?<!\\)[{}]")
_MAX_CHARS = 2000  # of one statement: an answer is no essay
MAX_STATEMENTS = 50  # of a text: what says it more often is a dump
# Words after a number that make it another number, or no number at all: no units of measure.
_NO_UNIT = re.compile(
    r"(?:hundred|thousand|[mbtr]+illion|dozen|score|quarter|half|halve|third|fourth|fifth|sixth|eighth|tenth"
    r"|hundredth|thousandth)s?|mil|mn|bn|percent|percentage|squared|cubed|factorial|plus|minus|times|over|point|to|and"
    r"|mod|divided|multiplied|more|less|fewer|if|unless|except|but|than|pi|sqrt|negative|positive",
    re.IGNORECASE,
)


def doubted(text: str, start: int) -> bool:
    """Tell whether the clause that leads up to `start` casts doubt on what stands there."""
    clause = _CLAUSE_END.split(text[max(0, start - _LOOK_BACK) : start])[-1]
    return DOUBT.search(clause) is not None


def is_unit(word: str) -> bool:
    """Tell whether a word after a number may be a unit ("apples", "km"), which leaves the number as it is."""
    return len(word) > 1 and _NO_UNIT.fullmatch(word) is None and DOUBT.search(word) is None


def statements(text: str) -> list[tuple[int, int, str]] | None:
    """Return (start of the mark, end, what is stated) for each marked statement; None when there are too many."""
    found: list[tuple[int, int, str]] = []
    at = 0
    while mark := _MARKS.search(text, at):
        end, stated = _extent(text, mark)
        at = max(end, mark.end())
        if stated:
            found.append((mark.start(), at, stated))
        if len(found) > MAX_STATEMENTS:
            return None
    return found


def stated_answer(text: str) -> str | None:
    """Return the one answer that `text` states, without its marks, or None."""
    found = statements(text)
    if found == []:
        return unwrap(text) if 0 < len(text.strip()) <= _MAX_CHARS else None
    answers = {unwrap(stated) for _, _, stated in found or ()}
    if not found or len(answers) > 1 or any(doubted(text, start) for start, _, _ in found):
        return None
    answer = answers.pop()
    whole = _CLOSING.fullmatch(text, found[-1][1]) and not _MARKS.search(answer)  # no mark left, as in "not \\boxed{5}"
    return answer if whole else None


def unwrap(text: str) -> str:
    """Take off what only dresses an answer: a final full stop, bold, formula signs, a box around the whole."""
    before = None
    while before != text and len(text) <= _MAX_CHARS:
        before, text = text, text.strip().removesuffix("。")
        text = text.removesuffix(".") if not text.endswith("..") else text
        for left, right in _PAIRS:
            inner = text[len(left) : -len(right)]
            if len(text) > len(left + right) and text.startswith(left) and text.endswith(right) and left not in inner:
                text = inner
        box = _BOX.match(text)
        if box and _closing_brace(text, box.end()) == len(text) - 1:
            text = text[box.end() : -1]
    return text.strip()


def _extent(text: str, mark: re.Match[str]) -> tuple[int, str]:
    """Return where the statement of a mark ends, and the statement."""
    start = mark.end()
    limit = min(len(text), start + _MAX_CHARS)
    if mark["box"]:
        end = _closing_brace(text, start)
        return (end + 1, text[start:end]) if end >= 0 else (limit, text[mark.start() : limit])
    if mark["tag"]:
        end = text.find(_TAG_END, start, limit + len(_TAG_END))
        return (end + len(_TAG_END), text[start:end]) if end >= 0 else (limit, text[mark.start() : limit])
    stop = _STATEMENT_END.search(text, start, limit)
    end = stop.start() if stop else limit
    return end, text[start:end].strip().rstrip("*")


def _closing_brace(text: str, start: int) -> int:
    """Return where the brace opened before `start` is closed, or -1 when it is not within the limit."""
    depth = 1
    for brace in _BRACES.finditer(text, start, min(len(text), start + _MAX_CHARS)):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return -1
