"""A real SGLang server for the tests: one a session, on a tiny model; and the double that replays what it answered.

`make sglang-env` makes the Python that has SGLang; GYMTUNE_SGLANG_PYTHON names another. GYMTUNE_TEST_SGLANG_URL takes a
server that runs already, with a model folder that is on this machine.
"""

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300
HELD_SECONDS = 30  # longest that the double keeps a request which waits for its abort
FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--grammar-backend", "none", "--mem-fraction-static", "0.1"),
    *("--max-total-tokens", "65536", "--max-running-requests", "64", "--sleep-on-idle", "--skip-server-warmup"),
]


def find_python() -> Path | None:
    """Return the Python that has SGLang, None when there is none."""
    named = os.environ.get("GYMTUNE_SGLANG_PYTHON")
    python = Path(named) if named else ROOT / ".sglang-env" / "bin" / "python"
    return python if python.exists() else None


@dataclass
class RealServer:
    """A server that runs: its address, its model's folder, and its process (None for one that ran already)."""

    url: str
    model: Path
    process: subprocess.Popen | None = None

    def end(self) -> None:
        """End it and the processes that it made."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start_server(python: Path, model: Path, log: Path, *flags: str, port: int | None = None, **env: str) -> RealServer:
    """Start a server in a session of its own and wait until it answers. Whoever calls ends it."""
    port = port or a_free_port()
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS, *flags]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**clean, **quiet, **env},
            cwd=log.parent,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call of the C library, no lock of Python's
        )
    server = RealServer(f"http://127.0.0.1:{port}", model, process)
    atexit.register(server.end)
    until = time.monotonic() + START_SECONDS
    while not answers(server.url):
        if process.poll() is not None or time.monotonic() > until:
            server.end()
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)
    return server


def answers(url: str) -> bool:
    """Tell whether a server is there."""
    try:
        with urlopen(f"{url}/model_info", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def a_free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """Let the kernel end the server when pytest is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The Python that has SGLang; skips, loudly, where there is none."""
    python = find_python()
    if python is None:
        pytest.skip("NO SGLANG SERVER: `make sglang-env` makes its environment, or name one: GYMTUNE_SGLANG_PYTHON")
    return python


def make_model(folder: Path) -> Path:
    """Make a fp32 model (vocabulary of 512) whose weights are large enough for peaked distributions.

    The same bytes every time: the recorded answers are its own.
    """
    import torch

    from gymtune.agents.models import init_model, load_model, save_model
    from gymtune.agents.tokenizer_texts import tokenizer_texts

    texts = [text for name in ("Calculator", "Arithmetic") for text in tokenizer_texts(f"gymtune/{name}-v0")]
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 512}
    init_model(folder, texts=texts, **shape)
    model = load_model(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3, generator=generator)
    save_model(model, folder)
    return folder


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that the session's server has."""
    return make_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="session")
def sglang_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The one server of this session. What changes its weights takes `server` instead."""
    url = os.environ.get("GYMTUNE_TEST_SGLANG_URL")
    if url:
        with urlopen(f"{url}/model_info", timeout=10) as answer:
            yield RealServer(url, Path(json.load(answer)["model_path"]))
        return
    python, model = request.getfixturevalue("sglang_python"), request.getfixturevalue("sglang_model")
    log = tmp_path_factory.mktemp("sglang_log") / "server.log"
    server = start_server(python, model, log, "--skip-tokenizer-init")
    yield server
    server.end()


@pytest.fixture
def server(sglang_server: RealServer) -> Iterator[RealServer]:
    """The session's server, with its first weights again before and after, unpaused and its cache empty."""
    from gymtune.agents.sglang import Servers

    def reset() -> None:
        servers = Servers([sglang_server.url])
        try:
            servers.post(sglang_server.url, "/continue_generation")
            body = {"model_path": str(sglang_server.model), "weight_version": "default", "abort_all_requests": True}
            servers.post(sglang_server.url, "/update_weights_from_disk", body)
            servers.post(sglang_server.url, "/flush_cache?timeout=10")
        finally:
            servers.close()

    reset()
    yield sglang_server
    reset()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens at."""
    return a_free_port()


# -- the double ----------------------------------------------------------------------------------------------------

Handle = Callable[[str, str, Any], tuple[int, Any] | None]
"""What answers a request: from method, path and body to status and body; None closes the connection without a word."""


@dataclass
class Double:
    """An HTTP server in this process. `seen` holds (method, path, body) of each request as it comes in."""

    handle: Handle
    url: str = ""
    seen: list[tuple[str, str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None

    def sent(self, path: str) -> list[Any]:
        """Return the bodies of the requests to a path, in order."""
        return [body for _, asked, body in self.seen if asked == path]

    def start(self, port: int = 0) -> "Double":
        """Listen."""
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def _answer(self, method: str) -> None:
                text = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.loads(text) if text else None
                double.seen.append((method, self.path, body))
                double.headers.append(dict(self.headers))
                answer = double.handle(method, self.path, body)
                if answer is None:
                    self.close_connection = True
                    return
                status, told = answer
                reply = told.encode() if isinstance(told, str) else b"" if told is None else json.dumps(told).encode()
                with suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(status)
                    self.send_header("content-length", str(len(reply)))
                    self.end_headers()
                    self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """A client that went away is no fault."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Listen no more; connections that are open stay until their clients close them."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture
def double() -> Iterator[Callable[[Handle], Double]]:
    """Makes doubles that answer by a function, and ends them."""
    made: list[Double] = []

    def make(handle: Handle) -> Double:
        made.append(Double(handle).start())
        return made[-1]

    yield make
    for one in made:
        one.stop()


class Replay:
    """Answers what a real server answered to the same request: the same but for its `rid`, in the same order.

    A generation that was aborted is kept until its abort comes.
    """

    def __init__(self, file: Path) -> None:
        self.answers: dict[str, list[Any]] = {}
        for row in json.loads(file.read_text(encoding="utf-8"))["traffic"]:
            self.answers.setdefault(key_of(row["method"], row["path"], row["body"]), []).append(row)
        self.times: dict[str, int] = {}
        self.aborts: dict[str, threading.Event] = {}
        self.lock = threading.Lock()

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Answer. What was never recorded is an error that says so."""
        rid = (body or {}).get("rid", "")
        with self.lock:
            event = self.aborts.setdefault(rid, threading.Event())
            key = key_of(method, path, body)
            rows, turn = self.answers.get(key), self.times.get(key, 0)
            self.times[key] = turn + 1
        if path == "/abort_request":
            event.set()
            return 200, None
        if rows is None:
            return 400, {
                "error": {"message": f"{method} {path} was never recorded; run tests/sglang/record.py: {body}"}
            }
        row = rows[turn % len(rows)]
        answer = row["answer"]
        if isinstance(answer, dict) and "meta_info" in answer:
            if answer["meta_info"]["finish_reason"]["type"] == "abort":
                event.wait(HELD_SECONDS)
            answer = {**answer, "meta_info": {**answer["meta_info"], "id": rid}}
        return row["status"], answer


def key_of(method: str, path: str, body: Any) -> str:
    """Return what tells requests apart; a `rid` does not."""
    kept = {name: value for name, value in (body or {}).items() if name != "rid"} if isinstance(body, dict) else body
    return json.dumps([method, path, kept], sort_keys=True)
