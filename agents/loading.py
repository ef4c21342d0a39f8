"""From a model folder to an agent that acts: decoder, renderer, torch engine and sampling in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ..tools.errors import ConfigError, closest
from .agent import ModelAgent
from .backend import Backend
from .models import LanguageModel, check_vocabulary, load_any
from .renderer import Renderer
from .store import describe
from .threads import use_threads
from .torch_engine import TorchEngine
from .trajectory import Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OF_SERVERS = {"sglang_url", "sglang", "sglang_python"}
MOST_SEQUENCES = 256
"""Slots of the torch engine: more episodes than these wait for one."""


def load_agent(
    folder: str | Path,
    sampling: Sampling | None = None,
    *,
    concurrency: int = 64,
    device: str = "cpu",
    dtype: str = "float32",
    torch_threads: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **engine: Any,
) -> ModelAgent:
    """Return the policy of a model folder, ready for `concurrency` episodes at once; `engine` goes to `TorchEngine`.

    With `sglang_url` among them, the servers at these addresses sample, with the weights that they have; of the folder,
    tokenizer and config alone are read. With `sglang="launch"` a server is started for the folder, by the Python that
    `sglang_python` names; its log is sglang.log. `agent.backend.close()` gives connections and server back.

    Raises ModelError for a folder that is no model, ConfigError for a device or dtype that is not there and an argument
    that the chat template does not read.
    """
    use_threads(torch_threads)
    if served := {name: engine.pop(name) for name in _OF_SERVERS & engine.keys()}:
        renderer = _renderer(folder, chat_template_kwargs)
        placed = {"device": device, "dtype": dtype}
        return ModelAgent(
            _served(Path(folder), engine, concurrency=concurrency, placed=placed, **served), renderer, sampling
        )
    model = place_model(folder, device=device, dtype=dtype)
    renderer = _renderer(folder, chat_template_kwargs)
    check_vocabulary(len(renderer.tokenizer), model.config, str(folder))
    backend = TorchEngine(model, max_sequences=min(concurrency, MOST_SEQUENCES), **engine)
    return ModelAgent(backend, renderer, sampling)


def _renderer(folder: str | Path, chat_template_kwargs: Mapping[str, Any] | None) -> Renderer:
    return Renderer.from_folder(folder, template_options=chat_template_kwargs)


def _served(
    folder: Path,
    engine: Mapping[str, Any],
    *,
    concurrency: int,
    placed: Mapping[str, str],
    sglang_url: Sequence[str] = (),
    sglang: str | None = None,
    sglang_python: str | None = None,
) -> Backend:
    """Return servers as a backend: those at the addresses, or one that is started and ends with it.

    Raises ConfigError for an option that is of the torch engine alone, and for options that contradict each other.
    """
    from .models.inspection import inspect_model
    from .sglang import Servers, SGLangEngine
    from .sglang.launch import launch

    if idle := engine.keys() - {"max_model_length"}:
        raise ConfigError(f"{min(idle)} is of the torch engine; servers have their own: leave it out")
    if sglang not in (None, "launch") or (sglang == "launch") == bool(sglang_url):
        raise ConfigError(f"sglang=launch or sglang_url: one of both, got {sglang} and {list(sglang_url)}")
    facts = inspect_model(folder)
    with ExitStack() as stack:
        if sglang is None:
            if sglang_python is not None or dict(placed) != {"device": "cpu", "dtype": "float32"}:
                raise ConfigError(
                    "sglang_python, device and dtype are for a server that is started; sglang_url names one"
                )
            servers = Servers(sglang_url)
        else:
            slots = ["--max-running-requests", str(concurrency)]
            server = launch(
                folder,
                python=sglang_python,
                args=slots,
                device=placed["device"],
                dtype=placed["dtype"],
                log=Path("sglang.log"),
            )
            servers = Servers([stack.enter_context(server).url])
        stack.callback(servers.close)
        longest = engine.get("max_model_length") or facts.context
        made = SGLangEngine(servers, vocab_size=facts.vocab_size, max_model_length=longest)
        made.on_close = stack.pop_all().close
    return made


def place_model(folder: str | Path, *, device: str = "cpu", dtype: str = "float32") -> LanguageModel:
    """Return the model of a folder, its weights in `dtype` on `device`.

    Raises ModelError for a folder that is no model, ConfigError for a device or dtype that is not there.
    """
    check_device(device, dtype)
    return load_any(folder, DTYPES[dtype], device)


def check_device(device: str, dtype: str) -> None:
    """Raise ConfigError for a device or dtype that is not there."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}.{closest(dtype, DTYPES)}")
    kind, _, index = device.partition(":")
    if device != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise ConfigError(f"device {device!r} is not there: torch {torch.__version__} sees no GPU; use cpu")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()}")


def make_sampling(**given: Any) -> Sampling:
    """Return a `Sampling` of the given fields. Raises ConfigError naming the field that is out of range."""
    try:
        return Sampling(**given)
    except ValidationError as error:
        raise ConfigError(f"sampling: {describe(error)}") from error
