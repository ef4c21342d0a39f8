"""MiniMind's `.pth` files to Hugging Face folders and back (https://github.com/jingyaogong/minimind).

MiniMind is Qwen3, its MoE Qwen3-MoE, down to the names of the tensors. A `.pth` holds tensors and nothing else: sizes
are read from their shapes; what no shape shows is what MiniMind's `MiniMindConfig` says, here `_FIXED`, and a model
in which it is something else is not exported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...tools.errors import ModelError
from .checkpoint import load_model, save_model
from .config import ModelConfig, read_json
from .contract import check_vocabulary
from .decoder import Decoder
from .folder import copy_tokenizer, new_folder
from .misfits import misfits

_NAME = re.compile(r".+_(?P<hidden>\d+)(?P<moe>_moe)?")
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")
_EXPERT = re.compile(r"model\.layers\.0\.mlp\.experts\.(\d+)\..+")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SHOWN, _LONGEST = 10, 160  # of a list in a message: items, characters of each

_CONTEXT = 32768
_EOS = 2  # <|im_end|> of its tokenizer
_FIXED = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "attention_bias": False}
_FIXED_MOE = {"num_experts_per_tok": 1, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()}
_AUXILIARY_LOSS = 5e-4


def import_minimind(weights: Path, tokenizer: Path | None, out: Path) -> Path:
    """Write a `.pth` of MiniMind, dense or MoE, as the Hugging Face folder `out`, in the dtype it has; return `out`.

    `tokenizer` is a folder with `tokenizer.json` (MiniMind's own is `model/`): it is copied, and its end of sequence
    becomes the model's. Rope is not scaled, as in MiniMind without `--inference_rope_scaling`. No code is unpickled.
    Raises ModelError for a file that is no MiniMind, naming the tensors that are missing or odd, or whose name
    (`{prefix}_{hidden_size}{_moe}.pth`) says otherwise, and for a tokenizer larger than the embedding.
    """
    tensors = _read_pth(weights)
    tied = _HEAD in tensors and _EMBEDDING in tensors and torch.equal(tensors[_HEAD], tensors[_EMBEDDING])
    data = _config(tensors, weights) | {"tie_word_embeddings": tied, "eos_token_id": _EOS}
    _check_name(weights, data)
    if tokenizer is not None:
        data["eos_token_id"] = _check_tokenizer(tokenizer, ModelConfig.from_dict(data, where=str(weights)))
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_dict(data, where=str(weights)))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wanted[_HEAD] = wanted[_EMBEDDING]  # MiniMind stores a tied head a second time
    _compare(weights, wanted, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if tied:
        del tensors[_HEAD]
    model.load_state_dict(tensors, assign=True)
    with new_folder(out) as aside:
        save_model(model, aside)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, aside)
    return out


def export_minimind(folder: Path, out: Path, prefix: str) -> Path:
    """Write a model folder as `out/{prefix}_{hidden_size}{_moe}.pth` in half precision, and return that path.

    MiniMind's scripts open it when the sizes are those of its `MiniMindConfig` too (they take `--hidden_size` and
    `--num_hidden_layers`). Raises ModelError for a model that MiniMind's code cannot hold or would silently run with
    other constants, for weights beyond half precision, and where the file is there already.
    """
    if not prefix or Path(prefix).name != prefix:
        raise ModelError(f"prefix {prefix!r}, wanted the first part of a file name, such as full_sft.")
    model = load_model(folder, dtype=torch.float16)
    config = model.config
    _check_export(folder, config)
    odd = [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
    if odd:
        raise ModelError(f"{folder}: not finite in half precision (at most 65504): {_listed(odd)}.")
    target = out / f"{prefix}_{config.hidden_size}{'_moe' if config.num_experts else ''}.pth"
    if target.exists():
        raise ModelError(f"{target}: is there already. Take another prefix or folder, or remove it.")
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    aside = target.with_name(f".{target.name}.partial")
    try:
        out.mkdir(parents=True, exist_ok=True)
        torch.save(tensors | {_HEAD: model.head_weight.detach()}, aside)
        os.replace(aside, target)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise ModelError(f"{target}: cannot write: {error}. Make room, or name another folder.") from error
    finally:
        aside.unlink(missing_ok=True)
    return target


def _read_pth(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict, after making sure that it holds nothing else."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ModelError(f"{file}: cannot read: {error.strerror or error}.") from error
    except Exception as error:  # a damaged pickle raises anything, and all of it means the same
        raise ModelError(
            f"{file}: not a whole file of tensors alone, as MiniMind saves its weights. Fetch or save it again."
        ) from error
    if isinstance(found, dict) and {"model", "optimizer"} <= found.keys():
        raise ModelError(f"{file}: the state of a run to resume. Import the weights saved beside it.")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found):
        raise ModelError(f"{file}: wanted tensors by name, found {type(found).__name__}.")
    odd = [name for name, value in found.items() if not _is_plain(value)]
    if odd:
        raise ModelError(f"{file}: wanted dense tensors of half or single precision, not so: {_listed(odd)}.")
    kinds = {tensor.dtype for tensor in found.values()}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32  # holds every value of the other two
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def _is_plain(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    return dense and value.dtype in _DTYPES and value.is_contiguous() and value.numel() > 0


def _config(tensors: Mapping[str, Tensor], where: Path) -> dict[str, Any]:
    """Return the Hugging Face config of a MiniMind model, its sizes read from shapes (head_dim is q_norm's length)."""
    first = "model.layers.0."
    experts = {match[1] for name in tensors if (match := _EXPERT.fullmatch(name))}
    mlp = f"{first}mlp.experts.0.gate_proj.weight" if experts else f"{first}mlp.gate_proj.weight"
    needed = {_EMBEDDING: 2, f"{first}self_attn.q_norm.weight": 1, mlp: 2}
    needed |= {f"{first}self_attn.{part}_proj.weight": 2 for part in "qk"}
    missing = [name for name, dims in needed.items() if name not in tensors or tensors[name].dim() != dims]
    layers = {match[1] for name in tensors if (match := _LAYER.fullmatch(name))}
    if missing or 3 * len(layers) * (1 + len(experts)) > len(tensors):  # a layer has at least so many
        raise ModelError(
            f"{where}: not MiniMind's weights: no {_listed(missing or ['whole layers'])}; "
            f"it has {_listed(sorted(tensors))}."
        )
    head_dim = len(tensors[f"{first}self_attn.q_norm.weight"])
    vocab, hidden = tensors[_EMBEDDING].shape
    width = len(tensors[mlp])
    data: dict[str, Any] = {
        "model_type": "qwen3_moe" if experts else "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": len(tensors[f"{first}self_attn.q_proj.weight"]) // head_dim,
        "num_key_value_heads": len(tensors[f"{first}self_attn.k_proj.weight"]) // head_dim,
        "head_dim": head_dim,
        "max_position_embeddings": _CONTEXT,
        **_FIXED,
    }
    if experts:
        data |= {"num_experts": len(experts), "moe_intermediate_size": width, **_FIXED_MOE}
        data["router_aux_loss_coef"] = _AUXILIARY_LOSS
    return data


def _check_name(file: Path, data: Mapping[str, Any]) -> None:
    """Raise ModelError when a name in MiniMind's fashion belongs to another size or kind of model."""
    match = _NAME.fullmatch(file.stem)
    if match is None:
        return
    named, found = int(match["hidden"]), data["hidden_size"]
    if named != found or bool(match["moe"]) != ("num_experts" in data):
        kind = "a mixture of experts" if "num_experts" in data else "dense"
        raise ModelError(f"{file}: its name is not that of its tensors: hidden size {found}, {kind}. Mend the name.")


def _check_tokenizer(folder: Path, config: ModelConfig) -> int:
    """Return the id of the tokenizer's end of sequence. Raises ModelError when it does not go with the model."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder}: no tokenizer.json, wanted the folder of a tokenizer.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelError(f"{file}: not a tokenizer: {error}.") from error
    check_vocabulary(max(tokenizer.get_vocab().values(), default=0) + 1, config, str(folder))
    settings = folder / "tokenizer_config.json"
    end = read_json(settings).get("eos_token") if settings.is_file() else None
    token = end.get("content") if isinstance(end, dict) else end
    found = tokenizer.token_to_id(token) if isinstance(token, str) else None
    if found is None:
        raise ModelError(f"{settings}: eos_token={token!r} is no token of tokenizer.json.")
    return int(found)


def _check_export(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError for what MiniMind's code does not have."""
    if config.model_type not in {"qwen3", "qwen3_moe"}:
        raise ModelError(f"{folder}: MiniMind cannot hold a {config.model_type}, wanted a qwen3 or qwen3_moe.")
    fixed: dict[str, Any] = _FIXED | {"tie_word_embeddings": True} | (_FIXED_MOE if config.num_experts else {})
    odd = [
        f"{key}={found!r}, not {value!r}" for key, value in fixed.items() if (found := getattr(config, key)) != value
    ]
    if odd:
        raise ModelError(f"{folder}: MiniMind would run this model with other constants: {_listed(odd)}.")


def _compare(file: Path, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError listing every tensor that is missing, unexpected or of another shape than MiniMind's."""
    if faults := misfits(wanted, found):
        raise ModelError(f"{file}: not MiniMind's weights: {_listed(faults)}.")


def _listed(items: list[str]) -> str:
    """Join with semicolons, ten at most and then how many more."""
    rest = f"; and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(item[:_LONGEST] for item in items[:_SHOWN]) + rest
