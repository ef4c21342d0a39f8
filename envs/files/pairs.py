"""Preference pairs and labelled answers: where the prompt ends and the replies begin."""

from __future__ import annotations

from os.path import commonprefix
from typing import Any

from .conversation import HH_START, Talk
from .detection import CONVERSATION_KEYS
from .records import Faults, Record, shown
from .source import Source


def read_pair(s: Source) -> Record:
    """Read a pair: TRL's with explicit and implicit prompts, MiniMind's, LLaMA-Factory's and HH-RLHF's."""
    key = s.key("prompt", "conversations", "messages", "question")
    if key is None and all(_is_plain(s.value.get(name)) for name in ("chosen", "rejected")):
        return _text_pair(s)
    prompt = s.opening(key) if key else Talk()
    if key is None:
        s.open_with_columns(prompt)
    sides = [_after(prompt, s.talk(name, "assistant"), s.faults) for name in ("chosen", "rejected")]
    for side in sides:
        s.pair(side)
    place = len(prompt.messages)
    if not s.faults:
        place = _fork(sides[0], sides[1], place, s.faults)
    return s.record(sides[0][:place], (s.reply("chosen", sides[0][place:]), s.reply("rejected", sides[1][place:])))


def _is_plain(side: Any) -> bool:
    return isinstance(side, str) and not side.startswith(HH_START)


def _text_pair(s: Source) -> Record:
    """Two texts without a prompt: what they begin with, up to a space, is the prompt (as TRL has it)."""
    sides = {name: s.take(name) for name in ("chosen", "rejected")}
    shared = commonprefix(list(sides.values()))  # noqa: RUF071 - of texts, letter by letter
    place = shared.rfind(" ") + 1
    if not shared[:place].strip():
        s.faults.add("", "the key 'prompt', or texts that begin alike", "texts that do not", "prompts differ")
    prompt = Talk([{"role": "user", "content": shared[:place].strip()}], [""])
    chosen, rejected = (Talk([{"role": "assistant", "content": text[place:]}], [name]) for name, text in sides.items())
    return s.record(prompt, (s.reply("chosen", chosen), s.reply("rejected", rejected)))


def _after(prompt: Talk, side: Talk, faults: Faults) -> Talk:
    """Return the whole conversation of a side, which may repeat the prompt."""
    if not prompt.messages or side.messages[: len(prompt.messages)] == prompt.messages:
        return side
    opened = any(message["role"] != "system" for message in prompt.messages)
    if opened and side.messages and side.messages[0]["role"] != "assistant":
        came = f"another message of the {side.messages[0]['role']}"
        faults.add(side.paths[0], "the prompt again, or an assistant message", came, "prompts differ")
    return prompt + side


def _fork(chosen: Talk, rejected: Talk, start: int, faults: Faults) -> int:
    """Return where the replies begin: at the first message that differs, or the last answer; not before `start`."""
    both = list(zip(chosen.messages, rejected.messages, strict=False))
    place = next((index for index, (one, other) in enumerate(both) if one != other), len(both))
    if place < len(both) and any(message["role"] != "assistant" for message in both[place]):
        wanted, came = "the same message as in chosen, or an answer", f"another one of the {both[place][1]['role']}"
        faults.add(rejected.paths[place], wanted, came, "prompts differ")
        return start
    place = min(place, len(both) - 1)
    while place >= start and any(message["role"] != "assistant" for message in both[place]):
        place -= 1
    if place < start:
        faults.add("rejected", "an assistant message in chosen and rejected", "none", "roles")
    return max(place, start)


def read_labelled(s: Source) -> Record:
    """Read an unpaired record: TRL's KTO form, or a conversation whose last answer is labelled."""
    label = s.take("label")
    if not isinstance(label, bool):
        s.faults.add("label", "true or false", shown(label) if "label" in s.value else "no such key")
    if s.key("completion"):
        prompt = s.opening("prompt", *CONVERSATION_KEYS)
        talk = _after(prompt, s.talk("completion", "assistant"), s.faults)
        place = len(prompt.messages)
    else:
        talk = s.opening(*CONVERSATION_KEYS)
        place = talk.answer_place()
    s.pair(talk)
    if not s.faults and place == len(talk.messages):
        s.faults.add("", "an answer after the prompt", "none", "roles")
    return s.record(talk[:place], (s.reply("good" if label else "bad", talk[place:]),))
