"""How a record of each kind is read; what is wrong with it comes as faults, all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from ...tools.errors import DataError
from .answers import GT_KEYS, read_gt, read_gt_list
from .conversation import Talk, is_empty, read_talk
from .detection import CONVERSATION_KEYS, PLACEHOLDER, PROMPT_KEYS, named_kind
from .pairs import read_labelled, read_pair
from .reading import read_rows
from .records import Fault, Faults, Kind, Label, Record, Reply, Row, shown
from .source import Source
from .toolsets import read_tools


def read_records(path: str | Path, kind: Kind | Literal["auto"] = "auto") -> Iterator[Record]:
    """Yield the records of a file, one at a time.

    Raises:
        DataError: At the first record that is wrong: file, line, path in the record, what was wanted, what came.
    """
    known = named_kind(path, kind)
    for row in read_rows(path):
        yield record_or_raise(path, row, known)


def record_or_raise(path: str | Path, row: Row, kind: Kind) -> Record:
    """Return the record of a row. Raises DataError."""
    record = parse_record(row, kind)
    if isinstance(record, Record):
        return record
    more = f" (and {len(record) - 1} more)" if len(record) > 1 else ""
    raise DataError(f"{path}, {record[0]}{more}. `gymtune validate {path}` lists all that is wrong.")


def parse_record(row: Row, kind: Kind) -> Record | list[Fault]:
    """Return the record of that kind which a row holds, or all that is wrong with it."""
    faults = Faults(row.line)
    if row.value is None:
        faults.add(row.path, "a JSON object", row.error or "nothing", "json")
        return faults
    record = _READERS[kind](Source(kind, row.line, row.value, faults))
    return list(faults) or record


def _split_asked(s: Source, talk: Talk) -> tuple[Talk, tuple[Reply, ...]]:
    """Return the prompt of a conversation that a policy is to go on with, and the answer on file, if any.

    A last assistant message that is empty, or MiniMind's placeholder, is dropped.
    """
    s.pair(talk)
    if not talk.messages or talk.messages[-1]["role"] != "assistant":
        return talk, ()
    if is_empty(talk.messages[-1]) or talk.messages[-1]["content"].strip() == PLACEHOLDER:
        return talk[:-1], ()
    place = talk.answer_place()
    return talk[:place], (s.reply("reference", talk[place:]),)


def _prompts(s: Source) -> Record:
    """MiniMind's RLAIF file, TRL's prompts."""
    return s.record(*_split_asked(s, s.opening("prompt", "conversations", "messages", "question", "problem")))


def _agentic(s: Source) -> Record:
    """MiniMind's `agent_rl.jsonl`: a conversation, tools on its system message or beside, a list `gt`.

    Beside it may stand `gold`: the assistant messages of an episode that scores full. MiniMind's reader passes it by.
    """
    talk = s.opening("conversations", "messages", "prompt")
    if s.key("gt") is None:
        s.faults.add("gt", "a list", "null" if "gt" in s.value else "no such key", "gt")
    gt = read_gt_list(s.take("gt") or [], "gt", s.faults)
    prompt, replies = _split_asked(s, talk)
    if s.key("gold") is not None:
        gold = s.talk("gold", "assistant")
        s.pair(prompt + gold)
        replies = (s.reply("reference", gold),)
    return s.record(prompt, replies, gt)


def _verifiable(s: Source) -> Record:
    """GSM8K, MATH, verl, SkyRL, train-llm-from-scratch: a question and its checkable answer."""
    prompt, replies = _split_asked(s, s.opening(*PROMPT_KEYS))
    key = s.key(*GT_KEYS)
    gt: Any = None
    worked: str | None = None
    if key is None:
        came = next((f"{name} is null" for name in GT_KEYS if name in s.value), shown(s.value))
        s.faults.add("", f"one of the keys {', '.join(GT_KEYS)}", came, "gt")
    else:
        gt, worked = read_gt(s.take(key), key, s.faults)
    if worked is None and key != "solution" and isinstance(s.value.get("solution"), str):
        key, worked = "solution", s.take("solution")
    if worked is not None and not replies:
        replies = (s.reply("reference", Talk([{"role": "assistant", "content": worked}], [str(key)])),)
    return s.record(prompt, replies, gt)


def _sft(s: Source) -> Record:
    """A conversation to learn from, or a prompt and its completion."""
    if s.key(*CONVERSATION_KEYS) is None and s.key("completion"):
        talk = s.opening("prompt") + s.talk("completion", "assistant")
    else:
        talk = s.opening(*CONVERSATION_KEYS)
    s.pair(talk)
    roles = [message["role"] for message in talk.messages]
    if "assistant" not in roles and not s.faults:
        s.faults.add(s.key(*CONVERSATION_KEYS) or "completion", "an assistant message", "none", "roles")
    place = roles.index("assistant") if "assistant" in roles else len(roles)
    return s.record(talk[:place], (s.reply("reference", talk[place:]),))


def _bfcl(s: Source) -> Record:
    """BFCL's single-turn files, with the answer's `ground_truth` where someone put it beside. Names keep their dots."""
    turns = s.take("question")
    if not isinstance(turns, list) or len(turns) != 1 or not isinstance(turns[0], list):
        s.faults.add("question", "a list of one turn, itself a list of messages", shown(turns))
        turns = [[]]
    talk = read_talk(turns[0], "question[0]", s.faults, "user")
    s.tools = read_tools(s.take("function"), "function", s.faults, bfcl=True)
    s.pair(talk)
    return s.record(talk, gt=s.take("ground_truth"))


def _trajectories(s: Source) -> Record:
    """Our own. Only what an episode says is read here; `gymtune audit` proves the tokens."""
    if s.value.get("schema_version") != 1:
        s.faults.add("schema_version", "1", shown(s.value.get("schema_version")))
    lengths = {name: s.value.get(name) for name in ("tokens", "response_mask", "logprobs")}
    for name, numbers in lengths.items():
        if not isinstance(numbers, list):
            s.faults.add(name, "a list", shown(numbers))
        elif isinstance(lengths["tokens"], list) and len(numbers) != len(lengths["tokens"]):
            s.faults.add(name, f"as many as tokens: {len(lengths['tokens'])}", str(len(numbers)))
    talk = s.opening("messages")  # its ids are left alone: the result of markup that is no call answers none
    roles = [message["role"] for message in talk.messages]
    place = s.take("prompt_messages")
    if not isinstance(place, int) or not 0 <= place <= len(roles):
        place = roles.index("assistant") if "assistant" in roles else len(roles)
    success = s.value.get("success")
    label: Label = "reference" if not isinstance(success, bool) else "good" if success else "bad"
    replies = (Reply(label, tuple(talk.messages[place:])),) if place < len(roles) else ()
    return s.record(talk[:place], replies, s.take("gt"))


_READERS: dict[Kind, Callable[[Source], Record]] = {
    "preference": read_pair,
    "prompts": _prompts,
    "agentic": _agentic,
    "verifiable": _verifiable,
    "unpaired": read_labelled,
    "sft": _sft,
    "bfcl": _bfcl,
    "trajectories": _trajectories,
}
