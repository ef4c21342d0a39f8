"""What is sent, and what is made of answers, against values written by hand."""

import json
from typing import Any

import pytest

from gymtune.agents import GenerateRequest, Sampling
from gymtune.agents.sglang import Aborted, BadAnswer, Busy, Refused, ServerError
from gymtune.agents.sglang.wire import (
    adapter_name,
    adapter_version,
    read_answer,
    read_error,
    read_scores,
    request_body,
    scoring_body,
)

URL = "http://server:30000"


def ask(stop_ids=(9,), **sampling: Any) -> GenerateRequest:
    return GenerateRequest([1, 2, 3], Sampling(**sampling), tuple(stop_ids), seed=1, session="s")


def asked(**changes: Any) -> dict[str, Any]:
    body = {"rid": "r1", **request_body(ask(), max_new_tokens=4)}
    return {**body, "sampling_params": {**body["sampling_params"], **changes}}


def answer(ids=(5, 6), reason: Any = None, meta: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    told = {
        "id": "r1",
        "finish_reason": reason or {"type": "length", "length": len(ids)},
        "weight_version": "7",
        "weight_versions": [{"version": "7", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-0.5 - k, token, None] for k, token in enumerate(ids)],
    }
    return {"output_ids": list(ids), "meta_info": {**told, **(meta or {})}, **changes}


def test_every_sampling_field_is_sent():
    body = request_body(ask(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("x",)), max_new_tokens=4)
    assert body["input_ids"] == [1, 2, 3]
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, False)
    assert body["sampling_params"] == {
        "max_new_tokens": 4,
        "min_new_tokens": 0,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "stop": None,
        "stop_token_ids": [9],
        "stop_regex": None,
        "ignore_eos": False,
        "n": 1,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "custom_params": None,
        "sampling_seed": None,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        ({"temperature": 1.0}, (1.0, 1.0, -1, 0.0)),  # top_k 0 is off, which a server writes -1
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.2}, (0, 1.0, -1, 0.0)),  # greedy: cuts change nothing
        ({"temperature": 0.7, "top_k": 1, "top_p": 0.5}, (0.7, 1.0, -1, 1.0)),  # the likeliest, but at its temperature
        ({"temperature": 0.7, "top_k": 2}, (0.7, 1.0, 2, 0.0)),
    ],
)
def test_how_a_sampling_is_written(sampling: dict[str, Any], sent: tuple):
    params = request_body(ask(**sampling), max_new_tokens=4)["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == sent


def test_stop_strings_go_to_servers_that_can_read_them():
    request = ask(stop=("x", "y"))
    assert request_body(request, max_new_tokens=4)["sampling_params"]["stop"] is None
    assert request_body(request, max_new_tokens=4, with_stop=True)["sampling_params"]["stop"] == ["x", "y"]
    assert request_body(ask(stop_ids=()), max_new_tokens=4, with_stop=True)["sampling_params"]["stop"] is None


def test_an_answer_is_read_from_the_servers_own_fields():
    found = read_answer(URL, asked(), answer())
    assert (found.ids, found.logprobs, found.finish, found.spans) == ([5, 6], [-0.5, -1.5], "length", [("7", 0, 2)])


@pytest.mark.parametrize(
    ("ids", "reason", "finish"),
    [
        ((5, 6), {"type": "length", "length": 2}, "length"),
        ((5, 9), {"type": "stop", "matched": 9}, "stop"),
        ((5, 4), {"type": "stop", "matched": 4}, "stop"),  # the model's own end token
        ((5, 9), {"type": "length", "length": 2}, "stop"),  # at the last place
        ((5, 6), {"type": "stop", "matched": "x"}, "stop"),
    ],
)
def test_finish_reasons(ids: tuple, reason: dict[str, Any], finish: str):
    assert read_answer(URL, asked(stop=["x"]), answer(ids, reason)).finish == finish


@pytest.mark.parametrize(
    "reason",
    [
        {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        {"type": "abort", "message": "Abort in waiting queue"},
        {"type": "abort"},
    ],
)
def test_an_abort_never_becomes_a_turn(reason: dict[str, Any]):
    short = {"meta_info": {"id": "r1", "finish_reason": reason, "e2e_latency": 0.1}}  # all that one in the queue has
    for told in (answer((5, 6), reason), short):
        with pytest.raises(Aborted, match=reason.get("message") or "no reason given"):
            read_answer(URL, asked(), told)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([], "an object with meta_info was wanted, got list"),
        ("<html>", "an object with meta_info was wanted, got str"),
        ({"text": "hi"}, "an object with meta_info"),
        (answer(meta={"finish_reason": None}), "finish_reason must be an object, got None"),
        (answer((5, 6), {"type": "eaten"}), "is none that was asked for"),
        (answer((5, 6), {"type": "stop", "matched": "NaN happened"}), "is none that was asked for"),
        (answer((5, 6), {"type": "stop", "matched": 5}), "is none that was asked for"),
        (answer(meta={"id": "r2"}), "the answer to request 'r2', not to 'r1'"),
        (answer(output_ids=[5]), "must be of the same ids, got 1 and 2"),
        (answer(output_ids=[5, 7]), "must be of the same ids"),
        (answer(output_ids=None), "must be of the same ids, got no and 2"),
        (answer(meta={"output_token_logprobs": None}), "output_token_logprobs must be a list"),
        (answer(meta={"output_token_logprobs": [[-1.0, 5, None], [None, 6, None]]}), r"output_token_logprobs\[1\]"),
        (answer(meta={"output_token_logprobs": [[-1.0, 5, None], [float("-inf"), 6]]}), r"output_token_logprobs\[1\]"),
        (answer(meta={"output_token_logprobs": [[-1.0]]}), r"output_token_logprobs\[0\]"),
        (answer(()), "1 to 4 ids were asked for, got 0"),
        (answer((5, 6, 7, 8, 5)), "1 to 4 ids were asked for, got 5"),
        (answer(meta={"weight_versions": [{"version": "7", "start": 0, "end": 1}]}), "follow each other from 0 to 2"),
        (answer(meta={"weight_versions": [{"version": "7", "start": 1, "end": 2}]}), "follow each other from 0 to 2"),
        (answer(meta={"weight_versions": "7"}), "follow each other"),
    ],
)
def test_an_answer_that_does_not_agree_is_refused_whole(told: Any, words: str):
    with pytest.raises(BadAnswer, match=words) as caught:
        read_answer(URL, asked(), told)
    assert str(caught.value).startswith(f"{URL}/generate: ")


