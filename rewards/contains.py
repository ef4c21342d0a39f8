"""The checker of free text that must state one or several facts: MiniMind's rule for agents, made safe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar

from .attacks import text_attacks
from .checker import Checker, Verdict
from .episode import Episode
from .mentions import Clauses, Mention, numbers, tidy, without, words
from .numeric import equal, parse_number
from .stated import DOUBT, statements

_MAX_CHARS = 100_000  # of an answer
_MAX_MENTIONS = 20  # of one gt: more is a dump
_REACH = 200  # characters before and after a mention that are looked at
_CALL = re.compile(r'"arguments"\s*+:|<tool_call|<function=')
_TAKEN_BACK = re.compile(
    r"\s*(?:(?:or|nor|maybe|perhaps|possibly|probably|either)\b|或|也?可能|也许|大概"
    r"|(?:no|not|not really|wrong|false|incorrect|不|不对|不是|错了?)\W*\Z)",
    re.IGNORECASE,
)
_SAID_OF_IT = re.compile(r"\s*(?:is|was|said|says)\b", re.IGNORECASE)
_ASKS = re.compile(r"\?|[吗呢]\s*\Z")
_OPERATOR_AFTER = re.compile(r"\s*[+*/×÷^]|\s+-\s")
_OPERATOR_BEFORE = re.compile(r"(?:[+*/×÷^]|\s-)\s*\Z")
_SEPARATORS = re.compile(r"[\s,;|/&]*(?:and|和|与|及)?\s*", re.IGNORECASE)
_ITEM_ENDS = re.compile(r"[,;|/\n]|\.\s|\band\b|[和与及]")
_GRAMMAR = re.compile(
    r"\b(?:is|are|was|were|be|it|its|the|an?|in|of|to|for|as|at|on|with|has|have|will|means|equals|you|this|that|there)\b"
    r"|[是为的了在有将会到得]",
    re.IGNORECASE,
)
_GREETING = re.compile(
    r"(?:yes|sure|ok|okay|hello|hi|so|thanks|well|done|certainly|好的|是的|你好|您好|当然)", re.IGNORECASE
)
_OUTER = " \t\n.,;:!?\"'“”‘’*`$()（）《》「」"


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the agent was told and did: text that it may echo, numbers that it may use."""

    question: str = ""
    results: tuple[str, ...] = ()
    calls: str = ""

    def copies(self, gts: Sequence[_Gt]) -> Iterator[str]:
        """Yield what must not count when it is merely repeated: sentences of the question, whole results."""
        yield from (part for part in re.split(r"(?<=[.!?])\s|\n", self.question) if len(part.split()) > 1)
        for result in self.results:
            if len(result) > 1 and any(gt.mentions(result) and not gt.is_all_of(result) for gt in gts):
                yield result


@dataclass(slots=True)
class _Gt:
    """One fact: a number, or a phrase."""

    text: str
    number: Decimal | None = field(init=False)

    def __post_init__(self) -> None:
        self.number = parse_number(self.text)

    def mentions(self, text: str) -> list[Mention]:
        """Return where a tidied text mentions it."""
        if self.number is None:
            return words(text, self.text)
        return [m for m in numbers(text) if self.is_number(m)]

    def is_number(self, mention: Mention) -> bool:
        """Tell whether a number in the text is this one."""
        return self.number is not None and mention.number is not None and equal(mention.number, self.number)

    def is_all_of(self, text: str) -> bool:
        """Tell whether a tidied text is nothing but this."""
        bare = text.strip(_OUTER)
        number = parse_number(bare)
        if self.number is not None:
            return number is not None and equal(number, self.number)
        return " ".join(bare.casefold().split()) == " ".join(self.text.strip(_OUTER).casefold().split())


