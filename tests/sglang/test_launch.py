"""SGLang itself, started and ended by our commands: no process is left, whichever way they end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Any
from urllib.request import urlopen

import pytest
from sglang_fixtures import START_SECONDS, a_free_port

from gymtune.agents import read_trajectories

pytestmark = pytest.mark.sglang

GYMTUNE = str(Path(sys.executable).with_name("gymtune"))
ENV = "gymtune/Calculator-v0"

PROCESSES = 3  # of a server, at least


class Command(subprocess.Popen):
    """One of our commands, in a session of its own; what it says goes to a file."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.out = Path(mkstemp(dir=folder, suffix=".out")[1])
        with self.out.open("w") as out:
            super().__init__(
                [GYMTUNE, *map(str, arguments)],
                cwd=folder,
                env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ends(self, code: int) -> str:
        """Wait until it has ended, by this exit code, and return what it said."""
        assert self.wait(timeout=START_SECONDS) == code, self.said()
        return self.said()

    def said(self) -> str:
        return self.out.read_text()


Begin = Callable[..., Command]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begins a command, and ends what a failed test has left."""
    made: list[Command] = []

    def run(*arguments: object) -> Command:
        made.append(Command(tmp_path, *arguments))
        return made[-1]

    yield run
    for pid in (*(one.pid for one in made), *(record["pid"] for record in records(tmp_path))):
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for one in made:
        one.wait()


def records(folder: Path) -> list[dict[str, Any]]:
    """Return what is written down of the servers that were started in a folder."""
    return [json.loads(file.read_text()) for file in (folder / "cache/gymtune/servers").glob("*.json")]


def wait_for(true: Callable[[], Any], owner: Command) -> Any:
    """Return what comes to be true while a command runs."""
    until = time.monotonic() + START_SECONDS
    while not (found := true()):
        assert owner.poll() is None, owner.said()
        assert time.monotonic() < until
        time.sleep(0.1)
    return found


def living(group: int) -> list[str]:
    """Return the names of a group's processes that live."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = file.read_text().rpartition(")")
            if rest.split()[2] == str(group) and rest.split()[0] != "Z":
                found.append(name)
    return found


def test_a_rollout_has_a_server_of_its_own(
    begin: Begin, sglang_python: Path, sglang_model: Path, tmp_path: Path
) -> None:
    asked = ["--env", ENV, "--model", sglang_model, "-n", 6, "--max-completion-length", 16, "--out", "t.jsonl"]
    owner = begin("rollout", *asked, "--sglang", "launch", "--sglang-python", sglang_python)
    [record] = wait_for(lambda: records(tmp_path), owner)
    wait_for(lambda: len(living(record["pid"])) >= PROCESSES, owner)
    assert "6 episodes, success" in owner.ends(0)
    assert living(record["pid"]) == []
    assert records(tmp_path) == []
    assert all(t.turns and t.error is None for t in read_trajectories(tmp_path / "t.jsonl"))


@pytest.mark.slow
def test_serve_starts_a_dead_server_again_and_ctrl_c_ends_it(
    begin: Begin, sglang_python: Path, sglang_model: Path, tmp_path: Path
) -> None:
    port = a_free_port()
    url = f"http://127.0.0.1:{port}"
    owner = begin("serve", "--model", sglang_model, "--python", sglang_python, "--port", port)
    wait_for(lambda: f"serves {sglang_model} at {url}" in owner.said(), owner)
    [first] = records(tmp_path)
    os.killpg(first["pid"], signal.SIGKILL)
    wait_for(lambda: f"died, and was started again: {url}" in owner.said(), owner)
    with urlopen(f"{url}/model_info", timeout=10) as answer:
        assert json.load(answer)["model_path"] == str(sglang_model)
    [second] = records(tmp_path)
    owner.send_signal(signal.SIGINT)
    owner.ends(0)
    assert living(first["pid"]) == living(second["pid"]) == []
    assert records(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda way: way.name)
def test_a_training_run_takes_its_server_along_or_it_is_found(
    begin: Begin, sglang_python: Path, sglang_model: Path, tmp_path: Path, way: signal.Signals
) -> None:
    asked = ["--model", sglang_model, "--env", ENV, "--output", "run", "--max-steps", 10_000, "--prompts-per-step", 2]
    asked += ["--num-generations", 2, "--max-completion-length", 8, "--save-steps", 0]
    owner = begin("train", "--algo", "grpo", *asked, "--sglang", "launch", "--sglang-python", sglang_python)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, owner)
    [record] = records(tmp_path)
    owner.send_signal(way)
    owner.ends({signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[way])
    if way is not signal.SIGKILL:
        assert living(record["pid"]) == []
        assert records(tmp_path) == []
        return
    assert len(living(record["pid"])) >= PROCESSES  # nobody could end it
    told = begin("serve", "--model", sglang_model, "--print").ends(0)
    assert f"left over, `gymtune serve --end-leftovers` ends it: process {record['pid']} " in told
    assert len(living(record["pid"])) >= PROCESSES
    ended = begin("serve", "--end-leftovers").ends(0)
    assert f"ended: process {record['pid']} at {record['url']}" in ended
    assert living(record["pid"]) == []
    assert records(tmp_path) == []
