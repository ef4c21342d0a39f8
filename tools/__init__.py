"""Messages, errors, JSON Schema, tools and the formats in which models call them. Never imports torch."""

from .chat_format import ChatFormat, ParsedCall, ParsedTurn, get_chat_format, register_chat_format
from .errors import ConfigError, DataError, EnvError, GymtuneError, ModelError, RunError, ToolError, closest
from .formats import HermesFormat
from .library import Limits, calculator_tool, evaluate, number_text
from .messages import FunctionCall, Message, Role, ToolCall, assistant, call, system, user
from .outcomes import Outcome, ToolResult
from .schema import ArgumentSchema, compile_schema
from .tool import Tool, tool
from .toolbox import Toolbox

__all__ = [
    "ArgumentSchema",
    "ChatFormat",
    "ConfigError",
    "DataError",
    "EnvError",
    "FunctionCall",
    "GymtuneError",
    "HermesFormat",
    "Limits",
    "Message",
    "ModelError",
    "Outcome",
    "ParsedCall",
    "ParsedTurn",
    "Role",
    "RunError",
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
    "evaluate",
    "get_chat_format",
    "number_text",
    "register_chat_format",
    "system",
    "tool",
    "user",
]
