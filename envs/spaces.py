"""Spaces of text and of chat messages.

gymnasium's own `Text` needs a finite alphabet and refuses spaces, punctuation and Chinese by default; a policy writes
anything. These two accept any text, compare equal when they mean the same, and can be sampled for `check_env`.
"""

from __future__ import annotations

from typing import Any, get_args

import gymnasium
import numpy as np

from ..tools.messages import Message, Role

_SAMPLE_ALPHABET = np.array(list("abcdefghijklmnopqrstuvwxyz 0123456789.,+-*/?\u4e2d\u6587"))
_SAMPLE_LENGTH = 40  # characters at most in a sampled text
_ROLES = frozenset(get_args(Role))


def _random_text(rng: np.random.Generator) -> str:
    length = int(rng.integers(1, _SAMPLE_LENGTH))
    return "".join(rng.choice(_SAMPLE_ALPHABET, size=length))


class TextSpace(gymnasium.Space[str]):
    """Any `str`: the space of actions."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return a random text; masks mean nothing here."""
        return _random_text(self.np_random)

    def contains(self, x: Any) -> bool:
        """Accept any `str`."""
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no array form."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)

    def __repr__(self) -> str:
        return "TextSpace()"


class MessagesSpace(gymnasium.Space[tuple[Message, ...]]):
    """Tuples of chat messages, the empty one included: the space of observations."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        """Return one random user message."""
        return ({"role": "user", "content": _random_text(self.np_random)},)

    def contains(self, x: Any) -> bool:
        """Accept tuples (or lists) of dicts with a known role and a `str` content."""
        return isinstance(x, tuple | list) and all(
            isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str)
            for message in x
        )

    @property
    def is_np_flattenable(self) -> bool:
        """Messages have no array form."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace)

    def __hash__(self) -> int:
        return hash(MessagesSpace)

    def __repr__(self) -> str:
        return "MessagesSpace()"
