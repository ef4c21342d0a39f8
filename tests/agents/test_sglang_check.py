"""The dry check of a server, against small HTTP servers that answer well and badly."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gymtune.agents.sglang_check import check_server
from gymtune.tools import RunError


@contextmanager
def serving(status: int, body: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else status)
            self.end_headers()
            self.wfile.write(b"" if self.path == "/health" else body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_says_its_model() -> None:
    told = {
        "model_path": "/models/m",
        "tokenizer_path": "/models/m",
        "is_generation": True,
        "weight_version": "default",
    }
    with serving(200, json.dumps(told)) as url:
        found = check_server(url + "/")
    assert (found.url, found.model_path, found.weight_version) == (url, "/models/m", "default")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, "<html>", "no JSON"),
        (200, "{}", "names no model"),
        (200, "[]", "names no model"),
        (503, "", "answered 503"),
    ],
)
def test_what_is_no_server_is_said(status: int, body: str, words: str) -> None:
    with serving(status, body) as url, pytest.raises(RunError, match=words):
        check_server(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "ftp://127.0.0.1"])
def test_nobody_there(url: str) -> None:
    with pytest.raises(RunError, match="no server can be reached"):
        check_server(url)
