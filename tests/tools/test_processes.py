"""Real processes throughout. What runs in a worker is of the standard library or of a module that the test writes."""

import ctypes
import itertools
import json
import math
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gymtune.tools.errors import ConfigError
from gymtune.tools.processes import CallTimeoutError, ProcessPool, WorkerDied, default_pool

_NUMBERS = itertools.count()

#: Limits in seconds, tried in turn: a machine too busy for one gets a longer one, and a fault fails at all of them.
LIMITS = (0.3, 3.0, 30.0)
POWER = (operator.pow, 10, 10**9)  # minutes in C, holding the interpreter's lock: no thread and no signal handler runs


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    made = ProcessPool(2)
    yield made
    made.close()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Writes a module of a name of its own, which can be imported here, and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> Any:
        name = f"for_a_worker_{next(_NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return __import__(name)

    return write


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie that nobody has waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within a minute."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def gone(pid: int) -> bool:
    return wait_for(lambda: not alive(pid))


def test_values_and_reuse(pool: ProcessPool) -> None:
    assert pool.call(math.factorial, 5, timeout=60) == 120
    assert pool.call(partial(int, base=2), "101", timeout=60) == 5
    assert pool.call(sorted, [2, 3, 1], reverse=True, timeout=math.inf) == [3, 2, 1]
    assert pool.call(b"x".__mul__, 3 * 2**20, timeout=60) == b"x" * 3 * 2**20  # larger than any pipe, both ways
    assert pool.call(len, "y" * 3 * 2**20, timeout=60) == 3 * 2**20
    first, second = (pool.call(os.getpid, timeout=60) for _ in range(2))
    assert first == second != os.getpid()


@pytest.mark.parametrize("work", [POWER, (time.sleep, 60)])
def test_a_hanging_function_is_killed_and_the_next_call_works(pool: ProcessPool, work: tuple[Any, ...]) -> None:
    pid = pool.call(os.getpid, timeout=60)
    began = time.monotonic()
    with pytest.raises(CallTimeoutError, match=r"not done within 0\.3 seconds"):
        pool.call(*work, timeout=0.3)
    assert time.monotonic() - began >= 0.3
    assert not alive(pid)
    assert pool.call(operator.add, 1, 2, timeout=60) == 3


def test_children_of_a_killed_function_end_too(pool: ProcessPool, module: Callable[[str], Any], tmp_path: Path) -> None:
    text = """
import subprocess
def f(to):
    child = subprocess.Popen(["sleep", "600"])
    open(to, "w").write(str(child.pid))
    child.wait()
"""
    function, path = module(text).f, tmp_path / "pid"
    for limit in LIMITS:
        with pytest.raises(CallTimeoutError):
            pool.call(function, str(path), timeout=limit)
        if path.exists() and path.read_text():
            break
    assert gone(int(path.read_text()))


def test_a_timeout_of_its_own_is_not_ours(pool: ProcessPool, module: Callable[[str], Any]) -> None:
    with pytest.raises(TimeoutError, match="socket") as caught:
        pool.call(module("def f(): raise TimeoutError('socket')").f, timeout=60)
    assert not isinstance(caught.value, CallTimeoutError)


def test_imports_do_not_count(pool: ProcessPool, module: Callable[[str], Any]) -> None:
    for limit in LIMITS:
        text = f"import sys, time\nif 'pytest' not in sys.modules: time.sleep({limit + 0.3})\n"
        with suppress(CallTimeoutError):
            pool.call(module(text + "def f(): time.sleep(0.05)").f, timeout=limit)
            return
    pytest.fail("the import was counted")


@pytest.mark.parametrize(
    ("function", "args", "code", "says"),
    [
        (os._exit, (3,), 3, "exit code 3"),
        (ctypes.string_at, (0,), -signal.SIGSEGV, r"signal 11 \(Segmentation fault\)"),
        (signal.raise_signal, (signal.SIGKILL,), -signal.SIGKILL, r"signal 9 \(Killed\)"),
    ],
)
def test_a_worker_that_dies(pool: ProcessPool, function: Any, args: tuple[Any, ...], code: int, says: str) -> None:
    with pytest.raises(WorkerDied, match=says) as caught:
        pool.call(function, *args, timeout=60)
    assert caught.value.exit_code == code
    assert pool.call(len, "abc", timeout=60) == 3


