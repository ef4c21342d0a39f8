"""Servers of one's own: every way out ends all their processes; those that outlive their owner are found and ended.

What is started here is a small program in the place of SGLang, so that a start takes a blink; tests/sglang starts
SGLang itself.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gymtune import cli
from gymtune.agents.loading import load_agent
from gymtune.agents.models.inspection import inspect_model
from gymtune.agents.sglang import LaunchFailed, launch, leftovers
from gymtune.agents.sglang.launch import Server, check_python, server_command
from gymtune.tools.errors import ConfigError, ModelError

GYMTUNE = str(Path(sys.executable).with_name("gymtune"))
PROGRAM = '''#!{python}
"""A Python that has SGLang, as far as an owner can tell."""
import json, os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if sys.argv[1] == "-c":
    print("0.5.23")
    sys.exit()
if "--dies" in sys.argv:
    print("first line\\nRuntimeError: out of memory")
    sys.exit(3)
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        answer = json.dumps({{"model_path": "here"}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

child = subprocess.Popen(["sleep", "600"])  # SGLang makes two more processes
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gymtune" / "servers"


@pytest.fixture
def program(tmp_path: Path) -> str:
    """What stands in for a Python that has SGLang."""
    path = tmp_path / "python"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def start(program: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes servers that are looked at often, and kills what a failed test has left of them."""
    monkeypatch.setattr(launch, "_WATCH_SECONDS", 0.02)
    monkeypatch.setattr(launch, "_LOOK_SECONDS", 0.02)
    made: list[Server] = []

    def make(*args: str, port: int | None = None) -> Server:
        made.append(launch.launch(tiny_model, python=program, args=args, port=port, log=tmp_path / "server.log"))
        return made[-1]

    yield make
    for server in made:
        server.close()


