"""Models of our own: configuration, decoder, checkpoints, and a tiny one made from scratch."""

from .checkpoint import load_model, save_model
from .config import ModelConfig
from .decoder import Attend, CausalAttend, Decoder, PrefixAttend, RecordAttend
from .init import init_model

__all__ = [
    "Attend",
    "CausalAttend",
    "Decoder",
    "ModelConfig",
    "PrefixAttend",
    "RecordAttend",
    "init_model",
    "load_model",
    "save_model",
]
