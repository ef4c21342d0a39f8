"""Tools that ship: each made by a function, so that an env gets its own with its own limits and state."""

from .calculator import Limits, calculator_tool, evaluate, number_text
from .everyday import everyday_toolbox, everyday_tools
from .files import FileSystem
from .key_value import KeyValueStore
from .mcp_client import McpServer
from .python_sandbox import PythonSession, python_tool
from .search import SearchIndex

__all__ = [
    "FileSystem",
    "KeyValueStore",
    "Limits",
    "McpServer",
    "PythonSession",
    "SearchIndex",
    "calculator_tool",
    "evaluate",
    "everyday_toolbox",
    "everyday_tools",
    "number_text",
    "python_tool",
]