class ContainsGt(Checker):
    """Right when the answer states every gt; the score is the share that it states (1 only when right).

    `gt` is a text or number, or a list of them. Numbers are compared as numbers ("1,234.50" states 1234.5; 28 is stated
    by "28°C", not by "128", "28.5" or "5/28"), other texts on word boundaries, in Chinese as they stand.

    A gt counts where it is said as a fact: not in a question, in a clause with "not", "or", "maybe" (不是, 或者 ...) or
    before one, as an operand, or in a bare list beside things that are no gt. An answer is `unparsed` when it holds a
    number that comes from nowhere (no gt, not in question, calls or results), more than 2 numbers a gt, and 2 more, of
    calls and results, a marked statement ("The answer is ...") without a gt, or the markup of a call. `judge` first
    takes out what the answer copies: sentences of the question and whole tool results.

    Open remains what only a reader can tell: a fluent sentence that states other facts of the tool results beside the
    right one, within the numbers above; a true gt about the wrong thing; Chinese words run together.
    """

    positives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("59", ["59"]),
        ("The result is 59.", ["59"]),
        ("It comes to 1,234.50 dollars.", "1234.5"),
        ("北京今天的气温是28°C。", ["28"]),
        ("It is 28°C and sunny in Beijing today.", ["28", "sunny"]),
        ("北京今天晴，气温28度。", ["28", "晴"]),
        ("The translation is “Hello World”.", ["hello world"]),
        ("翻译结果是：早上好", ["早上好"]),
        ("The first product is 379; the second one is 133.", ["379", "133"]),
        ("1. The sum is 379\n2. The difference is -5", ["379", -5]),
        ("当前时间是2025-03-07 14:30:00。", ["2025-03-07 14:30:00"]),
        ("The answer is 7.21.", [7.21]),
        ("北京今天28°C，不下雨。", ["28"]),
    )
    negatives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("", ["5"]),
        ("128", ["28"]),
        ("It is 28.5 degrees", ["28"]),
        ("-5", [5]),
        ("5/2", [5]),
        ("5e3", [5]),
        ("version 1.5.2", [5]),
        ("It is not 28°C.", ["28"]),
        ("It is 28°C, or maybe less.", ["28"]),
        ("It is 28°C. Not!", ["28"]),
        ("不是28度，也可能更高。", ["28"]),
        ("28度或者更高", ["28"]),
        ("Is it 28?", ["28"]),
        ("28 + 0", ["28"]),
        ("25, 26, 27, 28", ["28"]),
        ("It is sunnyish", ["sunny"]),
        ("rain, sunny, snow", ["sunny"]),
        ("1. 27\n2. 28", ["28"]),
    )

    def verdict(self, answer: str, gt: Any) -> Verdict:
        """Judge `answer`. Raises ValueError for a gt that is no text, number or list of them (-> `broken`)."""
        return _judge(answer, _wanted(gt), _Seen())

    def judge(self, episode: Episode) -> Verdict:
        """Judge the agent's last text, knowing what it was asked, what it called and what it was told."""
        calls = json.dumps([call.arguments for call in episode.calls], ensure_ascii=False, default=str)
        results = tuple(tidy(result.content) for result in episode.all_results)
        return _judge(episode.answer, _wanted(episode.gt), _Seen(tidy(episode.question), results, tidy(calls)))

    def statement(self, gt: Any) -> str:
        """Return the gts, one a line."""
        return "\n".join(one.text for one in _wanted(gt))

    def attacks(self, gt: Any) -> Iterator[tuple[str, Any]]:
        """Yield the attacks of each gt, with the others stated as they should be."""
        gts = [one.text for one in _wanted(gt)]
        for index, text in enumerate(gts):
            others = [*gts[:index], *gts[index + 1 :]]
            for kind, attack in text_attacks(text):
                yield kind, "\n".join([attack, *others])


def _wanted(gt: Any) -> list[_Gt]:
    texts = list(gt) if isinstance(gt, list | tuple) else [gt]
    for text in texts:
        if isinstance(text, bool) or not isinstance(text, str | int | float | Decimal) or not str(text).strip(_OUTER):
            raise ValueError(f"gt must be a text, a number or a list of them, none of them empty, got {gt!r}")
    if not texts:
        raise ValueError("gt must hold at least one text, got an empty list")
    return [_Gt(tidy(str(text))) for text in texts]


def _judge(answer: str, gts: Sequence[_Gt], seen: _Seen) -> Verdict:
    if len(answer) > _MAX_CHARS:
        return Verdict.unparsed(f"longer than {_MAX_CHARS} characters")
    text = tidy(answer)
    if len(gts) == 1 and gts[0].is_all_of(text):
        return Verdict.of(True, "nothing but the gt")
    text = without(text, seen.copies(gts))
    fault = _fault(text, gts, seen)
    if fault:
        return Verdict.unparsed(fault)
    clauses, listed = Clauses(text), numbers(text)
    found = [gt for gt in gts if _states(gt, clauses, listed, gts, seen)]
    detail = f"{len(found)} of {len(gts)} stated"
    return Verdict.of(True, detail) if len(found) == len(gts) else Verdict("wrong", len(found) / len(gts), detail)


def _fault(text: str, gts: Sequence[_Gt], seen: _Seen) -> str:
    """Return what is wrong with the answer as a whole, or ""."""
    if not text.strip(_OUTER):
        return "nothing is said, or only copied"
    if _CALL.search(text):
        return "a call is no answer"
    marked = statements(text)
    if marked is None or any(not any(gt.mentions(tidy(stated)) for gt in gts) for _, _, stated in marked):
        return "something else is marked as the answer"
    used = [m for m in numbers(text) if not any(gt.is_number(m) for gt in gts)]
    if not used:
        return ""
    given, learned = (
        {m.number for part in parts for m in numbers(part)}
        for parts in ([seen.question, *(gt.text for gt in gts)], [seen.calls, *seen.results])
    )
    beyond = {m.number for m in used} - given
    if beyond - learned:
        return f"the number {min(beyond - learned, key=str)} comes from nowhere"
    return "too many numbers of calls and results" if len(beyond) > 2 * len(gts) + 2 else ""


