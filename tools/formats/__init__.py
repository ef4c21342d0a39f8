"""How model families write tool calls; importing this registers every format by its name."""

from .deepseek import DeepSeekFormat
from .hermes import HermesFormat
from .llama3_json import Llama3JsonFormat
from .mistral import MistralFormat
from .qwen3_coder import Qwen3CoderFormat

__all__ = ["DeepSeekFormat", "HermesFormat", "Llama3JsonFormat", "MistralFormat", "Qwen3CoderFormat"]
