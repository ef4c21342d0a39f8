"""What goes over the wire, as pure functions: the body of a request, and what an answer says.

Every sampling field is sent, for a server may have preferences of its own that fill what a request leaves out. Ids and
log-probs come from the server's own fields and from nowhere else; an answer whose fields do not agree is refused whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final, Literal

from ..backend import GenerateRequest
from .errors import Aborted, BadAnswer, Busy, Refused, ServerError

GENERATE: Final = "/generate"

_ADAPTER: Final = "gymtune-v"
_BUSY: Final = (429, 503)
_MOST_TEXT = 500  # characters of an error page that are passed on

Spans = list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was sampled: ids (with the token that ended them), a log-prob each, why it ended, and which version of the
    weights sampled which part, as (version, start, end) from the first id to the last.
    """

    ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]
    spans: Spans


def request_body(request: GenerateRequest, *, max_new_tokens: int, with_stop: bool = False) -> dict[str, Any]:
    """Return the body of `POST /generate` for a turn, without its `rid`.

    `with_stop` sends the stop strings too: a server without a tokenizer refuses them. The model's own end tokens end a
    turn as well as `stop_ids` do.
    """
    sampling = request.sampling
    top_p, top_k, min_p = sampling.top_p, sampling.top_k or -1, sampling.min_p
    if sampling.temperature == 0:
        top_p, top_k, min_p = 1.0, -1, 0.0
    elif top_k == 1:  # a server takes that for greedy and forgets the temperature of the log-probs
        top_p, top_k, min_p = 1.0, -1, 1.0
    return {
        "input_ids": list(request.prompt_ids),
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": False,
        "sampling_params": _sampling(
            max_new_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=list(sampling.stop) if with_stop and sampling.stop else None,
            stop_token_ids=list(request.stop_ids) or None,
        ),
    }


