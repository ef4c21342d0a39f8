"""Tools that ship: each made by a function, so that an env gets its own with its own limits and state."""

from .calculator import Limits, calculator_tool, evaluate, number_text

__all__ = ["Limits", "calculator_tool", "evaluate", "number_text"]