def test_a_worker_that_died_idle_is_replaced(pool: ProcessPool) -> None:
    pid = pool.call(os.getpid, timeout=60)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert pool.call(len, "abc", timeout=60) == 3


ERRORS = """
import sys
class Two(Exception):
    def __init__(self, a, b): super().__init__(f"{a} and {b}")
class Mute(Exception):
    def __str__(self): raise ValueError
def two(): raise Two(1, 2)
def mute(): raise Mute
def gone():
    class Local(Exception): pass
    raise Local("here")
def leave(): sys.exit(4)
def interrupt(): raise KeyboardInterrupt
def unsendable(): return (n for n in [])
def deep():
    found = []
    for _ in range(10**5): found = [found]
    return found
"""


def test_errors_are_raised_here(pool: ProcessPool, module: Callable[[str], Any]) -> None:
    made = module(ERRORS)
    with pytest.raises(ZeroDivisionError, match="by zero"):
        pool.call(operator.floordiv, 1, 0, timeout=60)
    with pytest.raises(json.JSONDecodeError) as caught:
        pool.call(json.loads, "[1,", timeout=60)
    assert caught.value.pos == 3
    for name, text in (
        ("two", "Two: 1 and 2"),  # pickles, but cannot be read back
        ("gone", "Local: here"),
        ("leave", "SystemExit: 4"),
        ("interrupt", "KeyboardInterrupt"),
    ):
        with pytest.raises(RuntimeError) as caught_text:
            pool.call(getattr(made, name), timeout=60)
        assert (type(caught_text.value), str(caught_text.value)) == (RuntimeError, text)
    for name, kind in (("mute", made.Mute), ("unsendable", TypeError), ("deep", RecursionError)):
        with pytest.raises(kind):
            pool.call(getattr(made, name), timeout=60)
    assert pool.call(len, "abc", timeout=60) == 3


def test_printing_does_not_break_the_answer(module: Callable[[str], Any], capfd: pytest.CaptureFixture[str]) -> None:
    text = """
import os, sys
def f():
    print("told", flush=True)
    os.write(1, b"raw ")
    os.system("echo child")
    return sys.stdin.read()
"""
    pool = ProcessPool()  # of its own: a worker keeps the stderr it was started with
    assert pool.call(module(text).f, timeout=60) == ""
    pool.close()
    assert capfd.readouterr() == ("", "told\nraw child\n")


def test_the_limit_of_memory() -> None:
    pool = ProcessPool(max_memory_mb=300)
    with pytest.raises(MemoryError):
        pool.call(bytearray, 400 * 2**20, timeout=60)
    assert pool.call(len, bytes(2**20), timeout=60) == 2**20
    pool.close()


def _here() -> None: ...


