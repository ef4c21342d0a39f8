"""Finds a model family's chat format: by a call that its template writes, else by its tokenizer's special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from ..tools.chat_format import ChatFormat, chat_formats, get_chat_format

_SAID = "GymtuneProbe"
_NAME, _ARGUMENTS = "gymtune_probe", {"text": "two words", "number": 3}
_ID = "probe0001"  # nine letters and digits: Mistral's templates refuse another one


def probe_chat_format(tokenizer: Any, chat_template: Any) -> ChatFormat:
    """Return the registered format in which the template writes tool calls.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat_template: Its template as text; anything else stands for the tokenizer's own.

    Where the template writes no calls or in no format we know, a format of which the vocabulary holds a special token;
    else `hermes`.
    """
    function: dict[str, Any] = {"name": _NAME, "arguments": _ARGUMENTS}
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):  # a few templates want JSON text
        written = _written(tokenizer, chat_template, function | {"arguments": arguments})
        for chat_format in chat_formats():
            calls = [] if written is None else chat_format.parse(written).calls
            if [(call.name, call.arguments) for call in calls] == [(_NAME, _ARGUMENTS)]:
                return chat_format
    vocabulary = tokenizer.get_vocab()
    known = [found for found in chat_formats() if any(token in vocabulary for token in found.special_tokens)]
    return known[0] if known else get_chat_format("hermes")


def _written(tokenizer: Any, chat_template: Any, function: Mapping[str, Any]) -> str | None:
    """Return what the template writes in an assistant's turn with one call; None when it refuses such a turn.

    The turn's head and end are those of a turn of words.
    """
    call = {"id": _ID, "type": "function", "function": function}
    plain = _render(tokenizer, chat_template, {"content": _SAID})
    called = _render(tokenizer, chat_template, {"content": "", "tool_calls": [call]})
    if plain is None or called is None or _SAID not in plain:
        return None
    head, _, end = plain.rpartition(_SAID)
    text = called[_common(head, called) :]
    return text[: len(text) - _common(end[::-1], text[::-1])]


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with together."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _render(tokenizer: Any, chat_template: Any, turn: Mapping[str, Any]) -> str | None:
    from jinja2.exceptions import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}, {"role": "assistant", **turn}],
                chat_template=chat_template if isinstance(chat_template, str) else None,
                tokenize=False,
            )
        )
    except (TemplateError, TypeError):  # the template's own refusal, or its code met what it cannot take
        return None
