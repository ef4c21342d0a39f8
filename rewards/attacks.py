"""Attacks: texts that hold the right answer and do not state it. A checker that takes one of them can be fooled."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LETTERS = "ABCDEFGHIJ"
_WORDS = ("London", "rain", "Mercury", "seven", "green", "velocity", "Hello Moon", "Amazon", "Bach")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def candidates(right: str) -> list[str]:
    """Return nine wrong answers of the same sort as `right`: numbers, letters or words."""
    if _NUMBER.fullmatch(right):
        return [f"{right}{d}" if "." not in right else f"{right}e{d}" for d in "123456789"]
    if len(right) == 1 and right in _LETTERS:
        return [letter for letter in _LETTERS if letter != right]
    return [word for word in _WORDS if word.casefold() != right.casefold()]


def text_attacks(right: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) for the answer that `right` states: none of these texts may be taken for it."""
    yield from _superstrings(right)
    yield from _lists(right)
    yield from _doubts(right)
    yield from _contradictions(right)
    yield from _echoes(right)


def _superstrings(right: str) -> Iterator[tuple[str, str]]:
    yield "empty", ""
    yield "blank", " \n\t"
    yield "superstring, after", f"{right}e7" if "." in right else f"{right}7"
    yield "superstring, before", f"7{right.lstrip('-')}"
    yield "superstring, in a sentence", f"The answer is {right}7x."


def _lists(right: str) -> Iterator[tuple[str, str]]:
    others = candidates(right)
    dump = [*others, right]
    yield "every candidate", ", ".join(dump)
    yield "every candidate, right one first", ", ".join([right, *others])
    yield "every candidate, by line", "\n".join(dump)
    yield "every candidate, numbered", "\n".join(f"{i}. {x}" for i, x in enumerate(dump, 1))
    yield "every candidate, marked", f"The answer is {', '.join(dump)}"
    yield "every candidate, each marked", " ".join(f"The answer is {x}." for x in dump)
    yield "every candidate, in a box", rf"\boxed{{{', '.join(dump)}}}"
    yield "every candidate, tagged", f"<answer>{', '.join(dump)}</answer>"
    yield "every candidate, each tagged", "".join(f"<answer>{x}</answer>" for x in dump)
    yield "prefix", f"{right} {' '.join(others)}"
    yield "number dump", " ".join(map(str, range(-20, 2000))) + f" {right}"


def _doubts(right: str) -> Iterator[tuple[str, str]]:
    other = candidates(right)[0]
    yield "negation", f"The answer is not {right}."
    yield "negation, short", f"not {right}"
    yield "negation, tagged", f"<answer>not {right}</answer>"
    yield "negation of the statement", f"I do not think the answer is {right}"
    yield "negation of a statement", f"This is wrong: {right} is not it"
    yield "negation, after", f"The answer is {right}, is what a fool would say."
    yield "negation, in Chinese", f"答案不是{right}"
    yield "hedge", f"{right} or {other}"
    yield "hedge, the other way", f"either {other} or {right}"
    yield "hedge after a comma", f"The answer is {right}, or {other}."
    yield "hedge, marked", f"The answer is {right} or {other}"
    yield "hedge in words", f"The answer is {right} or something else"
    yield "hedge, perhaps", f"Perhaps {right}, perhaps {other}."
    yield "hedge, in Chinese", f"{right}或者{other}"


def _contradictions(right: str) -> Iterator[tuple[str, str]]:
    other = candidates(right)[0]
    yield "two answers", f"The answer is {other}. The answer is {right}."
    yield "two answers, right one first", f"The answer is {right}. The answer is {other}."
    yield "two answers, joined", f"{right} and {other}"
    yield "two boxes", rf"\boxed{{{right}}} \boxed{{{other}}}"
    yield "two boxes, right one last", rf"\boxed{{{other}}} \boxed{{{right}}}"
    yield "two tags", f"<answer>{right}</answer><answer>{other}</answer>"


def _echoes(right: str) -> Iterator[tuple[str, str]]:
    yield "echo of the question", f"What gives {right}? Answer with the number."
    yield "echo of the question, then of a result", f"What is {right} + 0? {right}"
    yield "echo of a tool result and more", f"{right} calculator {candidates(right)[0]}"
    yield "echo of a call", f'{{"name": "calculator", "arguments": {{"expression": "{right}"}}}}'
