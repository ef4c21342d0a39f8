"""Shaping: components that pay for form, each pure and visible in the metrics. None of them looks at what is right.

The numbers are MiniMind's (`calculate_rewards` of its GRPO and agent trainers). All fire when the episode ends; those
that read the last turn see it as the one parser of calls and thinking read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..tools.chat_format import ChatFormat, ParsedTurn
from ..tools.formats.hermes import CLOSE, OPEN
from ..tools.outcomes import Outcome
from .components import Component
from .episode import Episode

_TOKEN = re.compile(r"\w+|[^\w\s]")
_THINKING_CHARS = (20, 300)
_THINK_CLOSE = ChatFormat.think_close
_NOT_RUN = (Outcome.parse_error, Outcome.unknown_tool, Outcome.schema_violation)


def repetition_penalty(text: str, n: int = 3, cap: float = 0.5) -> float:
    """Return 2 x `cap` x the share of `n`-grams of words and signs that came before, at most `cap` (MiniMind)."""
    tokens = _TOKEN.findall(text.lower())
    grams = len(tokens) - n + 1
    if grams < 1:
        return 0.0
    different = len(set(zip(*(tokens[i:] for i in range(n)), strict=False)))
    return min(cap, (grams - different) * cap * 2 / grams)


def length(low: int, high: int) -> Component:
    """Return `length`: +0.5 when the last text, thinking and all, has `low` to `high` characters, else -0.5."""

    def value(episode: Episode) -> float:
        return 0.5 if low <= len(_last_text(episode).strip()) <= high else -0.5

    return Component("length", "end", value)


def _last_text(episode: Episode) -> str:
    return episode.texts[-1] if episode.texts else ""


def _thinking_length(episode: Episode) -> float:
    reasoning = episode.turns[-1].reasoning if episode.turns else None
    if reasoning is None or _THINK_CLOSE not in _last_text(episode):
        return 0.0
    low, high = _THINKING_CHARS
    return 1.0 if low <= len(reasoning) <= high else -0.5


def _thinking_closed(episode: Episode) -> float:
    thought = bool(episode.turns) and episode.turns[-1].reasoning is not None
    closings = _last_text(episode).count(_THINK_CLOSE)
    if not thought and not closings:
        return 0.0
    return 0.25 if thought and closings == 1 else -0.25


def _unbalanced(turn: ParsedTurn) -> int:
    """Return by how much opening and closing tags of calls differ in number, thinking left out."""
    said = [turn.content, *(call.raw for call in turn.calls)]
    return abs(sum(text.count(OPEN) for text in said) - sum(text.count(CLOSE) for text in said))


def _call_count(episode: Episode) -> float:
    wanted = len(episode.gt) if isinstance(episode.gt, list | tuple) else int(episode.gt is not None)
    written = len(episode.calls)
    valid = sum(result.outcome not in _NOT_RUN for result in episode.all_results)
    gap = abs(valid - wanted) + max(0, written - valid)
    return -0.5 * gap if gap else 0.5


def _answer_tag(episode: Episode) -> float:
    before, opening, rest = episode.answer.partition("<answer>")
    inside, closing, after = rest.partition("</answer>")
    strays = any(tag in text for tag in ("<answer>", "</answer>") for text in (before, inside, after))
    return float(bool(opening and closing) and not strays)


#: +1 when the last turn's closed thinking has 20 to 300 characters, else -0.5; 0 without closed thinking.
thinking_length = Component("thinking_length", "end", _thinking_length)

#: +0.25 when the last turn's thinking has exactly one closing tag, else -0.25; 0 without thinking and tag.
thinking_closed = Component("thinking_closed", "end", _thinking_closed)

#: Minus `repetition_penalty` of the answer.
repetition = Component("repetition", "end", lambda episode: 0.0 - repetition_penalty(episode.answer))

#: -0.5 for each tag of `hermes` calls that lacks its other half, summed over the turns.
call_tags = Component("call_tags", "end", lambda episode: 0.0 - 0.5 * sum(map(_unbalanced, episode.turns)))

#: +0.5 when as many calls were run as `gt` has parts and no other was written, else -0.5 for each too many or too few.
call_count = Component("call_count", "end", _call_count)

#: 1 when the answer holds exactly one `<answer>...</answer>`, else 0.
answer_tag = Component("answer_tag", "end", _answer_tag)

#: Shaping by name; `length` as MiniMind's GRPO trainer has it.
SHAPING: Mapping[str, Component] = {
    component.name: component
    for component in (
        answer_tag,
        call_count,
        call_tags,
        length(20, 800),
        repetition,
        thinking_closed,
        thinking_length,
    )
}
