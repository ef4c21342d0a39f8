"""The kind of a record, and of a file, told by keys."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ...tools.errors import ConfigError, DataError, closest
from .answers import GT_KEYS
from .reading import read_rows
from .records import KINDS, Kind, shown

_LOOKED_AT = 20  # rows by which the kind of a file is told
ALIKE = {"sft", "prompts"}  # a record of one may look like one of the other: they differ in the last answer only
PLACEHOLDER = "\u65e0"  # "none": what MiniMind's RLAIF data put where the policy is to answer
CONVERSATION_KEYS = ("conversations", "messages")
PROMPT_KEYS = ("prompt", "question", "problem", "messages", "conversations")


def detect(value: dict[str, Any]) -> Kind | None:
    """Return the kind that the keys of a record tell, or None."""
    has = {key for key, item in value.items() if item is not None}
    said = next((value[key] for key in CONVERSATION_KEYS if key in has), None)
    if {"trajectory_id", "messages"} <= has:
        return "trajectories"
    if {"question", "function"} <= has:
        return "bfcl"
    if {"chosen", "rejected"} <= has:
        return "preference"
    if "label" in has and ("completion" in has or (said is not None and isinstance(value["label"], bool))):
        return "unpaired"
    if "gt" in has and ("conversations" in has or "tools" in has or isinstance(value["gt"], list)):
        return "agentic"
    if has & set(GT_KEYS) and has & set(PROMPT_KEYS):
        return "verifiable"
    if ("completion" in has and "prompt" in has) or _is_answered(said):
        return "sft"
    return "prompts" if has & set(PROMPT_KEYS) else None


def _is_answered(said: Any) -> bool:
    """Whether a conversation ends with an assistant that says something."""
    last = said[-1] if isinstance(said, list) and said else None
    if not isinstance(last, dict):
        return False
    text = last.get("content") or last.get("value")
    return (last.get("role") or last.get("from")) in ("assistant", "gpt", "function_call") and bool(
        last.get("tool_calls") or (text and text != PLACEHOLDER)
    )


def detect_file(path: str | Path) -> Kind:
    """Return the kind of a file, told by its first 20 rows.

    Raises:
        DataError: None of them tells, or two tell different kinds.
    """
    kinds = _first_kinds(path)
    for line, kind in kinds[1:]:
        if kind != kinds[0][1]:
            raise DataError(
                f"{path}, line {line}: a record of the kind {kind}, but line {kinds[0][0]} is {kinds[0][1]}. "
                "Put one kind into a file, or name the kind."
            )
    return kinds[0][1]


def main_kind(path: str | Path) -> Kind:
    """Return the kind that most of the first 20 rows tell, of SFT and prompts the first. Raises DataError if none does.

    An SFT record that lost its answer looks like a prompt.
    """
    kinds = [kind for _, kind in _first_kinds(path)]
    first = next((kind for kind in kinds if kind in ALIKE), None)
    return Counter(first if first and kind in ALIKE else kind for kind in kinds).most_common(1)[0][0]


def _first_kinds(path: str | Path) -> list[tuple[int, Kind]]:
    rows = list(islice(read_rows(path), _LOOKED_AT))
    kinds = [(row.line, kind) for row in rows if row.value is not None and (kind := detect(row.value))]
    if not kinds:
        broken = next((f" (line {row.line}: {row.error})" for row in rows if row.error), "")
        seen = next((shown(row.value) for row in rows if row.value is not None), f"no record that can be read{broken}")
        raise DataError(f"{path}: cannot tell the kind of this file by {seen}. Name it: one of {', '.join(KINDS)}.")
    return kinds


def kind_for(path: str | Path, *read: Kind, reader: str) -> Kind:
    """Return the kind of a file that `reader` can use. Raises DataError for another one."""
    kind = detect_file(path)
    if kind not in read:
        raise DataError(f"{path} is of the kind {kind}; {reader} reads {' and '.join(read)}")
    return kind


def named_kind(path: str | Path, kind: Kind | Literal["auto"]) -> Kind:
    """Return `kind`, or for `auto` what `detect_file` says. Raises DataError, and ConfigError for an unknown kind."""
    if kind == "auto":
        return detect_file(path)
    if kind not in KINDS:
        raise ConfigError(f"no kind of file is named {kind!r}.{closest(str(kind), [*KINDS, 'auto'])}")
    return kind
