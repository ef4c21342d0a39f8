"""What a run samples with: the torch engine over the model itself, or SGLang servers that get its weights."""

from __future__ import annotations

from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

from ..agents.backend import Backend
from ..agents.loading import DTYPES, MOST_SEQUENCES
from ..agents.models import LanguageModel
from ..agents.models.lora import save_adapter
from ..agents.torch_engine import TorchEngine
from .config import TrainConfig


def make_backend(config: TrainConfig, model: LanguageModel, stack: ExitStack) -> Backend:
    """Return the backend of a config; what it holds outside this process is given back when `stack` closes.

    A server that the run starts writes its log beside the run's folder, to RUN.sglang.log. Raises ServerError where
    servers cannot be asked, LaunchFailed where one does not start.
    """
    sequences = min(config.prompts_per_step * config.num_generations, MOST_SEQUENCES)
    if config.backend == "torch":
        return TorchEngine(
            model,
            max_model_length=config.max_model_length,
            max_sequences=sequences,
            max_cache_tokens=config.max_cache_tokens,
            layers=config.layers,
        )
    urls = config.sglang_url
    if config.sglang_launch:
        urls = [_start(config, sequences, stack)]
    return _over_servers(config, model, urls, stack)


def _start(config: TrainConfig, sequences: int, stack: ExitStack) -> str:
    """Start a server that lives as long as the run, and return its address."""
    from ..agents.sglang.launch import launch, lora_flags

    adapters = lora_flags(config.lora_r or 0, device=config.device) if config.weight_sync == "adapter" else []
    run = Path(config.output_dir)
    run.parent.mkdir(parents=True, exist_ok=True)
    server = launch(
        Path(config.model),
        python=config.sglang_python,
        args=["--max-running-requests", str(sequences), *adapters, *config.sglang_args],
        device=config.device,
        dtype=config.dtype,
        log=run.with_name(f"{run.name}.sglang.log"),
    )
    return stack.enter_context(server).url


def _over_servers(config: TrainConfig, model: LanguageModel, urls: list[str], stack: ExitStack) -> Backend:
    """Return the engine over servers, with the way of its weights and the proof that they arrive."""
    from ..agents.sglang import Servers, SGLangEngine
    from ..agents.sglang.parity import Parity, default_tolerance, score_with
    from ..agents.sglang.weights import WeightSync, make_way

    run, start = Path(config.output_dir), Path(config.model)
    servers = Servers(urls)
    stack.callback(servers.close)
    shared = run / "weights"
    if config.weight_sync_dir is not None:  # where other runs may be, of the same name too
        own = blake2b(str(run.absolute()).encode(), digest_size=4).hexdigest()
        shared = Path(config.weight_sync_dir) / f"{run.name}-{own}"
    way = make_way(
        config.weight_sync,
        servers,
        folder=shared,
        start=start,
        save_adapter=(lambda folder: save_adapter(model, folder, start)) if config.lora_r is not None else None,
    )
    parity = Parity(
        score_with(model), model.config.vocab_size, config.sync_tolerance or default_tolerance(DTYPES[config.dtype])
    )
    longest = config.max_model_length or model.config.max_position_embeddings
    return SGLangEngine(
        servers,
        vocab_size=model.config.vocab_size,
        max_model_length=longest,
        sync=WeightSync(servers, way, parity, start),
    )
