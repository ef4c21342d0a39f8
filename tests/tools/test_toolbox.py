import asyncio
import importlib
import json
import operator
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from gymtune.tools import Outcome, ParsedCall, Tool, Toolbox, ToolResult, tool
from gymtune.tools.errors import ConfigError, ToolError

FREE = {"type": "object"}
HANG = 60.0  # seconds after which hanging tools end by themselves: a broken limit fails its test and stalls no other
ONE: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def make(function: Callable[..., Any], name: str = "t", **options: Any) -> Tool:
    return Tool(**{"name": name, "description": "", "parameters": FREE, "function": function, **options})


def ask(name: str = "t", call_id: str = "c", **arguments: Any) -> ParsedCall:
    return ParsedCall(call_id, name, arguments, None, "raw")


def run(function: Callable[..., Any], **options: Any) -> ToolResult:
    """Run in a thread and inline, where both end alike."""
    limit = options.pop("max_result_chars", 4096)
    threaded, inline = (
        Toolbox([make(function, in_memory=in_memory, **options)], max_result_chars=limit).call(ask())
        for in_memory in (False, True)
    )
    assert (threaded.outcome, threaded.content) == (inline.outcome, inline.content)
    return inline


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds hanging tools, and lets them go when the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ({"é": [1, None]}, '{"é": [1, null]}'),
        ("<|im_end|><|im_start|>system", "<|im_end|><|im_start|>system"),
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\ud83d\ude00", "😀"),
        (["\ud800"], '["\ufffd"]'),
        (Outcome.ok, "ok"),
    ],
)
def test_result_text(value: object, text: str) -> None:
    result = run(lambda: value)
    assert (result.outcome, result.content, result.failed) == (Outcome.ok, text, False)
    assert result.message() == {"role": "tool", "tool_call_id": "c", "name": "t", "content": text}


@pytest.mark.parametrize(
    "value", [float("nan"), [float("inf")], {1, 2}, object(), b"x", [10**5000]], ids=lambda value: type(value).__name__
)
def test_results_without_json_form(value: object) -> None:
    result = run(lambda: value)
    assert result.outcome is Outcome.exception
    assert "no JSON form" in result.content


def test_a_circular_result() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "no JSON form" in run(lambda: loop).content


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "content"),
    [
        (ToolError("give a positive n"), "error (exception): give a positive n"),
        (ValueError("bad"), "error (exception): ValueError: bad"),
        (KeyError("k"), "error (exception): KeyError: 'k'"),
        (ValueError(), "error (exception): ValueError"),
        (TimeoutError("socket"), "error (exception): TimeoutError: socket"),
        (SystemExit(1), "error (exception): SystemExit: 1"),
        (asyncio.CancelledError(), "error (exception): CancelledError"),
        (_UnprintableError(), "error (exception): _UnprintableError"),
        (ToolError("\ud800"), "error (exception): \ufffd"),
    ],
)
def test_exceptions(error: BaseException, content: str) -> None:
    def fail() -> None:
        raise error

    result = run(fail)
    assert (result.outcome, result.content, result.failed) == (Outcome.exception, content, True)


@pytest.mark.parametrize("in_memory", [True, False])
def test_keyboard_interrupt_passes_through(in_memory: bool) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Toolbox([make(interrupted, in_memory=in_memory)]).call(ask())


def test_truncation_counts_what_is_cut() -> None:
    result = run(lambda: "x" * 25, max_result_chars=10)
    assert (result.outcome, result.content) == (Outcome.truncated, "x" * 10 + "\n[15 more characters cut]")
    assert not result.failed
    assert run(lambda: "x" * 10, max_result_chars=10).outcome is Outcome.ok


def test_errors_are_short() -> None:
    def fail() -> None:
        raise ToolError("y" * 10**6)

    assert len(run(fail).content) < 1100
    assert len(run(fail, max_result_chars=50).content) < 100


def test_the_tool_is_not_run_on_the_models_mistakes() -> None:
    ran: list[int] = []

    def record(n: int) -> None:
        ran.append(n)

    box = Toolbox([make(record, "add", parameters=ONE)])
    broken = box.call(ParsedCall("c", "add", None, "the call is not JSON", "raw"))
    assert (broken.outcome, broken.content) == (Outcome.parse_error, "error (parse_error): the call is not JSON")
    both = box.call(ParsedCall("c", "add", {"n": 1}, "nested", "raw"))  # an error wins over readable arguments
    assert both.outcome is Outcome.parse_error
    unknown = box.call(ask("addd", n=1))
    assert unknown.outcome is Outcome.unknown_tool
    assert unknown.content == "error (unknown_tool): no tool is named 'addd'. Did you mean 'add'?"
    violated = box.call(ask("add", n="1"))
    assert violated.content == "error (schema_violation): at $.n: '1' is not of type 'integer'"
    assert (violated.outcome, violated.violation) == (Outcome.schema_violation, "at $.n: '1' is not of type 'integer'")
    assert ran == []
    assert all(result.failed and result.seconds == 0 for result in (broken, both, unknown, violated))


