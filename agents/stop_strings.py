"""Stop strings: they end a turn where its text contains one, wherever the tokens' borders lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BYTES = 4  # of a character, so at most as many tokens


def contains_stop(
    tokens: Sequence[int], start: int, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> bool:
    """Tell whether the text of `tokens[start:]` contains a stop string, when it did not without the last token.

    Only the end of the text is decoded, so that the cost of a token does not grow with the turn.
    """
    enough = max(map(len, stop)) + 1  # the window's first character may be cut
    width = enough * _BYTES
    first = max(start, len(tokens) - width)
    text = decode(tokens[first:])
    while len(text) < enough and first > start:  # tokens without text
        width *= 2
        first = max(start, len(tokens) - width)
        text = decode(tokens[first:])
    return any(string in text for string in stop)