def _states(gt: _Gt, clauses: Clauses, listed: Sequence[Mention], gts: Sequence[_Gt], seen: _Seen) -> bool:
    """Tell whether a gt is stated: some mention says it as a fact, and none casts doubt on it."""
    mentions = gt.mentions(clauses.text)
    if len(mentions) > _MAX_MENTIONS or any(_doubtful(clauses, mention) for mention in mentions):
        return False
    strange = [m for m in listed if not any(one.is_number(m) for one in gts)] if gt.number is not None else []
    return any(
        not _copied(clauses, mention, seen)
        and not (_operand(clauses.text, mention) or _beside(clauses.text, mention, strange))
        if gt.number is not None
        else not _copied(clauses, mention, seen) and not _in_a_dump(clauses, mention, gts, seen)
        for mention in mentions
    )


def _doubtful(clauses: Clauses, mention: Mention) -> bool:
    before, after, sign, following = clauses.around(mention, _REACH)
    if DOUBT.search(before) or DOUBT.search(after) or _ASKS.search(sign) or _ASKS.search(after):
        return True
    return _TAKEN_BACK.match(following) is not None or (sign == "," and _SAID_OF_IT.match(following) is not None)


def _copied(clauses: Clauses, mention: Mention, seen: _Seen) -> bool:
    """Tell whether the clause is a piece of the question, and more than the gt alone."""
    before, after, _, _ = clauses.around(mention, _REACH)
    if not re.search(r"\w{2}|[\u2e80-\u9fff]", before + " " + after):
        return False
    clause = "".join((before + clauses.text[mention.start : mention.end] + after).casefold().split())
    return clause in "".join(seen.question.casefold().split())


def _operand(text: str, mention: Mention) -> bool:
    """Tell whether a number stands in a computation, not as its result."""
    before = text[max(0, mention.start - 8) : mention.start]
    return bool(_OPERATOR_AFTER.match(text, mention.end) or _OPERATOR_BEFORE.search(before))


def _beside(text: str, mention: Mention, strange: Sequence[Mention]) -> bool:
    """Tell whether a number of the same unit that is no gt stands next to this one, as in a list of guesses."""
    for other in strange:
        first, second = (other, mention) if other.start < mention.start else (mention, other)
        near = second.start - first.end <= 16 and first.unit == second.unit
        if near and _SEPARATORS.fullmatch(text[first.end : second.start]):
            return True
    return False


def _in_a_dump(clauses: Clauses, mention: Mention, gts: Sequence[_Gt], seen: _Seen) -> bool:
    """Tell whether a phrase stands among words that no sentence holds together: a list, or words in a row."""
    text = clauses.text
    before, after, _, _ = clauses.around(mention, _REACH)
    said = before.rpartition(":")[2] + " " + after.partition(":")[0]
    loose = [word for word in said.split() if _strange(word, gts, seen)]
    if len(loose) > 1 and not _GRAMMAR.search(said):
        return True
    left = _ITEM_ENDS.split(text[max(0, mention.start - _REACH) : mention.start].replace(":", ","))
    right = _ITEM_ENDS.split(text[mention.end : mention.end + _REACH].replace(":", ","))
    starts, ends = not left[-1].strip(_OUTER), not right[0].strip(_OUTER)
    strangers = [_stranger(left[:-1][::-1], gts, seen) if starts else 0, _stranger(right[1:], gts, seen) if ends else 0]
    return sum(strangers) >= 1 if starts and ends else max(strangers) >= 2


def _stranger(items: Sequence[str], gts: Sequence[_Gt], seen: _Seen) -> int:
    """Count the items next to the gt of one to three words that nobody gave, up to the first that is no bare item."""
    count = 0
    for item in items:
        bare = item.strip(_OUTER)
        if not bare:
            continue
        # numbers have their own rule
        if len(bare.split()) > 3 or re.search(r"\d", bare) or _GRAMMAR.search(bare):
            break
        count += _strange(bare, gts, seen)
    return count


def _strange(words_: str, gts: Sequence[_Gt], seen: _Seen) -> bool:
    """Tell whether words are neither a gt nor a greeting nor in the question or a result."""
    bare = words_.strip(_OUTER).casefold()
    if not bare or _GREETING.fullmatch(bare) or any(gt.mentions(bare) for gt in gts):
        return False
    return not any(bare in source.casefold() for source in (seen.question, *seen.results))
