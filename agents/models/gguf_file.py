"""GGUF files (llama.cpp's format, quantised or not) to Hugging Face folders with tokenizer and chat template.

transformers reads tensors and tokenizer. What it would pass over in silence is seen here: tensors that its model has
no place for, scaled rotary embeddings, a header that lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...tools.errors import ConfigError, GymtuneError, ModelError, closest
from .checkpoint import write_json
from .config import read_json
from .folder import new_folder
from .gguf_header import GgufHeader, read_header

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 to 3.3 differ in the factor alone, and a GGUF stores nothing but what the formula gives for each channel.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Sizes that transformers leaves at its defaults, though the header gives them.
_SIZES = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}


def import_gguf(file: Path, out: Path, dtype: str = "float32") -> Path:
    """Write the model of a GGUF file as the Hugging Face folder `out`, its weights unpacked to `dtype`; return `out`.

    The peak of memory is one copy of the unpacked weights and one tensor more. `out` appears whole or not at all.
    Raises ModelError for a file that is no GGUF, or of a kind that would not come out equal; ConfigError for an
    unknown dtype, and where the extra `gguf` is missing.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}.{closest(dtype, _DTYPES)}")
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ConfigError("GGUF files need the extra gguf. Run: pip install 'gymtune[gguf]'")
    header = read_header(file)
    _check_header(header)
    with new_folder(out) as aside:
        with _named(file):
            model, tokenizer = _load(header, _DTYPES[dtype])
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        _mend(header, aside)
    return out


def _check_header(header: GgufHeader) -> None:
    """Raise ModelError for a count of layers that no tensor bears out, and for rope that would be lost."""
    fields, path, family = header.fields, header.path, header.architecture
    layers = fields.get(f"{family}.block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(header.tensors):
        raise ModelError(f"{path}: {layers!r} layers ({family}.block_count), but {len(header.tensors)} tensors.")
    scaled = {key: value for key, value in fields.items() if _scales_rope(key, value)}
    scaled |= {name: "a tensor" for name in header.tensors if name.startswith("rope_fact")}
    if scaled:
        listed = ", ".join(f"{key}={value!r}" for key, value in scaled.items())
        raise ModelError(f"{path}: scaled rotary embeddings are not read from GGUF ({listed}); import the original.")


def _scales_rope(key: str, value: Any) -> bool:
    if key.endswith(".rope.scaling.type"):
        return bool(value != "none")
    return key.endswith((".rope.scaling.factor", ".rope.scale_linear")) and value not in (0, 1)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Turn what transformers raises on a file into a ModelError that names it."""
    try:
        yield
    except GymtuneError:
        raise
    except Exception as error:  # transformers and its parts raise what they like on an odd file
        text = " ".join(str(error).split())[:500] or type(error).__name__
        raise ModelError(f"{file}: transformers cannot read this GGUF file: {text}") from error


def _load(header: GgufHeader, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return model and tokenizer, the model fit to be saved."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, name = str(header.path.resolve().parent), header.path.name
    config = AutoConfig.from_pretrained(folder, gguf_file=name, local_files_only=True)
    for key, attribute in _SIZES.items():
        size = header.fields.get(f"{header.architecture}.{key}")
        if size is not None and hasattr(config, attribute):
            setattr(config, attribute, size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    _check_count(header, model)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    if len(tokenizer) > config.vocab_size:
        raise ModelError(f"{header.path}: {len(tokenizer)} tokens, but an embedding of {config.vocab_size}.")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, config=config, dtype=dtype, output_loading_info=True, local_files_only=True
    )
    if info["missing_keys"]:  # transformers fills these with random numbers
        raise ModelError(f"{header.path}: lacks weights of {', '.join(sorted(info['missing_keys'])[:10])}.")
    # What comes of a GGUF is marked as quantised and refuses to be saved; the same tensors in a model not so marked do.
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.config.dtype = dtype
    model.tie_weights()
    return model, tokenizer


def _check_count(header: GgufHeader, model: Any) -> None:
    """Raise ModelError unless file and model hold equally many numbers: conversion moves them, it loses none."""
    wanted = sum(t.numel() for t in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values())
    found = sum(tensor.count for name, tensor in header.tensors.items() if name != _ROPE_FACTORS)
    if wanted != found:
        raise ModelError(
            f"{header.path}: its tensors hold {found:,} numbers, but a {model.config.model_type} of its shape "
            f"has {wanted:,}: some would be lost or made up."
        )


def _mend(header: GgufHeader, folder: Path) -> None:
    """Write what transformers 5 saved so that version 4 opens it too, and Llama 3's rope scaling where there is one."""
    file = folder / "tokenizer_config.json"
    write_json(file, read_json(file) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    config = read_json(folder / "config.json")
    rope = config.get("rope_parameters") or {}
    if _ROPE_FACTORS in header.tensors:
        rope |= _llama3_scaling(header, config)
    if "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
        config["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    write_json(folder / "config.json", config)


def _llama3_scaling(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope scaling of a model whose GGUF stores its effect on each channel."""
    theta, found = float(config["rope_parameters"]["rope_theta"]), header.floats(_ROPE_FACTORS)
    factor = max(found, default=0.0)
    wanted = _llama3_factors(theta, config["head_dim"], factor) if factor >= 1 else []
    close = [math.isclose(a, b, rel_tol=1e-4) for a, b in zip(wanted, found, strict=False)]
    if len(wanted) != len(found) or not all(close):
        raise ModelError(f"{header.path}: {_ROPE_FACTORS} is not Llama 3's scaling; import the original model.")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Return by what Llama 3.1 divides the angle of each pair of channels (arXiv:2407.21783, and Meta's code)."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta ** (i / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