def test_what_a_worker_cannot_find() -> None:
    pool = ProcessPool()

    def inner() -> None: ...

    class Local: ...

    for function in (lambda: 1, inner, Local, partial(inner)):
        with pytest.raises(ConfigError, match="Define it with `def` at the top of a module"):
            pool.call(function, timeout=1)
    with pytest.raises(ConfigError, match="is defined inside a function"):
        pool.call(len, Local(), timeout=1)
    with pytest.raises(ConfigError, match="arguments that pickle"):
        pool.call(len, (n for n in []), timeout=1)
    assert pool._workers == set()
    for options in ({"size": 0}, {"max_memory_mb": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            ProcessPool(**options)


def run(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True, **options
    )


def test_functions_of_the_script_are_refused() -> None:
    code = """
from gymtune.tools.processes import default_pool
class A: ...
def f(): return 1
for function, args in ((f, ()), (len, ([A()],))):
    try:
        default_pool().call(function, *args, timeout=5)
    except Exception as error:
        print(error)
"""
    done = run(code)
    assert done.stderr == ""
    assert done.stdout.count("belongs to the script that was started") == 2


def test_the_path_of_the_parent_holds(tmp_path: Path, module: Callable[[str], Any]) -> None:
    made = module("def f(): return __file__")
    pool = ProcessPool()
    assert pool.call(len, "", timeout=60) == 0  # started before the path changed
    assert pool.call(made.f, timeout=60) == made.__file__
    pool.close()


MEET = """
import os, time
def meet(folder, count):
    "Come, and wait until so many have come."
    open(os.path.join(folder, str(os.getpid())), "w").close()
    end = time.monotonic() + 60
    while len(os.listdir(folder)) < count and time.monotonic() < end: time.sleep(0.01)
    return len(os.listdir(folder))
"""


def test_threads_share_at_most_size_workers(module: Callable[[str], Any], tmp_path: Path) -> None:
    pool, made = ProcessPool(3), module(MEET)
    (tmp_path / "here").mkdir()
    with ThreadPoolExecutor(12) as threads:
        met = [threads.submit(pool.call, made.meet, str(tmp_path / "here"), 3, timeout=100) for _ in range(3)]
        assert [done.result() for done in met] == [3, 3, 3]  # three processes, under way at once
        found = [threads.submit(pool.call, operator.mul, n, n, timeout=60) for n in range(200)]
        assert [done.result() for done in found] == [n * n for n in range(200)]
    assert len(pool._workers) == 3
    pool.close()


def test_the_wait_for_a_free_worker_does_not_count(pool: ProcessPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        for limit in LIMITS:  # 8 sleeps of a third of the limit on 2 workers take longer than the limit
            calls = [threads.submit(pool.call, time.sleep, limit / 3, timeout=limit) for _ in range(8)]
            if not any(call.exception() for call in calls):
                return
    pytest.fail("the wait was counted")


def test_close_ends_a_call_under_way(module: Callable[[str], Any], tmp_path: Path) -> None:
    pool, made = ProcessPool(2), module(MEET)
    pid = pool.call(os.getpid, timeout=60)
    (tmp_path / "here").mkdir()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.call, made.meet, str(tmp_path / "here"), 2, timeout=60)
        assert wait_for((tmp_path / "here" / str(pid)).exists)
        pool.close()
        with pytest.raises(WorkerDied):
            call.result()
    assert not alive(pid)
    assert pool.call(len, "a", timeout=60) == 1  # starts again
    pool.close()


def test_a_pool_that_is_dropped_leaves_no_process() -> None:
    pool = ProcessPool()
    pid = pool.call(os.getpid, timeout=60)
    del pool
    assert not alive(pid)


HANG = """
import operator, os, sys, threading
from gymtune.tools.processes import default_pool
print(default_pool().call(os.getpid, timeout=60), flush=True)
threading.Thread(target=lambda: default_pool().call(operator.pow, 10, 10**9, timeout=60), daemon=True).start()
"""


def test_workers_end_with_the_interpreter() -> None:
    done = run(HANG + "import time; time.sleep(0.3)")
    assert done.returncode == 0
    assert gone(int(done.stdout))


@pytest.mark.parametrize("busy", [True, False])
def test_workers_end_when_the_parent_is_killed(busy: bool) -> None:
    code = (HANG if busy else HANG.partition("threading.Thread")[0]) + "sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert alive(pid)
        parent.kill()
    assert gone(pid)


def test_after_a_fork_each_has_its_own() -> None:
    code = """
import os, time
from gymtune.tools.processes import default_pool
mine = default_pool().call(os.getpid, timeout=60)
if os.fork() == 0:  # ends what is its own, and that is nothing
    raise SystemExit
assert os.wait()[1] == 0
assert default_pool().call(os.getpid, timeout=60) == mine
if os.fork() == 0:
    assert default_pool().call(os.getpid, timeout=60) != mine
    raise SystemExit
assert os.wait()[1] == 0
assert default_pool().call(os.getpid, timeout=60) == mine
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_that_end_leave_the_worker(pool: ProcessPool) -> None:
    pids: list[int] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: pids.append(pool.call(os.getpid, timeout=60)))
        thread.start()
        thread.join()
    assert pids[0] == pids[1]


def test_the_shared_pool() -> None:
    assert default_pool() is default_pool()
    assert default_pool().size >= 8
