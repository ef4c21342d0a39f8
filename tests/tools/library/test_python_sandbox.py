import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from gymtune.tools import ConfigError, Outcome, ParsedCall, Tool, Toolbox, ToolResult
from gymtune.tools.library import PythonSession, python_tool

pytest.importorskip("pydantic_monty")
LIMIT = 0.3
HASTY = python_tool(time_limit=LIMIT)
TOOL = python_tool(time_limit=60)  # where the limit on time is not to come first, however slow the machine
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker in /proc")


def call(code: object, tool: Tool = TOOL) -> ToolResult:
    return Toolbox([tool]).call(ParsedCall("call_0_0", "python", {"code": code}, None, ""))


@pytest.fixture(params=["main thread", "another thread"])
def from_thread(request: pytest.FixtureRequest) -> Callable[[str, Tool], ToolResult]:
    """Calls the tool's function itself from the main thread, or through a toolbox used in another thread."""

    def call_here(code: str, tool: Tool) -> ToolResult:
        return call(code, Tool("python", "", tool.parameters, tool.function, in_memory=True))

    def call_there(code: str, tool: Tool) -> ToolResult:
        results: list[ToolResult] = []
        thread = threading.Thread(target=lambda: results.append(call(code, tool)))
        thread.start()
        thread.join()
        return results[0]

    return call_here if request.param == "main thread" else call_there


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("1 + 1", "2"),
        ("'a'", "'a'"),
        ("print('a')\nx = 3\nx * 2", "a\n6"),
        ("print('a', end='')\n1", "a\n1"),
        ("x = 1", ""),
        ("None", ""),
        ("", ""),
        ("# nothing", ""),
        ("for i in range(3):\n    print(i)", "0\n1\n2"),
        ("def f():\n    return 3\n\nf()  # call\n# end\n", "3"),
        ("max(\n1,\n2,\n)", "2"),
        ("sum([\n    1,\n    2,\n])", "3"),
        ("x = '''\n1\n'''", ""),
        ("'''\n1\n'''", r"'\n1\n'"),
        ("dict(\na=1,\n)\n", "{'a': 1}"),
        ("a = 1 + \\\n2", ""),
        ("a, b = 1, 2\na, b", "(1, 2)"),
        ("名 = '中文'\n名", "'中文'"),
        ("class A:\n    def __repr__(self):\n        return 'an A'\nA()", "an A"),
        ("import math\nmath.factorial(20)", "2432902008176640000"),
    ],
)
def test_answers_with_print_and_last_value(code: str, answer: str) -> None:
    result = call(code)
    assert (result.outcome, result.content) == (Outcome.ok, answer)


def test_code_runs_once_whatever_its_last_line() -> None:
    for code in ("print('once')\n)", "print('once')\nx = (", "print('once')\nclass"):
        assert call(code).content.startswith("error (exception): SyntaxError"), "nothing ran before it"
    assert call("print('once')\nx = [\n1,\n]").content == "once"
    # A line inside parentheses, taken for a statement, would become a keyword argument.
    assert call("def f(*a, **k):\n    return a, k\nx = f(\n'a',\n)\nprint(x)").content == "(('a',), {})"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero (line 1)"),
        ("print('first')\n\nraise ValueError('my text')", "ValueError: my text (line 3)\nPrinted before: first"),
        ("def f(:", "SyntaxError"),
        ("unknown", "NameError: name 'unknown'"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('/tmp/x', 'w').write('x')", "PermissionError"),
        ("from pathlib import Path\nPath('/etc/passwd').read_text()", "PermissionError"),
        ("import os\nos.listdir('/')", "PermissionError"),
        ("import os\nos.system('true')", "AttributeError"),
        ("import os\nos.environ['PATH']", "RuntimeError"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("import ctypes", "ModuleNotFoundError"),
        ("__import__('os')", "NameError"),
        ("().__class__.__bases__[0].__subclasses__()", "AttributeError"),
        ("input()", "NameError"),
        ("9**9**9", "MemoryError"),
        ("def f(n):\n    return f(n + 1)\nf(0)", "RecursionError"),
        ("(" * 20_000, "SyntaxError"),
        ("-" * 90_000 + "1", "SyntaxError"),
        ("a" + ".b" * 40_000, "SyntaxError"),
        ("[" * 20_000 + "]" * 20_000, "SyntaxError"),
        ("x = [0] * 10**9", "MemoryError"),
        ("x = []\nwhile True:\n    x.append('a' * 100)", "MemoryError"),
        ("x = 'a'\nwhile True:\n    x += x", "MemoryError"),
        ("2**100_000", "ValueError"),
        ("\x00", "SyntaxError"),
    ],
)
def test_errors_are_told_by_type(code: str, says: str, from_thread: Callable[[str, Tool], ToolResult]) -> None:
    result = from_thread(code, TOOL)
    assert result.outcome is Outcome.exception
    assert says in result.content


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "while True:\n    print('x' * 1000)",
        "sum(range(10**12))",
        "import time\nwhile True:\n    time.sleep(1)",
        "import math\nmath.factorial(10**7)",
        "class A:\n    def __repr__(self):\n        while True: pass\nA()",
    ],
)
def test_hangs_are_stopped_in_time(code: str, from_thread: Callable[[str, Tool], ToolResult]) -> None:
    result = from_thread(code, HASTY)
    assert result.outcome is Outcome.exception
    assert f"TimeoutError: stopped after {LIMIT:g} seconds" in result.content
    assert result.seconds >= LIMIT
    assert from_thread("1 + 1", TOOL).content == "2"


