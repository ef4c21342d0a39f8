"""A real server of the `mcp` package, in a process of its own, over stdio and over HTTP."""

import gc
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gymtune.tools import ConfigError, Outcome, ParsedCall, Toolbox, ToolResult
from gymtune.tools.library.mcp_client import McpServer

pytest.importorskip("mcp")

SERVER = """
import os, sys, threading, time
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("demo")
tool = server.tool

@tool()
def add(a: int, b: int = 1) -> int:
    "Add two numbers."
    return a + b

@tool()
def pid() -> str:
    return str(os.getpid())

@tool()
def hang() -> str:
    time.sleep(60)

@tool()
def die() -> str:
    os._exit(3)

@tool()
def refuse(why: str) -> str:
    raise ToolError(f"not so: {why}")

@tool()
def lines() -> list[str]:
    return ["one", "two"]

@tool()
def picture() -> list:
    return ["seen", Image(data=b"x", format="png")]

released = threading.Event()

@tool()
def wait() -> bool:
    return released.wait(60)

@tool()
def release() -> None:
    released.set()

@tool(name="with space/" + "n" * 80)
def strange(name: str, time_limit: int, self: int) -> str:
    return f"{name} {time_limit} {self}"

@tool(name="with space_" + "n" * 80)
def stranger() -> str:
    print("to stderr", file=sys.stderr)
    return "other"

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run()
"""

