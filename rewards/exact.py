"""The exact checker: one stated answer, the same text as `gt` but for white space, case and outer punctuation."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from .attacks import text_attacks
from .checker import Checker, Verdict
from .stated import stated_answer, unwrap

_OUTER = " \t\n.,;:!?。，！？；：'\"`“”‘’«»「」*"
_MAX_CHARS = 100_000  # of a bare answer; a longer one is compared with nothing
_SHOWN = 40  # characters of an answer in a verdict's detail


class ExactChecker(Checker):
    """Right when the answer states exactly one text and it equals `gt`, or one of a list of acceptable texts.

    White space, Unicode form (NFKC) and outer quotes and punctuation do not count, nor does case with `casefold`.
    """

    positives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("Paris", "Paris"),
        (' "paris".\n', "Paris"),
        ("The answer is New  York.", "New York"),
        ("<answer>Hello World</answer>", "hello world"),
        (r"Therefore \boxed{Paris}.", "Paris"),
        ("答案是北京。", "北京"),
        ("ｆｉｖｅ", "five"),
        ("NYC", ["New York", "NYC"]),
        ("42", 42),
    )
    negatives: ClassVar[Sequence[tuple[str, Any]]] = (
        ("", "Paris"),
        ("Paris, France", "Paris"),
        ("Paris or London", "Paris"),
        ("not Paris", "Paris"),
        ("The answer is not Paris", "Paris"),
        ("I do not think the answer is Paris.", "Paris"),
        ("The answer is Paris. The answer is London.", "Paris"),
        ("New York, NYC", ["New York", "NYC"]),
        ("NewYork", "New York"),
        ("421", 42),
    )

    def __init__(self, casefold: bool = True) -> None:
        self.casefold = casefold

    def verdict(self, answer: str, gt: Any) -> Verdict:
        """Judge `answer`; `gt` is a text, a number, or a list of them. Raises ValueError otherwise (-> `broken`)."""
        wanted = {self._key(text) for text in _acceptable(gt)}
        bare = len(answer) <= _MAX_CHARS and self._key(answer) in wanted
        found = answer if bare else stated_answer(answer)
        if found is None:
            return Verdict.unparsed("no single answer is stated")
        return Verdict.of(bare or self._key(found) in wanted, f"stated {found:.{_SHOWN}}")

    def statement(self, gt: Any) -> str:
        """Return the first acceptable text."""
        return _acceptable(gt)[0]

    def attacks(self, gt: Any) -> Iterator[tuple[str, Any]]:
        """Yield the attacks of every acceptable text, and all of them at once where there are several."""
        texts = _acceptable(gt)
        for text in texts:
            yield from text_attacks(text)
        if len(texts) > 1:
            yield "every acceptable text", ", ".join(texts)

    def _key(self, text: str) -> str:
        text = unicodedata.normalize("NFKC", unwrap(text))
        text = " ".join(text.strip(_OUTER).split())
        return text.casefold() if self.casefold else text


def _acceptable(gt: Any) -> list[str]:
    texts = list(gt) if isinstance(gt, list | tuple) else [gt]
    for text in texts:
        if isinstance(text, bool) or not isinstance(text, str | int | float) or not str(text).strip(_OUTER):
            raise ValueError(f"gt must be a text or a list of texts, none of them empty, got {gt!r}")
    if not texts:
        raise ValueError("gt must hold at least one text, got an empty list")
    return [str(text) for text in texts]
