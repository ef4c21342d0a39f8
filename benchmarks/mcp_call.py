"""Milliseconds of one tool call to an MCP server over stdio, through `Toolbox.call`: schema check, pipe, server, back.

python benchmarks/mcp_call.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

from gymtune.tools import ParsedCall, Toolbox
from gymtune.tools.library.mcp_client import McpServer

CALLS = 200
SERVER = '''
from mcp.server import MCPServer

server = MCPServer("demo")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

server.run()
'''


def main() -> None:
    """Start the server, call it `CALLS` times one after the other, and print what a call takes."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "server.py"
        script.write_text(SERVER, encoding="utf-8")
        began = perf_counter()
        with McpServer([sys.executable, str(script)]) as server:
            toolbox = Toolbox(server.tools())
            started = perf_counter() - began
            times = [milliseconds(toolbox, n) for n in range(CALLS)]
    print(
        f"start {started:.2f} s; {CALLS} calls: median {median(times):.2f} ms, p95 {quantiles(times, n=20)[-1]:.2f} ms"
    )


def milliseconds(toolbox: Toolbox, n: int) -> float:
    """Make one call, check its result, and return its time."""
    began = perf_counter()
    result = toolbox.call(ParsedCall("c", "add", {"a": n, "b": 1}, None, ""))
    taken = 1000 * (perf_counter() - began)
    assert result.content == str(n + 1), result
    return taken


if __name__ == "__main__":
    main()
