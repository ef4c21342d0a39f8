"""Any decoder-only architecture that transformers knows, behind the contract of our own decoder.

The layers are those of transformers, their attention is ours: transformers lets a function be registered for it, and
hands it the queries, keys and values after rope. So engine, cache and trainers work as they do with `Decoder`.

What a family does in other ways (a window, a recurrent state, a cap on logits) would make sampler and trainer compute
other numbers. Known ones are refused by name; and every model is tried on a few tokens when it is loaded: in one pass,
in two that share nothing but what went through attention, and as transformers itself runs it. All three must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...tools.errors import ConfigError, DataError, GymtuneError, ModelError, closest
from .checkpoint import load_model, save_model
from .config import MAKE_ONE, ModelConfig, read_json
from .contract import LanguageModel
from .decoder import Attend, Decoder
from .foreign_attention import NAME, register, run_body
from .foreign_config import ForeignConfig, logit_scale, refuse_unsupported
from .foreign_probe import measure, prove

_SHOWN = 10


class ForeignModel(nn.Module):
    """A causal language model of transformers that attends through an `Attend`; see `load_foreign`.

    It has the children of the model it wraps, so parameters have the names that transformers gives them: those of the
    files, but for a few families (experts are fused, GPT-NeoX's head is `lm_head`). Dropout never acts, in training
    neither: the trainer's log-probs must be the sampler's.
    """

    native = False

    def __init__(self, opened: Any, config: ForeignConfig) -> None:
        """Wrap a `PreTrainedModel` opened with our attention."""
        super().__init__()
        self.config = config
        self._opened = (opened.eval(),)  # a tuple: as a child, its name would stand before that of every parameter
        for name, child in opened.named_children():
            self.add_module(name, child)
        self._scale = logit_scale(opened.config.get_text_config())

    @property
    def head_weight(self) -> Tensor:
        """The (V, E) matrix of the logits, or (V, E + 1) where the head has a bias, which is then the last column."""
        weight, bias = self._head()
        return weight if bias is None else torch.cat((weight, bias[:, None]), 1)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, real: Tensor | None = None) -> Tensor:
        """Return hidden states (B, T, E) that `head_weight` maps to logits; arguments as of `Decoder.forward`.

        A family's scale of the logits is in them already, and where the head has a bias, a last channel to meet it.
        Raises DataError for positions past the context, padding's too: learned embeddings and some kinds of rope have
        no numbers for them.
        """
        context = self.config.max_position_embeddings
        if not torch.compiler.is_compiling() and int(positions.max()) >= context:
            raise DataError(f"a sequence reaches position {int(positions.max())}, the model's context is {context}")
        hidden = run_body(self._opened[0], ids, positions, attend)
        if self._head()[1] is not None:
            hidden = F.pad(hidden, (0, 1), value=1.0)
        return hidden if self._scale == 1.0 else hidden * self._scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states as `forward` gives them to logits (..., V): float32, or float64 for a float64 model."""
        weight, bias = self._head()
        width = weight.shape[1]
        logits = F.linear(hidden[..., :width], weight)
        if bias is not None:  # not by `head_weight`, which copies the whole matrix
            logits = logits + hidden[..., width:] * bias
        return logits if logits.dtype == torch.float64 else logits.float()

    def checkpoint_layers(self) -> None:
        """Raise ConfigError: transformers checkpoints layers in its own training mode only."""
        raise ConfigError(f"gradient_checkpointing needs a model of our own decoder, not {self.config.model_type!r}")

    def router_loss(self) -> None:
        """Return None: the balance of a foreign model's experts is not trained."""

    def train(self, mode: bool = True) -> ForeignModel:
        """Note the mode; the layers stay as they are in evaluation, so that no dropout acts."""
        self.training = mode
        return self

    def save(self, folder: str | Path) -> None:
        """Write config, generation config and safetensors as transformers does, in place."""
        self._opened[0].save_pretrained(folder)

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """Return weight (V, E) and bias (V,) of the layer that makes logits, tied to the embedding or not."""
        head = self._opened[0].get_output_embeddings()
        return head.weight, getattr(head, "bias", None)


def load_foreign(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> ForeignModel:
    """Open a Hugging Face folder with transformers: local safetensors only, and never code from the folder.

    Raises ModelError, naming what, for a folder that is no model, tensors that are missing, odd or of another shape,
    and a family that this contract cannot hold (see the module).
    """
    path = Path(folder)
    opened = _open(path, dtype)
    with _foreign_code(path, "its layers do not run with our attention"), torch.no_grad():
        opened = opened.to(device)
        if torch.device(device).type == "cpu":
            for tensor in (*opened.parameters(), *opened.buffers()):
                tensor.data = tensor.data.clone()  # they lie in the mapped file, which a save in place would pull away
        model = ForeignModel(opened, measure(opened, path))
        prove(model, opened, path)
    return model


def load_any(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LanguageModel:
    """Open a Hugging Face folder with our own decoder where that has all the model needs, else with transformers.

    `native` of what is returned says which it was. Raises ModelError as `load_model` and `load_foreign` do.
    """
    try:
        ModelConfig.from_folder(folder)
    except ModelError as own:
        if not (Path(folder) / "config.json").is_file():
            raise
        try:
            return load_foreign(folder, dtype, device)
        except ModelError as error:
            raise ModelError(f"{error} (Our own decoder: {own})") from error
    return load_model(folder, dtype, device)


def save_any(model: LanguageModel, folder: str | Path) -> None:
    """Write a model of either kind as a Hugging Face folder, in place."""
    if isinstance(model, ForeignModel):
        model.save(folder)
    elif isinstance(model, Decoder):
        save_model(model, folder)
    else:
        raise TypeError(f"wanted a Decoder or a ForeignModel, got {type(model).__name__}")


def read_foreign_config(path: Path) -> Any:
    """Return the config of a folder as transformers reads it; raises ModelError for all that a config can tell."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    where = path / "config.json"
    if not where.is_file():
        raise ModelError(f"{path}: not a model folder, it has no config.json. {MAKE_ONE}")
    data = read_json(where)
    kind = data.get("model_type")
    if kind not in CONFIG_MAPPING:
        code = " Code that comes with a model (auto_map) is never run." if "auto_map" in data else ""
        near = closest(str(kind), CONFIG_MAPPING)
        near = near if "Did you mean" in near else ""  # else it lists hundreds
        raise ModelError(f"{where}: model_type {kind!r} is unknown to transformers.{code}{near}")
    with _foreign_code(path, "transformers does not read its config"):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    refuse_unsupported(config, str(where))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{where}: model_type {kind!r} has no causal language model in transformers.")
    return config


def _open(path: Path, dtype: torch.dtype) -> Any:
    """Open the folder with transformers and our attention."""
    from transformers import AutoModelForCausalLM

    config = read_foreign_config(path)
    register()
    with _foreign_code(path, "transformers does not open it with our attention"):
        opened, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that all of them are listed
            output_loading_info=True,
        )
    _refuse_faults(report, path)
    return opened


def _refuse_faults(report: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError listing every tensor that transformers missed, did not want or found in another shape."""
    kinds = ("missing", "unexpected", "mismatched")
    faults = [f"{kind} {key}" for kind in kinds for key in sorted(map(str, report[f"{kind}_keys"]))]
    if faults:
        rest = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        shown = "; ".join(faults[:_SHOWN])
        raise ModelError(f"{path}: weights do not fit config.json: {shown}{rest}. Mend the config or the file.")


@contextmanager
def _foreign_code(path: Path, what: str) -> Iterator[None]:
    """Turn whatever the code of some hundred families raises into a ModelError."""
    try:
        yield
    except GymtuneError:
        raise
    except Exception as error:  # they raise what they like, and all of it means the same here
        first = (str(error).strip() or "no message").splitlines()[0]
        raise ModelError(f"{path}: {what}: {type(error).__name__}: {first}") from error