# Speaks the protocol by hand: what the package's own server would not say.
RAW = """
import json, os, sys
SCHEMA = {"type": "object"}
PAGES = [{"tools": [{"name": name, "inputSchema": SCHEMA} for name in ("a", "pid")], "nextCursor": "2"},
         {"tools": [{"name": "b", "inputSchema": {"type": "object", "properties": {"n": {"type": "numbr"}}}}]}]
RESULTS = {
    "pid": {"content": [{"type": "text", "text": str(os.getpid())}]},
    "a": {"content": [{"type": "image", "data": "", "mimeType": "image/png"}], "structuredContent": {"n": [1]}},
    "b": {"content": [{"type": "resource", "resource": {"uri": "file:///f", "text": "in the file"}},
                      {"type": "audio", "data": "", "mimeType": "audio/wav"}]},
}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    params, answer = asked.get("params", {}), {"error": {"code": -32601, "message": "Method not found"}}
    if asked["method"] == "initialize":
        answer = {"result": {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                             "serverInfo": {"name": "raw", "version": "1"}}}
    elif asked["method"] == "tools/list":
        answer = {"result": PAGES[params.get("cursor") == "2"]}
    elif asked["method"] == "tools/call" and params["arguments"].get("code"):
        answer = {"error": {"code": params["arguments"]["code"], "message": "no such thing"}}
    elif asked["method"] == "tools/call":
        answer = {"result": RESULTS[params["arguments"].get("like", params["name"])]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


def ask(name: str, /, **arguments: Any) -> ParsedCall:
    return ParsedCall("c", name, arguments, None, "")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within a minute."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def raw_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "raw.py"
    path.write_text(RAW, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def raw(raw_script: Path) -> Iterator[McpServer]:
    with McpServer([sys.executable, str(raw_script)], start_seconds=60) as server:
        yield server


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def start_http(script: Path) -> Iterator[Callable[[int], None]]:
    """Starts the server on a port where none listens, and waits until it does."""
    started: list[subprocess.Popen[bytes]] = []

    def listens(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def start(port: int) -> None:
        command = [sys.executable, str(script), str(port)]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        assert wait_for(lambda: listens(port))

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def stdio(script: Path) -> Iterator[McpServer]:
    with McpServer([sys.executable, str(script)], start_seconds=60) as server:
        yield server


@pytest.fixture(scope="module")
def http_port(start_http: Callable[[int], None]) -> int:
    port = free_port()
    start_http(port)
    return port


@pytest.fixture(scope="module", params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[McpServer]:
    if request.param == "stdio":
        yield request.getfixturevalue("stdio")
    else:
        with McpServer(url=f"http://127.0.0.1:{request.getfixturevalue('http_port')}/mcp", start_seconds=60) as made:
            yield made


def call(server: McpServer, name: str, /, time_limit: float = 60.0, **arguments: Any) -> ToolResult:
    return Toolbox(server.tools(time_limit, [name])).call(ask(name, **arguments))


def test_tools_and_results(server: McpServer) -> None:
    tools = server.tools()
    names = [tool.name for tool in tools]
    assert names[:-2] == ["add", "pid", "hang", "die", "refuse", "lines", "picture", "wait", "release"]
    assert names[-2:] == ["with_space_" + "n" * 53, "with_space_" + "n" * 51 + "_2"]  # legal, 64 long, distinct
    assert tools[0].description == "Add two numbers."
    assert tools[0].parameters["required"] == ["a"]
    assert not any(tool.in_memory for tool in tools)
    box = Toolbox(tools)
    assert box.call(ask("add", a=2, b=3)).content == "5"
    assert box.call(ask("add", a=2)).content == "3"
    assert box.call(ask("lines")).content == "one\ntwo"
    assert box.call(ask("picture")).content == "seen\n[image omitted]"
    assert box.call(ask(names[-2], name="n", time_limit=3, self=4)).content == "n 3 4"
    assert box.call(ask(names[-1])).content == "other"
    violated = box.call(ask("add", a="2"))
    assert (violated.outcome, violated.content) == (
        Outcome.schema_violation,
        "error (schema_violation): at $.a: '2' is not of type 'integer'",
    )
    refused = box.call(ask("refuse", why="no"))
    assert (refused.outcome, refused.content) == (
        Outcome.exception,
        "error (exception): Error executing tool refuse: not so: no",
    )


def test_calls_run_beside_each_other(server: McpServer) -> None:
    box = Toolbox(server.tools(60.0))
    results = box.call_all([ask("wait"), *(ask("add", a=n) for n in range(20)), ask("release")])
    assert results[0].content == "true"  # released by the last, which was called while it waited
    assert [result.content for result in results[1:-1]] == [str(n + 1) for n in range(20)]


def test_a_call_that_hangs_is_cancelled_and_others_go_on(server: McpServer) -> None:
    hang, add = server.tools(0.5, ["hang"]) + server.tools(60.0, ["add"])
    results = Toolbox([hang, add]).call_all([ask("hang"), *(ask("add", a=n) for n in range(20))])
    assert (results[0].outcome, results[0].content) == (
        Outcome.timeout,
        "error (timeout): no result within 0.5 seconds",
    )
    assert [result.content for result in results[1:]] == [str(n + 1) for n in range(20)]
    assert call(server, "add", a=1).content == "2"


def test_names_that_the_server_has_not(stdio: McpServer) -> None:
    with pytest.raises(ConfigError, match=r"MCP server '.*' has no tool 'ad'\. Did you mean 'add'\?"):
        stdio.tools(only=["add", "ad"])
    assert stdio.tools(only=[]) == []


def test_a_server_that_dies_is_started_again(stdio: McpServer) -> None:
    box = Toolbox(stdio.tools(60.0))
    pid = int(box.call(ask("pid")).content)
    died = box.call(ask("die"))
    assert died.outcome is Outcome.exception
    assert died.content == "error (exception): the tool's server ended during the call. The next call starts it again."
    assert wait_for(lambda: not alive(pid))
    with ThreadPoolExecutor(4) as threads:  # all at once: one new server
        results = list(threads.map(box.call, [ask("pid")] * 4))
    assert {result.outcome for result in results} == {Outcome.ok}
    assert len({result.content for result in results} - {str(pid)}) == 1
    os.kill(int(results[0].content), signal.SIGKILL)  # while no call is under way
    assert wait_for(lambda: call(stdio, "add", a=1).content == "2")


def test_an_http_server_that_dies_is_reached_again(start_http: Callable[[int], None]) -> None:
    port = free_port()
    start_http(port)
    with McpServer(url=f"http://127.0.0.1:{port}/mcp", start_seconds=60) as server:
        box = Toolbox(server.tools(60.0))
        assert "ended during the call" in box.call(ask("die")).content
        assert "cannot be started again" in box.call(ask("add", a=1)).content
        start_http(port)
        assert box.call(ask("add", a=1)).content == "2"


def test_close_ends_the_process_and_refuses_calls(script: Path) -> None:
    server = McpServer(shlex.join([sys.executable, str(script)]), start_seconds=60)
    box = Toolbox(server.tools())  # opens
    pid = int(box.call(ask("pid")).content)
    server.open()
    assert box.call(ask("pid")).content == str(pid)  # was open
    hang = Toolbox(server.tools(0.2, ["hang"]))
    assert hang.call(ask("hang")).outcome is Outcome.timeout
    server.close()
    server.close()
    assert not alive(pid)
    assert box.call(ask("add", a=1)).content == "error (exception): the tool's server is closed"


def test_a_dropped_server_leaves_no_process(raw_script: Path) -> None:
    server = McpServer([sys.executable, str(raw_script)], start_seconds=60)
    pid = int(call(server, "pid").content)
    del server
    gc.collect()
    assert wait_for(lambda: not alive(pid))


def test_forks_and_the_end_of_the_interpreter(raw_script: Path) -> None:
    code = f"""
