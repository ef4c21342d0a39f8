"""Messages, errors, JSON Schema, tools and the formats in which models call them. Never imports torch."""

from .chat_format import ChatFormat, ParsedCall, ParsedTurn, get_chat_format, register_chat_format
from .errors import ConfigError, DataError, EnvError, GymtuneError, ModelError, RunError, ToolError, closest
from .formats import DeepSeekFormat, HermesFormat, Llama3JsonFormat, MistralFormat, Qwen3CoderFormat
from .library import (
    FileSystem,
    KeyValueStore,
    Limits,
    McpServer,
    PythonSession,
    SearchIndex,
    calculator_tool,
    evaluate,
    everyday_toolbox,
    everyday_tools,
    number_text,
    python_tool,
)
from .messages import FunctionCall, Message, Role, ToolCall, assistant, call, system, user
from .outcomes import Outcome, ToolResult
from .processes import ProcessPool, default_pool
from .schema import ArgumentSchema, compile_schema
from .tool import Tool, tool
from .toolbox import Toolbox

__all__ = [
    "ArgumentSchema",
    "ChatFormat",
    "ConfigError",
    "DataError",
    "DeepSeekFormat",
    "EnvError",
    "FileSystem",
    "FunctionCall",
    "GymtuneError",
    "HermesFormat",
    "KeyValueStore",
    "Limits",
    "Llama3JsonFormat",
    "McpServer",
    "Message",
    "MistralFormat",
    "ModelError",
    "Outcome",
    "ParsedCall",
    "ParsedTurn",
    "ProcessPool",
    "PythonSession",
    "Qwen3CoderFormat",
    "Role",
    "RunError",
    "SearchIndex",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "Toolbox",
    "assistant",
    "calculator_tool",
    "call",
    "closest",
    "compile_schema",
    "default_pool",
    "evaluate",
    "everyday_toolbox",
    "everyday_tools",
    "get_chat_format",
    "number_text",
    "python_tool",
    "register_chat_format",
    "system",
    "tool",
    "user",
]