def test_unknown_tool_without_tools_and_with_a_huge_name() -> None:
    assert Toolbox([]).call(ask("x")).content == "error (unknown_tool): no tool is named 'x'. There are no tools."
    assert len(Toolbox([make(len)]).call(ask("y" * 10**6)).content) < 200


def test_report_runs_and_records() -> None:
    box = Toolbox([make(lambda n: n, parameters=ONE, on_violation="report", in_memory=True)])
    result = box.call(ask(n="1"))
    assert (result.outcome, result.content) == (Outcome.ok, "1")
    assert result.violation == "at $.n: '1' is not of type 'integer'"
    assert box.call(ask(n=1)).violation is None


def in_this_thread(work: Callable[[], Any]) -> Any:
    return work()


def in_another_thread(work: Callable[[], Any]) -> Any:
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(work()))
    thread.start()
    thread.join()
    return box[0]


def in_an_event_loop(work: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return work()

    return asyncio.run(main())


@pytest.mark.parametrize("where", [in_this_thread, in_another_thread, in_an_event_loop])
def test_hanging_tools_time_out(where: Callable[[Callable[[], Any]], Any], gate: threading.Event) -> None:
    cancelled = threading.Event()

    async def sleeps() -> None:
        try:
            await asyncio.sleep(HANG)
        finally:
            cancelled.set()

    async def blocks_its_loop() -> None:
        gate.wait(HANG)

    for function in (partial(gate.wait, HANG), sleeps, blocks_its_loop):
        result = where(partial(Toolbox([make(function, time_limit=0.1)]).call, ask()))
        assert result.outcome is Outcome.timeout
        assert result.content == "error (timeout): no result within 0.1 seconds"
        assert 0.1 <= result.seconds < HANG
    assert cancelled.wait(HANG)  # a coroutine is cancelled, so that it can clean up


def test_async_tools_run_from_a_running_loop() -> None:
    @tool
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    assert in_an_event_loop(lambda: Toolbox([double]).call(ask("double", n=4))).content == "8"


def test_a_turn_runs_together_and_answers_in_call_order(gate: threading.Event) -> None:
    barrier = threading.Barrier(3)

    def meet(n: int) -> int:
        barrier.wait(HANG)  # passes only if three calls are under way at once
        return n

    tools = [
        make(meet, "meet", parameters=ONE, time_limit=HANG),
        make(partial(gate.wait, HANG), "hang", time_limit=0.3),
        make(lambda: 0, "quick", in_memory=True),
    ]
    calls = [
        ask("hang", "a"),
        ask("meet", "b", n=1),
        ask("quick", "c"),
        ask("meet", "d", n=2),
        ask("no", "e"),
        ask("meet", "f", n=3),
    ]
    results = Toolbox(tools).call_all(calls)
    assert [result.tool_call_id for result in results] == list("abcdef")
    assert [result.outcome.value for result in results] == ["timeout", "ok", "ok", "ok", "unknown_tool", "ok"]
    assert [results[i].content for i in (1, 2, 3, 5)] == ["1", "0", "2", "3"]


def test_seconds_are_the_calls_own_and_not_the_wait_for_another() -> None:
    threads: SimpleQueue[threading.Thread] = SimpleQueue()

    def outlasts() -> None:
        threads.get(timeout=HANG).join(HANG)
        time.sleep(0.2)

    tools = [make(outlasts, "slow", time_limit=HANG), make(lambda: threads.put(threading.current_thread()), "quick")]
    slow, quick = Toolbox(tools).call_all([ask("slow"), ask("quick")])
    assert (slow.outcome, quick.outcome) == (Outcome.ok, Outcome.ok)
    assert quick.seconds + 0.2 <= slow.seconds


def test_done_too_late_is_a_timeout_whoever_was_waited_for(gate: threading.Event) -> None:
    late = make(lambda: gate.wait(0.15), "late", time_limit=0.05)
    results = Toolbox([make(partial(gate.wait, HANG), "hang", time_limit=0.4), late]).call_all(
        [ask("hang"), ask("late")]
    )
    assert [result.outcome for result in results] == [Outcome.timeout, Outcome.timeout]


def test_hanging_calls_of_a_turn_do_not_add_up(gate: threading.Event) -> None:
    results = Toolbox([make(partial(gate.wait, HANG), time_limit=1)]).call_all([ask() for _ in range(32)])
    assert {result.outcome for result in results} == {Outcome.timeout}
    assert results[-1].seconds < 30  # 32 when waited for one after the other


def test_more_calls_than_threads() -> None:
    results = Toolbox([make(lambda n: n, parameters=ONE)]).call_all([ask(n=n) for n in range(100)])
    assert [result.content for result in results] == [str(n) for n in range(100)]


def test_in_memory_runs_in_the_callers_thread() -> None:
    box = Toolbox([make(lambda: threading.current_thread() is threading.main_thread(), in_memory=True)])
    assert box.in_memory
    assert box.call(ask()).content == "true"
    assert not Toolbox([make(len), make(len, "u", in_memory=True)]).in_memory


def test_names_and_schemas_keep_their_order() -> None:
    box = Toolbox([make(len, "b"), make(len, "a")])
    assert box.names == ["b", "a"]
    assert [schema["function"]["name"] for schema in box.schemas()] == ["b", "a"]


def test_configuration_is_checked() -> None:
    with pytest.raises(ConfigError, match="twice: a"):
        Toolbox([make(len, "a"), make(len, "b"), make(len, "a")])
    with pytest.raises(ConfigError, match="max_result_chars"):
        Toolbox([], max_result_chars=0)


def test_the_interpreter_exits_while_a_tool_hangs() -> None:
    code = """
import threading
from gymtune.tools import ParsedCall, Tool, Toolbox
hang = Tool("hang", "", {"type": "object"}, threading.Event().wait, time_limit=0.05)
assert Toolbox([hang]).call(ParsedCall("c", "hang", {}, None, "")).outcome == "timeout"
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=HANG, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def children() -> set[int]:
    """Processes that this one has started and that still run."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def isolated(function: Callable[..., Any], name: str = "t", **options: Any) -> Tool:
    """`function` takes positional arguments in the standard library: `partial` gives them."""
    return make(function, name, isolate=True, **options)


@pytest.mark.parametrize("where", [in_this_thread, in_another_thread, in_an_event_loop])
def test_an_isolated_tool_is_killed(where: Callable[[Callable[[], Any]], Any]) -> None:
    # Minutes in C with the interpreter's lock held: in a thread, nothing else here would run.
    box = Toolbox([isolated(partial(operator.pow, 10, 10**9), "hang", time_limit=0.4), isolated(os.getpid, "pid")])
    pid = int(box.call(ask("pid")).content)
    assert pid in children()
    result = where(partial(box.call, ask("hang")))  # by the worker that was used last
    assert (result.outcome, result.content) == (Outcome.timeout, "error (timeout): no result within 0.4 seconds")
    assert result.seconds >= 0.4
    assert pid not in children()
    assert box.call(ask("pid")).outcome is Outcome.ok


def test_isolated_endings() -> None:
    def one(function: Callable[..., Any], **arguments: Any) -> tuple[str, str]:
        result = Toolbox([isolated(function)]).call(ask(**arguments))
        return result.outcome.value, result.content

    assert one(json.dumps, obj=[1]) == ("ok", "[1]")
    assert one(partial(os._exit, 3)) == (
        "exception",
        "error (exception): WorkerDied: the worker process ended with exit code 3",
    )
    assert one(partial(sys.exit, 3)) == ("exception", "error (exception): RuntimeError: SystemExit: 3")
    assert one(json.loads, s="[")[1].startswith("error (exception): JSONDecodeError: Expecting value")
    assert "no JSON form" in one(set)[1]
    assert one(partial(operator.mul, "x", 10**6))[0] == "truncated"


MEETING = f"""
import os, time

def meet(folder, n, stay=0):
    "Return n as soon as six are under way at once, stay seconds later."
    open(os.path.join(folder, str(n)), "w").close()
    end = time.monotonic() + {HANG}
    while len(os.listdir(folder)) < 6:
        if time.monotonic() > end:
            raise TimeoutError("the others did not come")
        time.sleep(0.01)
    time.sleep(stay)
    return n
"""


def test_isolated_calls_of_a_turn_run_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_meeting.py").write_text(MEETING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    meet = partial(importlib.import_module("a_meeting").meet, str(tmp_path / "here"))
    (tmp_path / "here").mkdir()
    tools = [isolated(meet, "meet", time_limit=2 * HANG), isolated(partial(meet, stay=HANG), "hang", time_limit=0.6)]
    results = Toolbox(tools).call_all([ask("hang" if n == 3 else "meet", str(n), n=n) for n in range(6)])
    assert [result.tool_call_id for result in results] == ["0", "1", "2", "3", "4", "5"]
    assert [results[n].content for n in (0, 1, 2, 4, 5)] == ["0", "1", "2", "4", "5"]
    assert results[3].outcome is Outcome.timeout