def living(group: int) -> list[int]:
    """Return the processes of a group that live; one that has ended and was not asked after does not."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                found.append(int(file.parent.name))
    return found


def wait_until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, true
        time.sleep(0.02)


def pid_of(server: Server) -> int:
    assert server.process is not None
    return server.process.pid


# -- commands ------------------------------------------------------------------------------------------------------


def test_the_command_suits_the_device(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = 4 * inspect_model(tiny_model).parameters
    monkeypatch.setattr(launch, "_memory", lambda: 2 * numbers)

    def command(**given: Any) -> str:
        return " ".join(server_command(tiny_model, python="py", port=7, **given))

    on_cpu = command(args=["--tp-size", "2"])
    assert on_cpu.startswith(f"py -m sglang.launch_server --model-path {tiny_model} --host 127.0.0.1 --port 7 ")
    assert "--device cpu --dtype float32" in on_cpu
    assert "--attention-backend torch_native" in on_cpu
    assert "--mem-fraction-static 0.60" in on_cpu  # half of the memory are weights, a tenth is for the cache
    assert on_cpu.endswith(" --tp-size 2")  # last, so that it wins
    assert "--mem-fraction-static 0.35" in command(dtype="bfloat16")
    on_gpu = command(device="cuda:1", dtype="bfloat16")
    assert "--device cuda --dtype bfloat16" in on_gpu
    assert on_gpu.endswith("--base-gpu-id 1")
    assert "torch_native" not in on_gpu


def test_what_cannot_be_served_is_refused(tmp_path: Path, program: str) -> None:
    weights = tmp_path / "full_sft_64.pth"
    weights.touch()
    with pytest.raises(ModelError, match=r"full_sft_64.pth.*gymtune models import"):
        server_command(weights, python=program, port=7)


def test_a_python_is_asked_for_its_sglang(tmp_path: Path, program: str) -> None:
    assert check_python(program) == "0.5.23"
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match=f"{bare}: it has no sglang. Install it there"):
        check_python(str(bare))
    with pytest.raises(ConfigError, match="nowhere: cannot be run"):
        check_python(str(tmp_path / "nowhere"))


# -- start and end -------------------------------------------------------------------------------------------------


def test_a_block_ends_the_server_and_what_it_made(start: Any, cache: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with start() as server:
        group = pid_of(server)
        wait_until(lambda: len(living(group)) == 2)
        assert os.getsid(group) == group  # Ctrl-C in the terminal reaches its owner alone
        [record] = cache.glob("*.json")
        assert json.loads(record.read_text())["owner"] == os.getpid()
        assert leftovers.leftovers() == []  # its owner lives
    assert living(group) == []
    assert list(cache.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("way", "error"),
    [
        (signal.SIGTERM, SystemExit),
        (signal.SIGHUP, SystemExit),
        (signal.SIGINT, KeyboardInterrupt),
        (0, ZeroDivisionError),
    ],
)
def test_every_way_out_ends_it(start: Any, way: int, error: type[BaseException]) -> None:
    groups = []

    def leave() -> None:
        with start() as server:
            groups.append(pid_of(server))
            signal.raise_signal(way) if way else 1 // 0

    with pytest.raises(error):
        leave()
    assert living(*groups) == []


def test_one_that_does_not_listen_is_killed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_GRACE_SECONDS", 0.2)
    with start("--stubborn") as server:
        group = pid_of(server)
    assert living(group) == []


def test_a_second_ctrl_c_does_not_spare_it(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(_: float) -> None:
        raise KeyboardInterrupt

    server = start("--stubborn")
    with server:
        group = pid_of(server)
        monkeypatch.setattr(leftovers, "sleep", impatient)
        with pytest.raises(KeyboardInterrupt):
            server.close()
        wait_until(lambda: living(group) == [])


def test_one_that_dies_at_its_start_is_told_of_with_its_last_words(start: Any, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("address already in use\n")  # of an earlier start
    with pytest.raises(LaunchFailed) as failed, start("--dies"):
        pass
    told = str(failed.value)
    assert "it ended with 3: the model and its cache do not fit" in told
    assert told.endswith("first line\nRuntimeError: out of memory")
    assert list(cache.iterdir()) == []


def test_a_port_that_is_taken_is_not_taken_for_ones_own(start: Any, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(LaunchFailed, match="another program has the port"), start(port=other.getsockname()[1]):
            pass
    assert not (tmp_path / "server.log").exists()  # nothing was started


# -- watch ---------------------------------------------------------------------------------------------------------


def test_one_that_dies_is_started_again(start: Any) -> None:
    back: list[str] = []
    with start() as server:
        server.on_restart = back.append
        first = pid_of(server)
        os.killpg(first, signal.SIGKILL)
        wait_until(lambda: back)
        second = pid_of(server)
        assert back == [server.url]
        assert server._answers()
        assert second != first
    assert living(first) == living(second) == []


def test_one_that_dies_again_and_again_is_given_up(start: Any) -> None:
    deaths = 0
    with start() as server:
        while server.fault is None and deaths < 10:
            process = server.process
            os.killpg(pid_of(server), signal.SIGKILL)
            deaths += 1
            wait_until(lambda gone=process: server.fault or (server.process not in (gone, None) and server._answers()))
        server.wait()  # returns at once
        assert "it died 3 times in a row, each within 120 s of its start" in str(server.fault)
    assert deaths == 3


# -- what outlives its owner ---------------------------------------------------------------------------------------


def test_after_a_kill_of_the_owner_the_server_is_told_of_and_ended(
    program: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, free_port: int
) -> None:
    command = [GYMTUNE, "serve", "--model", str(tiny_model), "--python", program, "--port", str(free_port)]
    owner = subprocess.Popen([*command, "--log", str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert f"SGLang 0.5.23 serves {tiny_model} at http://127.0.0.1:{free_port}" in owner.stdout.readline()
    owner.kill()
    owner.wait()
    owner.stdout.close()

    def serve(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gymtune", "serve", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        return str(capsys.readouterr().err)

    [record] = leftovers.leftovers()
    assert len(living(record.pid)) == 2
    told = serve("--model", str(tiny_model), "--print")
    assert told.startswith("left over, `gymtune serve --end-leftovers` ends it: ")
    assert f"process {record.pid} at http://127.0.0.1:{free_port}, serving {tiny_model}" in told
    assert len(living(record.pid)) == 2  # it was told of, and not touched
    assert serve("--end-leftovers").startswith(f"ended: process {record.pid} ")
    wait_until(lambda: living(record.pid) == [])
    assert serve("--end-leftovers") == ""


def test_nobody_elses_process_is_ended(cache: Path, tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        leftovers.write_down(stranger.pid, "http://127.0.0.1:7", tmp_path, tmp_path)
        [file] = cache.glob("*.json")
        ours = leftovers.Record(**json.loads(file.read_text()))

        def note(record: leftovers.Record, place: Path = file) -> None:
            place.write_text(json.dumps(asdict(record)))

        orphan = replace(ours, owner=gone.pid)
        note(orphan)
        assert leftovers.leftovers() == [orphan]  # as it is with a server of ours
        reused = replace(orphan, started=ours.started - 1)  # the number was given to another process meanwhile
        elsewhere = cache / "another-boot-1.json"
        note(reused)
        note(replace(reused, machine="another-boot"), elsewhere)
        assert leftovers.end_leftovers() == []
        assert not file.exists()
        assert elsewhere.exists()  # it may be true there
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# -- the command line and load_agent -------------------------------------------------------------------------------


def test_serve_prints_its_command(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, cache: Path) -> None:
    line = ["gymtune", "serve", "--model", str(tiny_model), "--python", "my python", "--lora-rank", "4", "--print"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr().out
    assert printed.startswith(f"'my python' -m sglang.launch_server --model-path {tiny_model} ")
    assert "--enable-lora --max-lora-rank 4 " in printed
    assert not cache.exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sglang": "launch", "sglang_url": ["http://127.0.0.1:9"]}, "one of both"),
        ({"sglang_python": "python3"}, "one of both"),
        ({"sglang_url": ["http://127.0.0.1:9"], "dtype": "bfloat16"}, "are for a server that is started"),
        ({"sglang_url": ["http://127.0.0.1:9"], "layers": "plain"}, "layers is of the torch engine"),
        ({"sglang": "launch", "sglang_python": "/nowhere"}, "cannot be run"),
    ],
)
def test_options_that_contradict_each_other(tiny_model: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_agent(tiny_model, **given)
