"""The checker of preference pairs: the text on file that people preferred is right, the other one wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from .checker import Checker, Verdict


class PreferenceChecker(Checker):
    """Right for the chosen text, wrong for the rejected one, `unparsed` for a text that nobody has judged.

    `gt` is `{"chosen": [texts], "rejected": [texts]}`; white space at the ends does not count.
    """

    positives: ClassVar[Sequence[tuple[Any, Any]]] = (
        ("Good morning!", {"chosen": ["Good morning!"], "rejected": ["What?"]}),
        (" yes\n", {"chosen": ["yes"], "rejected": []}),
        ("b", {"chosen": ["a", "b"], "rejected": ["c"]}),
    )
    negatives: ClassVar[Sequence[tuple[Any, Any]]] = (
        ("", {"chosen": ["yes"], "rejected": ["no"]}),
        ("no", {"chosen": ["yes"], "rejected": ["no"]}),
        ("yes no", {"chosen": ["yes"], "rejected": ["no"]}),
        ("yes yes", {"chosen": ["yes"], "rejected": ["no"]}),
        ("maybe", {"chosen": ["yes"], "rejected": ["no"]}),
    )

    def verdict(self, answer: str, gt: Any) -> Verdict:
        """Judge `answer`. Raises ValueError when `gt` has no such lists (-> `broken`)."""
        if not isinstance(gt, dict) or not {"chosen", "rejected"} <= gt.keys():
            raise ValueError(f'gt must be {{"chosen": [...], "rejected": [...]}}, got {gt!r}')
        text = answer.strip()
        if text in (chosen.strip() for chosen in gt["chosen"]):
            return Verdict.of(True, "the chosen text")
        if text in (rejected.strip() for rejected in gt["rejected"]):
            return Verdict.of(False, "the rejected text")
        return Verdict.unparsed("a text that nobody has judged; a reward model can score it")

    def attacks(self, gt: Any) -> Iterator[tuple[str, Any]]:
        """Yield what holds the chosen text and is not it, and the rejected texts."""
        chosen = gt["chosen"][0] if gt["chosen"] else ""
        yield "empty", ""
        yield "blank", " \n"
        yield from (("the rejected text", text) for text in gt["rejected"])
        yield "superstring, after", f"{chosen} x"
        yield "superstring, before", f"x {chosen}"
        yield "twice", f"{chosen} {chosen}"
        yield "both", " ".join([*gt["chosen"], *gt["rejected"], "x"])
        yield "negation", f"not {chosen}"
