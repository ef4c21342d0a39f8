"""Language models: our own decoder, any other through transformers, adapters, and files of other forms."""

from .checkpoint import load_model, save_model
from .classifier import is_classifier, load_classifier, save_classifier
from .config import ModelConfig
from .contract import LanguageConfig, LanguageModel, check_vocabulary
from .decoder import Attend, CausalAttend, Decoder
from .foreign import ForeignModel, load_any, load_foreign, save_any
from .importing import import_model
from .init import init_model
from .lora import adapter_off, apply_lora, has_adapter, load_adapter, merged_state, save_adapter, trainable_parameters
from .minimind import export_minimind

__all__ = [
    "Attend",
    "CausalAttend",
    "Decoder",
    "ForeignModel",
    "LanguageConfig",
    "LanguageModel",
    "ModelConfig",
    "adapter_off",
    "apply_lora",
    "check_vocabulary",
    "export_minimind",
    "has_adapter",
    "import_model",
    "init_model",
    "is_classifier",
    "load_adapter",
    "load_any",
    "load_classifier",
    "load_foreign",
    "load_model",
    "merged_state",
    "save_adapter",
    "save_any",
    "save_classifier",
    "save_model",
    "trainable_parameters",
]
