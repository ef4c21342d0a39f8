"""What a checker compares with: the `gt` of verifiable and agentic records, under the names that files give it."""

from __future__ import annotations

import re
from typing import Any

from ...rewards.numeric import parse_number
from .records import Faults, shown

#: Names of a verifiable answer, the surest first: `answer` and `solution` may hold the way to it as well.
GT_KEYS = ("gt", "ground_truth", "gold", "reward_model", "reward_spec", "answer", "solution")
_NESTED = ("reward_model", "reward_spec")  # verl's and SkyRL's: {"ground_truth": ...}
_WHOLE = 1e16  # floats below are told exactly as whole numbers


def read_gt(value: Any, path: str, faults: Faults) -> tuple[Any, str | None]:
    """Return `gt` and the worked answer that it was cut from, if any.

    Of "... #### 1,234" (GSM8K) that is "1234", of text whose last part is `\\boxed{...}` (MATH) what the box holds.
    Numbers become text, 59.0 becomes "59"; lists, objects and truth values stay. Nothing (null, "", nothing after ####)
    is noted.
    """
    if path in _NESTED:
        value = value.get("ground_truth") if isinstance(value, dict) else None
        path += ".ground_truth"
    worked = None
    if isinstance(value, str) and path in ("answer", "solution"):
        cut = _cut(value)
        worked, value = (None, value) if cut is None else (value, cut)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = number_text(value)
    if isinstance(value, str):
        value = value.strip()
    if value is None or (isinstance(value, str | list | dict) and not value):
        faults.add(path, "a ground truth", "nothing" if worked else shown(value), "gt")
    return value, worked


def number_text(number: float) -> str:
    """Return 59.0 as "59", 0.5 as "0.5"."""
    whole = isinstance(number, int) or (number.is_integer() and abs(number) < _WHOLE)
    return str(int(number)) if whole else repr(number)


def _cut(text: str) -> str | None:
    """Return the final answer that a worked one ends with, or None where it marks none."""
    _, mark, final = text.rpartition("####")
    if mark:
        bare = final.strip().replace(",", "")
        return bare if parse_number(bare) is not None else final.strip()
    return boxed(text)


def boxed(text: str) -> str | None:
    """Return what the last `\\boxed{...}` of `text` holds, or None. Linear time."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()].strip()
    return None


def read_gt_list(value: Any, path: str, faults: Faults) -> list[Any]:
    """Return an agentic `gt`: a list of texts, finite numbers or objects (calls). What is wrong is noted."""
    if not isinstance(value, list):
        faults.add(path, "a list", shown(value), "gt")
        return []
    for index, item in enumerate(value):
        is_text = isinstance(item, str) and item.strip()
        if not is_text and (isinstance(item, str | bool) or not isinstance(item, int | float | dict)):
            faults.add(f"{path}[{index}]", "text that is not empty, a number or an object", shown(item), "gt")
    return value
