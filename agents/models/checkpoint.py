"""Load and save a decoder as a Hugging Face folder: `config.json` and safetensors, never pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...tools.errors import ModelError
from .config import MAKE_ONE, ModelConfig, read_json
from .decoder import Decoder
from .lora import merged_state
from .misfits import misfits
from .moe import split_experts

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD, SCORE = "lm_head.weight", "score.weight"
"""What makes logits of hidden states where that is not the embedding, and the score in a sequence classifier."""
_SHOWN = 10
_FLOATS = ("F64", "F32", "BF16", "F16")
_NOT_READ = ".rotary_emb.inv_freq"  # old files hold these constants


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """Return the decoder of a Hugging Face folder, one file or sharded, its weights cast to `dtype`, in eval mode.

    Raises ModelError when the folder is no model, when names or shapes of tensors differ from what its config asks
    for (every difference is listed: ten, then a count), or when memory runs out; then nothing is loaded.
    """
    path = Path(folder)
    model = outline(path)
    model.load_state_dict(read_weights(path, shapes_of(model), dtype, device), assign=True)
    return model.eval()


def outline(folder: str | Path) -> Decoder:
    """Return the decoder of a folder without its weights (they are on the meta device): headers are read, no tensor.

    Raises ModelError as `load_model` does, but for memory.
    """
    path = Path(folder)
    config = ModelConfig.from_folder(path)
    with torch.device("meta"):
        model = Decoder(config)
    found = weight_shapes(path)
    if SCORE in found:
        raise ModelError(
            f"{path}: a reward model, whose head scores and does not speak: it serves by --reward-model, and as "
            "critic_model of ppo."
        )
    if config.tie_word_embeddings:
        found.pop(HEAD, None)  # some files store the embedding a second time
    refuse_misfits(path, shapes_of(model), found)
    return model.eval()


def shapes_of(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of a model."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_weights(
    path: Path, wanted: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: str | torch.device
) -> dict[str, Tensor]:
    """Return the `wanted` weights of a folder, cast. Raises ModelError when memory runs out."""
    weights: dict[str, Tensor] = {}
    try:
        for file in weight_files(path):
            weights |= _read(file, set(wanted), dtype, torch.device(device))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        size = sum(math.prod(shape) for shape in wanted.values()) * dtype.itemsize / 1e9
        raise ModelError(
            f"{path}: out of memory on {device}: the weights take {size:.2f} GB as {dtype}. "
            "Take bfloat16, a smaller model or a larger machine."
        ) from error
    return weights


def save_model(model: Decoder, folder: str | Path) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors` into `folder`, in place.

    A tied head is stored once, as the embedding; adapters are merged. The caller writes aside and renames where a
    crash must not leave half a folder.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    config["dtype"] = str(model.head_weight.dtype).removeprefix("torch.")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in merged_state(model).items()}
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"eos_token_id": config["eos_token_id"]})


def write_json(file: Path, data: object) -> None:
    """Write indented JSON in UTF-8, ending in a newline."""
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: the single one, or those that the index names.

    Raises ModelError when there is none, and naming those of the index that are not there.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{folder}: no weights, wanted {WEIGHTS} or {INDEX}. {MAKE_ONE}")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelError(f"{index}: wanted weight_map, an object from tensor to file name.")
    files = [folder / name for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{folder}: {INDEX} names files that are not there: {_listed(missing)}. Fetch them again.")
    return files


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of a folder, from the headers of its files.

    Raises ModelError for a file that is not whole, and for weights that are no floats.
    """
    return {name: shape for file in weight_files(folder) for name, shape in _shapes(file).items()}


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of a file, from its header alone, fused experts one by one."""
    found: dict[str, tuple[int, ...]] = {}
    odd: list[str] = []
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                header = opened.get_slice(name)
                if header.get_dtype() not in _FLOATS:
                    odd.append(f"{name} is {header.get_dtype()}")
                whole = torch.empty(header.get_shape(), device="meta")
                found |= {part: tuple(tensor.shape) for part, tensor in split_experts(name, whole).items()}
    except SafetensorError as error:
        raise ModelError(f"{file}: not a whole safetensors file: {error}. Fetch or save it again.") from error
    if odd:
        raise ModelError(f"{file}: wanted float weights, {_listed(odd)}. Quantised models are not supported.")
    return {name: shape for name, shape in found.items() if not name.endswith(_NOT_READ)}


def _read(file: Path, wanted: set[str], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return the wanted weights of a file, cast."""
    weights: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no dict
            parts = split_experts(name, opened.get_tensor(name))
            # a copy, for the tensor may lie in the mapped file, which a later save in place would pull away
            weights |= {part: tensor.to(device, dtype, copy=True) for part, tensor in parts.items() if part in wanted}
    return weights


def refuse_misfits(folder: Path, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError listing every tensor that is missing, unexpected or of another shape."""
    if faults := misfits(wanted, found):
        raise ModelError(f"{folder}: weights do not fit config.json: {_listed(faults)}. Mend the config or the file.")


def _listed(items: Iterable[str]) -> str:
    """Join with semicolons, ten at most and then how many more."""
    every = list(items)
    rest = f"; and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return "; ".join(every[:_SHOWN]) + rest
