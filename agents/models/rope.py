"""Rotary position embeddings and the ways of stretching them past the length that a model was trained on.

Every kind equals the function of that name in transformers' `ROPE_INIT_FUNCTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...tools.errors import ModelError, closest
from .config_values import flag, number, positive_int

_DEFAULT_THETA = 10_000.0
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_WANTED: dict[str, tuple[str, ...]] = {"linear": (), "dynamic": (), "yarn": (), "llama3": _LLAMA3}
"""By kind: what it needs beside `factor`."""

_NUMBERS = ("factor", *_LLAMA3, *_YARN)


@dataclass(frozen=True)
class RopeScaling:
    """How angles are stretched, under the names of Hugging Face's `rope_parameters`; None is what the file left out."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what is set, as `rope_scaling` of a `config.json`."""
        return {key: value for key, value in asdict(self).items() if value is not None}


_KEYS = {field.name for field in fields(RopeScaling)} | {"type", "rope_theta"}


def read_rope(data: Mapping[str, Any], context: int, where: str) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling of a Hugging Face config, in the spelling of transformers 4 or 5.

    `context` is `max_position_embeddings`. Raises ModelError for a kind or key that is not implemented.
    """
    # transformers lets a non-empty rope_scaling take the place of rope_parameters
    spelling = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    rope = data.get(spelling) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"{where}: {spelling}={rope!r} is not supported, wanted one object for all layers.")
    for source, place in ((data, ""), (rope, f"{spelling}={rope!r}: ")):
        part = source.get("partial_rotary_factor")
        if part not in (1.0, None):
            raise ModelError(f"{where}: {place}partial_rotary_factor={part!r} is not supported, wanted 1.0.")
    theta = number("rope_theta", rope.get("rope_theta", data.get("rope_theta", _DEFAULT_THETA)), where, above=1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    given = {key: value for key, value in rope.items() if value is not None and key != "partial_rotary_factor"}
    if kind == "default" and "mrope_section" not in given:
        return theta, None
    if str(kind) not in _WANTED:
        raise ModelError(f"{where}: {spelling}={rope!r}: kind {kind!r} is not supported.{closest(str(kind), _WANTED)}")
    if unknown := sorted(given.keys() - _KEYS):
        raise ModelError(f"{where}: {spelling}={rope!r}: key {unknown[0]!r} is not supported.")
    # transformers gives the key outside priority over the one inside
    outer = data.get("original_max_position_embeddings")
    given |= {} if outer is None else {"original_max_position_embeddings": outer}
    return theta, _scaling(str(kind), given, context, where)


def _scaling(kind: str, given: dict[str, Any], context: int, where: str) -> RopeScaling:
    """Check the numbers of one kind of scaling and put them together."""
    original: int | None = None
    if kind in ("yarn", "llama3"):
        key = "original_max_position_embeddings"
        original = positive_int(key, given.get(key, context), where)
        if kind == "yarn":
            given = {"factor": context / original} | given
    values = {key: number(key, given[key], where) for key in _NUMBERS if key in given}
    for key in ("factor", *_WANTED[kind]):
        if key not in values:
            raise ModelError(f"{where}: rope of kind {kind!r} has no {key!r}: wanted a number above 0.")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        raise ModelError(f"{where}: low_freq_factor={low}, wanted less than high_freq_factor={high}.")
    truncate = flag("truncate", given["truncate"], where) if "truncate" in given else None
    return RopeScaling(kind, original_max_position_embeddings=original, truncate=truncate, **values)


def rope_frequencies(
    dim: int, theta: float, scaling: RopeScaling | None = None, *, context: int = 1, length: int = 0
) -> tuple[Tensor, float]:
    """Return (dim / 2,) fp32 angles by position, and the factor on cos and sin.

    Unscaled, angle i of a position is theta^(-2i / dim) (RoFormer, arXiv:2104.09864). `context` is the model's
    `max_position_embeddings`; kind "dynamic" stretches once `length`, the longest sequence at hand, exceeds it.
    """
    if scaling is not None and scaling.rope_type == "dynamic":
        grown = scaling.factor * max(length, context) / context - (scaling.factor - 1)
        theta *= grown ** (dim / (dim - 2))
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None or scaling.rope_type == "dynamic":
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    return _llama3(plain, scaling) if scaling.rope_type == "llama3" else _yarn(plain, scaling, theta)


def _llama3(plain: Tensor, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are stretched by `factor`, short ones are not, those between are blended by wavelength."""
    assert scaling.original_max_position_embeddings is not None
    assert scaling.low_freq_factor is not None
    assert scaling.high_freq_factor is not None
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / scaling.factor * (1 - keep), 1.0


def _yarn(plain: Tensor, scaling: RopeScaling, theta: float) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071), section 3.2 and, for the factor on cos and sin, equation 22."""
    assert scaling.original_max_position_embeddings is not None
    half, original, factor = len(plain), scaling.original_max_position_embeddings, scaling.factor

    def channel(turns: float) -> float:
        """The channel that turns so many times within the original context."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = channel(scaling.beta_fast or 32), channel(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    span = high - low if high != low else 0.001
    stretched = ((torch.arange(half, dtype=torch.float32) - low) / span).clamp(0, 1)
    frequencies = plain / factor * stretched + plain * (1 - stretched)
    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return frequencies, _mscale(factor, scaling.mscale) / _mscale(factor, scaling.mscale_all_dim)
    return frequencies, _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_table(
    length: int, dim: int, theta: float, scaling: RopeScaling | None = None, *, context: int | None = None
) -> Tensor:
    """Return (length, 2 * dim) fp32: cos, then sin with the sign of the rotation, of each position's angles.

    Channel i turns with channel i + dim/2, as in Hugging Face files. `context` as in `rope_frequencies`.
    """
    frequencies, factor = rope_frequencies(dim, theta, scaling, context=context or length, length=length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos, -sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (B, T, H, D) by its positions: (a, b) -> (a cos - b sin, b cos + a sin), in three kernels."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