def test_spans_of_versions():
    spans = [
        {"version": "default", "start": 0, "end": 0},
        {"version": "1", "start": 0, "end": 1},
        {"version": "2", "start": 1, "end": 3},
    ]
    found = read_answer(URL, asked(), answer((5, 6, 7), meta={"weight_versions": spans}))
    assert found.spans == [("1", 0, 1), ("2", 1, 3)]
    older = answer((5, 6))
    del older["meta_info"]["weight_versions"]
    assert read_answer(URL, asked(), older).spans == [("7", 0, 2)]


def test_scores():
    body = scoring_body([4, 5, 6])
    assert (body["input_ids"], body["logprob_start_len"]) == ([4, 5, 6], 0)
    assert (body["sampling_params"]["max_new_tokens"], body["sampling_params"]["temperature"]) == (0, 1.0)
    told = {"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.0, 5, None], [-2.0, 6, None]]}}
    assert read_scores(URL, [4, 5, 6], told) == [-1.0, -2.0]
    for rows in (None, [], [[None, 4, None]], [[None, 4, None], [-1.0, 5, None], [-2.0, 7, None]]):
        with pytest.raises(BadAnswer):
            read_scores(URL, [4, 5, 6], {"meta_info": {"input_token_logprobs": rows}})
    with pytest.raises(BadAnswer, match=r"input_token_logprobs\[0\]"):
        read_scores(URL, [4, 5], {"meta_info": {"input_token_logprobs": [[None, 4, None], [None, 5, None]]}})


@pytest.mark.parametrize(
    ("status", "text", "kind", "words"),
    [
        (400, {"error": {"message": "too long"}}, Refused, "too long"),
        (400, {"error": "unknown field `foo`"}, Refused, "unknown field `foo`"),
        (400, {"object": "error", "message": "no JSON", "type": "Bad Request", "code": 400}, Refused, "no JSON"),
        (400, {"success": False, "message": "no such folder"}, Refused, "no such folder"),
        (404, {"detail": "Not Found"}, Refused, "Not Found"),
        (422, {"detail": [{"loc": ["body"], "msg": "odd"}]}, Refused, "odd"),
        (401, {"error": "Unauthorized"}, Refused, "Unauthorized"),
        (400, "Cache not flushed because there are pending requests.", Refused, "pending requests"),
        (429, "", Busy, "no reason given"),
        (503, {"detail": "The request queue is full."}, Busy, "queue is full"),
        (503, {"error": {"type": "x", "code": "no_available_workers", "message": "No workers"}}, Busy, "No workers"),
        (500, {"detail": "boom"}, ServerError, "boom"),
        (502, "<html>bad gateway", ServerError, "bad gateway"),
    ],
)
def test_errors_in_all_shapes(status: int, text: Any, kind: type[ServerError], words: str):
    error = read_error(URL, "/p", status, text if isinstance(text, str) else json.dumps(text))
    assert type(error) is kind
    assert (error.url, error.path, error.status) == (URL, "/p", status)
    assert str(error).startswith(f"{URL}/p answered {status}: ")
    assert words in str(error)


def test_a_page_of_error_is_cut():
    assert len(str(read_error(URL, "/p", 500, "x" * 9000))) < 600


def test_names_of_adapters():
    assert adapter_name(12) == "gymtune-v12"
    assert adapter_version(adapter_name(12)) == 12
    with pytest.raises(ValueError, match="an adapter of ours"):
        adapter_version("somebody-v12")
