"""LoRA (arXiv:2106.09685) through peft: y = W x + (alpha / r) B A x, where W is frozen and only A and B are trained.

Adapters lie inside the decoder's own modules, so trainer and engine see them in the forward pass without knowing of
them. What is saved is PEFT's format with Hugging Face's names: peft opens it on transformers' model, and we open its.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...tools.errors import ConfigError, ModelError, closest
from .config import read_json
from .contract import LanguageModel
from .decoder import Decoder
from .misfits import misfits

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ALL_LINEAR = "all-linear"
_NAME = "default"  # peft's name of an adapter, left out of its files
_PREFIX = "base_model.model."  # what peft's files put before the model's own names
_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "target_modules"}
# Keys of an adapter's config that say where it comes from, not what it computes once A and B are there.
_ABOUT = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
_SHOWN = 10

Model = LanguageModel | nn.Module  # the first is a protocol: what has it is a module too
Targets = str | Sequence[str]


def apply_lora(
    model: Model, *, r: int, alpha: float, dropout: float = 0.0, target_modules: Targets = ALL_LINEAR, seed: int
) -> None:
    """Freeze `model` and put an adapter of rank `r` on its matrices, in place; the model computes what it did before.

    `target_modules` is the end of a name or several (`q_proj`, `mlp.down_proj`); `all-linear` takes every matrix of the
    layers. A is random by `seed` (the global RNG is left alone), B is 0. Adapters of half-precision models are float32.
    `dropout` acts in training mode only. Raises ConfigError for a value out of range, an unknown target, a model
    that has adapters or is not our own decoder, and without peft.
    """
    for name, value, fits, wanted in (
        ("r", r, r >= 1, "at least 1"),
        ("alpha", alpha, 0 < alpha < inf, "more than 0"),
        ("dropout", dropout, 0 <= dropout < 1, "from 0 to below 1"),
    ):
        if not fits:
            raise ConfigError(f"LoRA {name} is {value}, wanted {wanted}")
    decoder = _bare(model)
    names, matrices = _matrices(decoder, target_modules)
    config = _peft().LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, task_type="CAUSAL_LM")
    config.target_modules = {name.removeprefix("model.") for name in matrices}
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator, on the CPU
        torch.default_generator.manual_seed(seed)
        # Not the whole decoder: by its config peft would take it for transformers' class and rename its experts.
        _peft().inject_adapter_in_model(config, decoder.model, adapter_name=_NAME)
    decoder.requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if ".lora_" in name:
            half = parameter.dtype in (torch.bfloat16, torch.float16)
            parameter.data = parameter.data.float() if half else parameter.data
            parameter.requires_grad_(True)
    config.target_modules = set(names)


def check_targets(model: Model, target_modules: Targets) -> int:
    """Return how many matrices `target_modules` means, the model unchanged. Raises ConfigError as `apply_lora` does."""
    _peft()
    return len(_matrices(_bare(model), target_modules)[1])


def has_adapter(model: Model) -> bool:
    """Tell whether the model carries adapters."""
    return any(True for _ in _layers(model))


def trainable_parameters(model: Model) -> dict[str, nn.Parameter]:
    """Return what an optimizer trains, by name: the adapters where there are some, else every parameter."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def adapter_off(model: Model) -> Iterator[None]:
    """Make the model compute what its base does, to the bit, until the block ends, be it by an error.

    A graph recorded before is not touched. Raises ModelError when there is no adapter to switch off.
    """
    if not has_adapter(model):
        raise ModelError("the model has no adapter to switch off, so it cannot be its own reference")
    layers = [layer for _, layer in _layers(model) if not layer.disable_adapters]
    frozen = [p for layer in layers for name, p in layer.named_parameters() if not p.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in frozen:  # peft makes everything trainable that it switches on
            parameter.requires_grad_(False)


@torch.no_grad()
def merged_state(model: Model) -> dict[str, Tensor]:
    """Return the weights by Hugging Face's names, adapters added in; the model is unchanged.

    Matrices that bear an adapter are new tensors, all others are the model's own: read them, do not write.
    """
    assert isinstance(model, nn.Module)
    state = {
        name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }
    for name, layer in _layers(model):
        weight = state[f"{name}.weight"]
        state[f"{name}.weight"] = (weight + layer.get_delta_weight(_NAME)).to(weight.dtype)
    return state


def save_adapter(model: Model, folder: str | Path, base_folder: str | Path) -> None:
    """Write the adapter as peft does; `base_folder` is noted as the model it belongs to.

    The same adapter gives the same bytes. Raises ModelError when the model has none.
    """
    if not has_adapter(model):
        raise ModelError(f"{folder}: the model has no adapter to save")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    assert isinstance(model, Decoder)
    body: Any = model.model  # where peft keeps its config
    config = copy.deepcopy(body.peft_config[_NAME])
    config.base_model_name_or_path, config.inference_mode = str(base_folder), True
    config.target_modules = sorted(config.target_modules)  # a set has another order in each process
    config.save_pretrained(path)
    weights = {_file_name(name): p.detach().cpu().contiguous() for name, p in _adapter_parameters(model).items()}
    save_file(weights, path / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter(model: Model, folder: str | Path) -> None:
    """Put the adapter of a folder in PEFT's format on a model that has none; it can be trained on.

    Raises ModelError, and leaves the model as it was, for a folder that holds no plain LoRA adapter and for one whose
    names or shapes belong to another model (ten differences are listed, then a count); ConfigError as `apply_lora`.
    """
    decoder, path = _bare(model), Path(folder)
    if missing := [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (path / name).is_file()]:
        raise ModelError(f"{path}: no adapter in PEFT's format, {' and '.join(missing)} missing")
    record = _read_config(path / ADAPTER_CONFIG)
    try:
        weights = load_file(path / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path / ADAPTER_WEIGHTS}: not a whole safetensors file: {error}") from error
    targets = record["target_modules"]
    try:
        _, matrices = _matrices(decoder, targets)
    except ConfigError as error:
        raise ModelError(f"{path}: the adapter belongs to another model: {error}") from error
    rank: int = record["r"]
    wanted: dict[str, tuple[int, ...]] = {}
    for name, linear in matrices.items():
        wanted[f"{_PREFIX}{name}.lora_A.weight"] = (rank, linear.in_features)
        wanted[f"{_PREFIX}{name}.lora_B.weight"] = (linear.out_features, rank)
    _compare(path, wanted, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    alpha, dropout = record["lora_alpha"], record["lora_dropout"]
    apply_lora(model, r=rank, alpha=alpha, dropout=dropout, target_modules=targets, seed=0)
    with torch.no_grad():
        for name, parameter in _adapter_parameters(model).items():
            parameter.copy_(weights[_file_name(name)])


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("LoRA needs the extra lora. Run: pip install 'gymtune[lora]'") from None
    return peft


def _bare(model: Model) -> Decoder:
    """Return the model as what can take an adapter."""
    if not isinstance(model, Decoder):
        raise ConfigError(f"LoRA trains models that our own decoder runs, this is a {type(model).__name__}: train all")
    if has_adapter(model):
        raise ConfigError("the model has adapters already: load it anew, or take what `merged_state` gives")
    return model


def _layers(model: Model) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every matrix that bears an adapter; peft is not needed to find none."""
    assert isinstance(model, nn.Module)
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _adapter_parameters(model: Model) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


def _file_name(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def _matrices(model: Decoder, targets: Targets) -> tuple[tuple[str, ...], dict[str, nn.Linear]]:
    """Return the ends of names that `targets` means, and every matrix that they name, by its whole name."""
    linears = {f"model.{name}": m for name, m in model.model.named_modules() if isinstance(m, nn.Linear)}
    known = sorted({name.rpartition(".")[2] for name in linears})
    names = tuple(known if targets == ALL_LINEAR else dict.fromkeys([targets] if isinstance(targets, str) else targets))
    if not names:
        raise ConfigError(f"LoRA needs a matrix to adapt, came no target module.{closest('', known)}")
    found: dict[str, nn.Linear] = {}
    for target in names:
        hits = {name: linear for name, linear in linears.items() if f".{name}".endswith(f".{target}")}
        if not hits:
            raise ConfigError(f"LoRA: no matrix of the layers is named {target!r}.{closest(target, known)}")
        found |= hits
    return names, found


def _read_config(file: Path) -> dict[str, Any]:
    """Return the keys of an adapter's config that we act on. Raises ModelError for what would change the numbers."""
    record = {"lora_dropout": 0.0} | read_json(file)
    plain = _peft().LoraConfig(init_lora_weights=True).to_dict()
    for key, value in record.items():
        if key not in _READ | _ABOUT and value != plain.get(key) and value not in (None, False, [], {}):
            raise ModelError(f"{file}: {key} is {value!r}: only plain LoRA is covered. Merge the adapter with peft.")
    targets = record.get("target_modules")
    number = (int, float)
    fits = {
        "peft_type": record.get("peft_type") == "LORA",
        "r": isinstance(record.get("r"), int) and record["r"] >= 1,
        "lora_alpha": isinstance(record.get("lora_alpha"), number) and 0 < record["lora_alpha"] < inf,
        "lora_dropout": isinstance(record["lora_dropout"], number) and 0 <= record["lora_dropout"] < 1,
        "target_modules": targets == ALL_LINEAR
        or (isinstance(targets, list) and all(isinstance(target, str) for target in targets)),
    }
    for key in (key for key, holds in fits.items() if not holds):
        raise ModelError(f"{file}: {key} is {record.get(key)!r}, which no plain LoRA adapter has")
    return record


def _compare(folder: Path, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    """Raise ModelError listing every tensor that is missing, unexpected or of another shape."""
    if faults := misfits(wanted, found):
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ModelError(
            f"{folder}: the adapter belongs to another model: {'; '.join(faults[:_SHOWN])}{more}. Load its own base."
        )