import os, sys
from gymtune.tools import ParsedCall, Toolbox
from gymtune.tools.library.mcp_client import McpServer
box = Toolbox(McpServer([sys.executable, {str(raw_script)!r}], start_seconds=60).tools(only=["pid"]))
pid = lambda: box.call(ParsedCall("c", "pid", {{}}, None, "")).content
mine = pid()
print(mine, flush=True)
if os.fork() == 0:  # has a server of its own, and leaves that of its parent alone
    assert pid() != mine
    print(pid())
    raise SystemExit
assert os.wait()[1] == 0
assert pid() == mine
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(set(done.stdout.split())) == 2
    assert not any(alive(int(pid)) for pid in done.stdout.split())


def test_servers_stay_silent(script: Path) -> None:
    code = f"""
import sys
from gymtune.tools import ConfigError, ParsedCall, Toolbox
from gymtune.tools.library.mcp_client import McpServer
# One tool is logged, one writes to stderr itself.
with McpServer([sys.executable, {str(script)!r}], start_seconds=60) as server:
    (refuse, writes) = server.tools(only=["refuse", "with space_" + "n" * 80])
    assert Toolbox([refuse]).call(ParsedCall("c", "refuse", {{"why": "x"}}, None, "")).failed
    assert not Toolbox([writes]).call(ParsedCall("c", writes.name, {{}}, None, "")).failed
try:
    McpServer("echo hello").open()  # which the client complains of
except ConfigError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_results_hold(raw: McpServer) -> None:
    assert call(raw, "a").content == '{"n": [1]}'
    assert call(raw, "a", like="b").content == "in the file\n[audio omitted]"
    for code in (-32602, -32000):  # an error of the call, not of the connection
        assert call(raw, "a", code=code).content == "error (exception): no such thing"
    assert call(raw, "a").outcome is Outcome.ok


def test_schemas_are_checked_on_every_page(raw: McpServer) -> None:
    with pytest.raises(ConfigError, match=r"MCP server '.*': tool 'b': .*numbr.*only=\[\.\.\.\]"):
        raw.tools()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("no-such-program --x", r"MCP server 'no-such-program --x': .*No such file.*Check that the command"),
        ("echo hello", "MCP server 'echo hello': Connection closed. Check that the command"),
        ([sys.executable, "-c", "import no_such_module"], "Its last words: .*No module named 'no_such_module'"),
        ("'", "No closing quotation. Give the command as a list"),
        ("", "takes a command or url="),
    ],
)
def test_what_is_no_server(command: str | list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        McpServer(command, start_seconds=60).open()


def test_a_program_that_says_nothing() -> None:
    with pytest.raises(ConfigError, match=r"'wc': no answer within 0\.3 seconds\. Check that the command"):
        McpServer("wc", start_seconds=0.3).open()


def test_what_is_no_address(http_port: int) -> None:
    for url, says in (
        ("http://127.0.0.1:9/mcp", "connection attempts failed"),
        (f"http://127.0.0.1:{http_port}/wrong", "Not Found"),
        ("nonsense", "protocol"),
    ):
        with pytest.raises(ConfigError, match=rf"MCP server '{url}': .*{says}.* Check that it is the address"):
            McpServer(url=url, start_seconds=60).open()
    with pytest.raises(ConfigError, match="takes a command or url="):
        McpServer("x", url="y")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'gymtune\[mcp\]'"):
        McpServer("x")