def scoring_body(ids: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request that samples nothing and asks for the log-probs of `ids`, at temperature 1."""
    return {
        "input_ids": list(ids),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 0,
        "stream": False,
        "sampling_params": _sampling(max_new_tokens=0),
    }


def _sampling(**given: Any) -> dict[str, Any]:
    """Return every sampling field: what is given, and for the others the value that leaves logits alone."""
    return {
        "max_new_tokens": 1,
        "min_new_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "stop": None,
        "stop_token_ids": None,
        "stop_regex": None,
        "ignore_eos": False,
        "n": 1,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "custom_params": None,
        "sampling_seed": None,
        # the server's text must be that of the ids: it is searched for stop strings
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        **given,
    }


def read_answer(url: str, body: dict[str, Any], answer: Any) -> Answer:
    """Return what an answer to `body` (with its `rid`) says.

    Raises Aborted for a generation that was ended from outside, BadAnswer where a field is missing or does not agree.
    """
    wanted, meta = body["sampling_params"], _meta(url, answer)
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict):
        raise _bad(url, f"finish_reason must be an object, got {reason!r}")
    if reason.get("type") == "abort":
        raise Aborted(url, GENERATE, f"the server ended it: {reason.get('message') or 'no reason given'}")
    if "rid" in body and meta.get("id") != body["rid"]:
        raise _bad(url, f"this is the answer to request {meta.get('id')!r}, not to {body['rid']!r}")
    ids, logprobs = _pairs(url, meta.get("output_token_logprobs"), "output_token_logprobs")
    if ids != answer.get("output_ids"):
        told = answer.get("output_ids")
        count = len(told) if isinstance(told, list) else "no"
        raise _bad(url, f"output_ids and output_token_logprobs must be of the same ids, got {count} and {len(ids)}")
    if not 1 <= len(ids) <= wanted["max_new_tokens"]:
        raise _bad(url, f"1 to {wanted['max_new_tokens']} ids were asked for, got {len(ids)}")
    finish = _finish(url, reason, ids, wanted)
    return Answer(ids, logprobs, finish, _spans(url, meta, len(ids)))


def read_scores(url: str, ids: Sequence[int], answer: Any) -> list[float]:
    """Return the log-probs of `ids[1:]` from the answer to `scoring_body(ids)`. Raises BadAnswer."""
    rows = _meta(url, answer).get("input_token_logprobs")
    if not isinstance(rows, list) or not rows:
        raise _bad(url, f"input_token_logprobs must be a list of {len(ids)}, got {rows!r}")
    scored, logprobs = _pairs(url, rows[1:], "input_token_logprobs")  # the first id has no log-prob
    if scored != list(ids[1:]):
        raise _bad(url, f"{len(ids)} ids were to be scored, {len(scored) + 1} came back or others")
    return logprobs


def read_error(url: str, path: str, status: int, text: str) -> ServerError:
    """Return the error that an HTTP answer of 400 or more stands for, in whatever shape the server wrote it."""
    told = _told(text) or "no reason given"
    kind = Busy if status in _BUSY else Refused if status < 500 else ServerError
    return kind(url, path, told[:_MOST_TEXT], status)


def adapter_name(version: int) -> str:
    """Return the name under which the adapter of a version is loaded."""
    return f"{_ADAPTER}{version}"


def adapter_version(name: str) -> int:
    """Return the version of an adapter from its name. Raises ValueError for a name that is not ours."""
    if not name.startswith(_ADAPTER):
        raise ValueError(f"an adapter of ours is named {_ADAPTER}N, got {name!r}")
    return int(name.removeprefix(_ADAPTER))


def _bad(url: str, told: str) -> BadAnswer:
    return BadAnswer(url, GENERATE, told)


def _meta(url: str, answer: Any) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise _bad(url, f"an object with meta_info was wanted, got {type(answer).__name__}: is this an SGLang server?")
    return meta


def _pairs(url: str, rows: Any, name: str) -> tuple[list[int], list[float]]:
    """Return the ids and log-probs of rows `[logprob, id, ...]`. Raises BadAnswer when one of them is no number."""
    if not isinstance(rows, list):
        raise _bad(url, f"{name} must be a list, got {type(rows).__name__}")
    ids: list[int] = []
    logprobs: list[float] = []
    for place, row in enumerate(rows):
        match row:
            case [float() | int() as logprob, int() as token, *_] if isfinite(logprob):
                ids.append(token)
                logprobs.append(float(logprob))
            case _:
                raise _bad(url, f"{name}[{place}] must be [log-prob, id, ...], got {row!r}")
    return ids, logprobs


def _finish(url: str, reason: dict[str, Any], ids: Sequence[int], wanted: dict[str, Any]) -> Literal["stop", "length"]:
    """Return why it ended. A stop token at the last place that was left counts as a stop, whatever the server says."""
    matched, stop_ids = reason.get("matched"), wanted["stop_token_ids"] or ()
    match reason.get("type"):
        case "length":
            return "stop" if ids[-1] in stop_ids else "length"
        case "stop" if isinstance(matched, int) and matched == ids[-1]:
            return "stop"
        case "stop" if isinstance(matched, str) and matched in (wanted["stop"] or ()):
            return "stop"
    raise _bad(url, f"finish_reason {reason!r} is none that was asked for; the last id is {ids[-1]}")


def _spans(url: str, meta: dict[str, Any], length: int) -> Spans:
    """Return which version sampled which ids. Servers before 0.5.19 know one version an answer."""
    told = meta.get("weight_versions")
    if told is None:
        return [(str(meta.get("weight_version")), 0, length)]
    spans: Spans = []
    end = 0
    for span in told if isinstance(told, list) else [told]:
        match span:
            case {"version": version, "start": int(start), "end": int(stop)} if start == end and stop >= start:
                end = stop
                if stop > start:
                    spans.append((str(version), start, stop))
            case _:
                break
    if end != length:
        raise _bad(url, f"weight_versions must follow each other from 0 to {length}, got {told!r}")
    return spans


def _told(text: str) -> str:
    """Return what an error's body says: `error` as object or text, `message` or `detail` at the top, or plain text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text.strip()
    for _ in range(2):
        if isinstance(found, dict):
            found = next((found[key] for key in ("error", "message", "detail") if found.get(key)), found)
    return found.strip() if isinstance(found, str) else json.dumps(found)
