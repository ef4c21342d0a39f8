"""What a server says of itself, and what is said of one that is none."""

import pytest

from gymtune.agents.sglang import check_server
from gymtune.tools.errors import ConfigError, RunError

MODEL = {"model_path": "/models/m", "tokenizer_path": "/models/m", "is_generation": True, "weight_version": "default"}
PAGE = {
    "version": "0.5.23",
    "max_req_input_len": 1018,
    "skip_tokenizer_init": False,
    "enable_lora": None,
    "lora_paths": None,
    "tp_size": 2,
    "dp_size": 1,
}


def pages(**told):
    """Answer GETs by path; other paths are not there."""
    return lambda method, path, body: told.get(path[1:], (404, {"detail": "Not Found"}))


def test_a_server_says_its_model(double):
    server = double(pages(model_info=(200, {**MODEL, "model_type": "qwen3"}), server_info=(200, PAGE)))
    found = check_server(server.url + "/")
    assert (found.url, found.model_path, found.weight_version) == (server.url, "/models/m", "default")
    assert (found.version, found.max_length, found.has_tokenizer) == ("0.5.23", 1018, True)
    assert (found.model_type, found.enable_lora, found.tp_size, found.dp_size) == ("qwen3", False, 2, 1)
    assert {method for method, _, _ in server.seen} == {"GET"}


def test_an_older_server_or_a_router_says_less(double):
    found = check_server(double(pages(get_model_info=(200, MODEL))).url)
    assert (found.model_path, found.max_length, found.has_tokenizer, found.enable_lora) == (
        "/models/m",
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, "<html>", "no JSON object, so this is no SGLang server"),
        (200, {}, "names no model"),
        (200, [], "no JSON object"),
        (503, None, "/model_info answered 503"),
        (500, None, "/model_info answered 500"),
        (404, None, "no JSON object, so this is no SGLang server"),
        (401, {"error": "Unauthorized"}, "answered 401: Unauthorized"),
    ],
)
def test_what_is_no_server_is_said(double, status: int, body, words: str):
    server = double(pages(model_info=(status, body)))
    with pytest.raises(RunError, match=words):
        check_server(server.url)


def test_nobody_there():
    with pytest.raises(RunError, match=r"http://127\.0\.0\.1:9/model_info: no server can be reached"):
        check_server("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="the address of a server"):
        check_server("nonsense")
