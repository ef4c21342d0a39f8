"""A server of one's own: its command, its start, its watch, its end.

It runs in a session of its own, so that Ctrl-C ends it through its owner and in order, and so that all of its processes
(SGLang makes two more) can be ended together. It is written down while it lives (`leftovers`), for an owner that is
killed can end nothing.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Final, Self

import httpx

from ...tools.errors import ConfigError, ModelError
from ..models.inspection import inspect_model
from ..threads import cores
from .errors import LaunchFailed
from .leftovers import end_group, forget, write_down

START_SECONDS: Final = 300.0
_JOIN_SECONDS = 15.0  # until the watcher is given up
_QUICK_SECONDS, _QUICK_DEATHS = 120.0, 3  # so many deaths, each so soon after its start, and it is given up
_WATCH_SECONDS, _LOOK_SECONDS = 1.0, 0.5  # between two looks: does it live, does it answer yet
_LAST_LINES = 20  # of the log, in an error
_CACHE_SHARE = 0.1  # of a CPU's memory, beside the weights

_LORA_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CPU_FLAGS: Final = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
    *("--grammar-backend", "none", "--max-total-tokens", "65536"),
    "--sleep-on-idle",  # an idle scheduler takes a whole core otherwise
)
_TAKEN: Final = "another program has the port: give another one"
_MENDS: Final = {
    "address already in use": _TAKEN,
    "out of memory": "the model and its cache do not fit: give --mem-fraction-static or a smaller model",
    "No module named": "its Python lacks a package: install sglang there as its own guide says",
    "Unsupported architectures": "this SGLang does not know the model: take a newer one, or the torch backend",
}
"""What may stand in the log of a server that did not start -> what to do."""


def server_command(
    model: Path, *, python: str, port: int, host: str = "127.0.0.1", device: str = "cpu", dtype: str = "float32",
    args: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Return the command of a server on this machine; `args` come last, so they win over what stands before.

    Raises ModelError where the folder is no model: what we trained or imported can be served, a bare `.pth` cannot.
    """
    if model.is_file():
        raise ModelError(f"{model}: SGLang serves folders: `gymtune models import {model} --out DIR` makes one")
    facts = inspect_model(model)
    kind, _, number = device.partition(":")
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model.absolute()), "--host", host]
    command += ["--port", str(port), "--device", kind, "--dtype", dtype, "--skip-server-warmup"]
    if kind == "cpu":
        size = facts.parameters * (4 if dtype == "float32" else 2)
        share = min(0.9, size / _memory() + _CACHE_SHARE)
        command += [*_CPU_FLAGS, "--mem-fraction-static", f"{share:.2f}"]
    elif number:
        command += ["--base-gpu-id", number]
    return [*command, *args]


def lora_flags(rank: int, *, device: str = "cpu") -> list[str]:
    """Return what lets a server take adapters of a rank: the one it samples with and the one before it."""
    backend = ["--lora-backend", "torch_native"] if device == "cpu" else []
    flags = ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras-per-batch", "2", *backend]
    return [*flags, "--lora-target-modules", *_LORA_TARGETS]