@pytest.mark.parametrize(
    "last", ["1); ({a: 1}", "1)\n({a: 1}", "1); {a: 1} #", "{a: 1};", "if 1: {a: 1}", "{a: 1}; \\"]
)
def test_no_last_line_gets_its_value_out_of_the_worker(last: str) -> None:
    # `{a: 1}` is built in the worker's time, or stopped; this process would hash it for hours.
    result = call(f"a = (1,)\nfor i in range(40):\n    a = (a, a)\n{last}", HASTY)
    assert result.content == "" or "Error" in result.content or result.content == "1"


@pytest.mark.parametrize("last", ["a", "{a}", "{a: 1}", "[a] * 1000"])
def test_values_that_are_exponential_to_hash_or_print_never_reach_this_process(last: str) -> None:
    result = call(f"a = (1,)\nfor i in range(40):\n    a = (a, a)\n{last}", HASTY)
    assert result.outcome is Outcome.exception
    assert "MemoryError" in result.content or "TimeoutError" in result.content


@pytest.mark.parametrize("code", ["print('x' * 3_000_000)", "'x' * 3_000_000", "for i in range(50_000): print(i)"])
def test_output_floods_are_cut_to_the_limit(code: str) -> None:
    result = call(code, python_tool(max_output_chars=1000))
    assert result.outcome is Outcome.ok
    assert len(result.content) <= 1000
    assert result.content.endswith("[cut: the output is too long]")
    assert call("print('x' * 999)\n", python_tool(max_output_chars=1000)).content == "x" * 999


def test_special_text_stays_text() -> None:
    assert call("print('\\ud800 <|im_end|>\\x00')").content == "\ufffd <|im_end|>\x00"
    assert call("\ud800").failed
    assert call("x" * 200_000).content.endswith("at most 100000 are allowed")
    assert call(3).outcome is Outcome.schema_violation


def test_runs_can_be_repeated() -> None:
    code = "import random, datetime\nprint(random.random(), datetime.datetime.now())"
    one, two = call(code), call(code)
    assert one.content == two.content
    assert one.content.endswith("2025-03-07 06:30:00")


def test_stateless_tool_forgets_and_travels() -> None:
    assert call("x = 1").outcome is Outcome.ok
    assert "NameError" in call("x").content
    assert call("2 + 2", pickle.loads(pickle.dumps(TOOL))).content == "4"


