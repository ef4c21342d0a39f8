"""How model families write tool calls; importing this registers every format by its name."""

from .hermes import HermesFormat

__all__ = ["HermesFormat"]