def _memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_python(python: str) -> str:
    """Return the version of sglang that a Python has, without importing it. Raises ConfigError where it has none."""
    ask = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = subprocess.run([python, "-c", ask], check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"sglang_python {python}: cannot be run: {error}") from error
    if done.returncode != 0:
        raise ConfigError(
            f"sglang_python {python}: it has no sglang. Install it there (`pip install sglang`, or as SGLang's guide "
            "for your machine says), or name another Python"
        )
    return done.stdout.strip()


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server that lives within a `with` block; one that dies in the meantime is started again at the same address.

    Args:
        command: what to run; its port is `port`.
        host: where it answers.
        port: see `host`.
        model: what it serves, for the record.
        log: file that its output is appended to.

    Attributes:
        on_restart: called with the address, in a thread, when it answers again after it had died.

    Entering waits until it answers. Raises LaunchFailed, with the end of its log, when it ends before or takes longer
    than START_SECONDS.
    """

    def __init__(self, command: Sequence[str], *, host: str, port: int, model: Path, log: Path) -> None:
        self.command, self.host, self.port, self.model, self.log = list(command), host, port, model, log
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.on_restart: Callable[[str], None] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # of what the server that runs now has written, in bytes
        self._answered = 0.0  # when it first did, on the monotonic clock
        self._quick_deaths = 0  # in a row
        self._ending = threading.Event()
        self._before: dict[int, Any] = {}
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="gymtune-server")
        self.fault: LaunchFailed | None = None
        """Why it is not started again."""

    def __enter__(self) -> Self:
        self._before = _let_signals_end()
        atexit.register(self.close)  # whoever forgets to leave the block
        try:
            self._check_port()
            self._start()
            self._wait()
        except BaseException:
            self.close()
            raise
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it and all its processes. Nothing happens the second time."""
        self._ending.set()
        atexit.unregister(self.close)
        try:
            if self._watcher.is_alive():
                self._watcher.join(timeout=_JOIN_SECONDS)
        finally:
            self._end()
            while self._before:
                signal.signal(*self._before.popitem())

    def wait(self) -> None:
        """Return when it has been given up (see `fault`) or closed."""
        while self.fault is None and not self._ending.is_set():
            self._ending.wait(_WATCH_SECONDS)

    def _check_port(self) -> None:
        """Raise LaunchFailed where somebody listens already: else that one's answers would be taken for ours."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that died lately is no hindrance
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise LaunchFailed(self.url, "", f"cannot listen there ({error}): {_TAKEN}") from error

    def _start(self) -> None:
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if "cpu" in self.command:  # two threads that share a core are ten times slower than one
            quiet["OMP_NUM_THREADS"] = str(max(1, cores() // 2))
        # Our own path of modules is not the server's: its Python may be another.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            with self.log.open("ab") as file:
                self._log_start = file.tell()
                file.write(f"$ {shlex.join(self.command)}\n".encode())
                file.flush()
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=quiet | environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchFailed(self.url, "", f"cannot start {self.command[0]}: {error}") from error
        write_down(self.process.pid, self.url, self.model, self.log)

    def _wait(self) -> None:
        """Wait until it answers; say why when it never does."""
        until = monotonic() + START_SECONDS
        while not self._answers():
            if self.process is None or self.process.poll() is not None:
                raise self._failed(f"it ended with {self.process.returncode if self.process else 'no process'}")
            if monotonic() > until:
                raise self._failed(f"it does not answer after {START_SECONDS:g} s")
            if self._ending.wait(_LOOK_SECONDS):
                raise self._failed("it was closed while it started")
        self._answered = monotonic()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/model_info", timeout=5.0, trust_env=False, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    def _failed(self, why: str) -> LaunchFailed:
        lines: list[str] = []
        if self.log.is_file():
            with self.log.open(encoding="utf-8", errors="replace") as file:
                file.seek(self._log_start)
                lines = file.read().splitlines()[-_LAST_LINES:]
        end = "\n".join(lines)
        mend = next((mend for sign, mend in _MENDS.items() if sign in end), "its log may say more")
        if self.process is not None and self.process.returncode == -signal.SIGKILL:
            mend = "it was killed, by somebody or by the system for want of memory"
        return LaunchFailed(self.url, "", f"the server did not start, {why}: {mend}. The end of {self.log}:\n{end}")

    def _watch(self) -> None:
        """Start it again whenever it dies, unless it dies too often."""
        while not self._ending.wait(_WATCH_SECONDS):
            if self.process is not None and self.process.poll() is None:
                continue
            self._quick_deaths = self._quick_deaths + 1 if monotonic() - self._answered < _QUICK_SECONDS else 1
            if self._quick_deaths == _QUICK_DEATHS:
                why = f"it died {_QUICK_DEATHS} times in a row, each within {_QUICK_SECONDS:g} s of its start"
                self.fault = self._failed(why)
                return
            self._end()  # what it has left of its processes
            try:
                self._start()
                self._wait()
            except LaunchFailed:  # the log has it; once more, or it is given up
                self._end()
                self._answered = monotonic()
            else:
                if self.on_restart is not None:
                    self.on_restart(self.url)

    def _end(self) -> None:
        """End the whole session: ask, then kill."""
        process, self.process = self.process, None
        if process is None:
            return
        try:
            end_group(process.pid, lambda: process.poll() is not None)
        finally:
            process.wait()
            forget(process.pid)


def _let_signals_end() -> dict[int, Any]:
    """Let a request to end (SIGTERM, SIGHUP) unwind the stack as Ctrl-C does, so that blocks end what they hold.

    Returns the handlers that were there before. Where the program handles them itself, or in another thread than the
    main one, nothing is changed.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return {}
    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    return {number: signal.signal(number, end) for number in wanted}


def launch(
    model: Path,
    *,
    python: str | None = None,
    args: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    port: int | None = None,
    log: Path,
) -> Server:
    """Return a server for a model folder, not started yet; `python` is the one that has sglang (default: this one).

    It listens at the loopback address alone. Raises ConfigError where that Python has no sglang.
    """
    python = python or sys.executable
    check_python(python)
    host, port = "127.0.0.1", port or free_port()
    command = server_command(model, python=python, port=port, host=host, device=device, dtype=dtype, args=args)
    return Server(command, host=host, port=port, model=model, log=log)