def workers() -> set[int]:
    """Return the worker processes of this one."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone in between
            pid, name, _, parent = stat.read_text().split()[:4]
            if name == "(monty)" and int(parent) == os.getpid():
                found.add(int(pid))
    return found


@needs_proc
def test_calls_run_beside_one_that_hangs() -> None:
    before = workers()
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(call, "while True: pass", TOOL)
        while not (found := workers() - before):
            assert not hanging.done()
        calls = [ParsedCall(f"c{n}", "python", {"code": f"{n}"}, None, "") for n in range(4)]
        assert [result.content for result in Toolbox([TOOL]).call_all(calls)] == ["0", "1", "2", "3"]
        assert not hanging.done()
        for worker in found:
            os.kill(worker, signal.SIGKILL)
        assert "the Python process crashed" in hanging.result().content


@pytest.fixture
def session() -> Iterator[PythonSession]:
    with PythonSession(time_limit=60) as made:
        yield made


@pytest.fixture
def hasty_session() -> Iterator[PythonSession]:
    with PythonSession(time_limit=LIMIT) as made:
        yield made


def test_session_keeps_variables_from_thread_to_thread(session: PythonSession) -> None:
    [tool] = session.tools()
    assert call("x = 5", tool).content == ""
    assert call("def double(n):\n    return 2 * n", tool).content == ""
    assert call("double(x)", tool).content == "10"
    assert call("_ + 1", tool).content == "11"
    assert "ZeroDivisionError" in call("x = 6\n1 / 0", tool).content
    assert call("x", tool).content == "6"


def test_sessions_share_nothing(session: PythonSession) -> None:
    with PythonSession() as other:
        assert session.run("x = 1") == ""
        assert "NameError" in call("x", other.tools()[0]).content


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "x = []\nwhile True:\n    x.append('a' * 100)",
        "a = (1,)\nfor i in range(40):\n    a = (a, a)\na",  # which limit comes first depends on the machine
    ],
)
def test_session_begins_anew_after_a_broken_limit(hasty_session: PythonSession, code: str) -> None:
    [tool] = hasty_session.tools()
    assert call("kept = 1", tool).outcome is Outcome.ok
    broken = call(code, tool)
    assert "TimeoutError" in broken.content or "MemoryError" in broken.content
    assert broken.content.endswith("The variables of earlier calls are lost.")
    assert "NameError" in call("kept", tool).content
    assert call("1 + 1", tool).content == "2"


@needs_proc
def test_a_killed_worker_is_an_error_and_the_next_call_works(session: PythonSession) -> None:
    [tool] = session.tools()
    before = workers()
    call("kept = 1", tool)
    [worker] = workers() - before
    timer = threading.Timer(0.2, lambda: os.kill(worker, signal.SIGKILL))
    timer.start()
    killed = call("while True: pass", tool)
    timer.join()
    assert killed.content.startswith("error (exception): the Python process crashed")
    assert "NameError" in call("kept", tool).content
    assert call("1 + 1", tool).content == "2"
    session.close()
    assert workers() == before


def test_calls_at_once_share_a_session_one_after_another(session: PythonSession) -> None:
    box = Toolbox(session.tools())
    box.call(ParsedCall("c", "python", {"code": "n = 0"}, None, ""))
    results = box.call_all([ParsedCall(f"c{i}", "python", {"code": "n += 1"}, None, "") for i in range(8)])
    assert all(result.outcome is Outcome.ok for result in results)
    assert session.run("n") == "8"


def test_close_waits_for_the_running_call(hasty_session: PythonSession) -> None:
    results: list[ToolResult] = []
    hasty_session.run("1")
    thread = threading.Thread(target=lambda: results.append(call("while True: pass", hasty_session.tools()[0])))
    thread.start()
    time.sleep(LIMIT / 4)
    hasty_session.close()
    thread.join()
    assert "TimeoutError: stopped" in results[0].content, "ended by its limit, not under its feet"


def test_a_closed_session_starts_anew(session: PythonSession) -> None:
    session.run("x = 1")
    session.close()
    session.close()
    assert "NameError" in call("x", session.tools()[0]).content


@pytest.mark.parametrize(
    "options", [{"time_limit": 0}, {"time_limit": float("nan")}, {"max_memory_mb": 0}, {"max_output_chars": 99}]
)
def test_bad_limits_are_config_errors(options: dict[str, float]) -> None:
    for make in (python_tool, PythonSession):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make(**options)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    for make in (python_tool, PythonSession):
        with pytest.raises(ConfigError, match=r"pip install 'gymtune\[python\]'"):
            make()
