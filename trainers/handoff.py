"""The hand-off record of a finished run: what inference needs to know of the model that training left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from ..agents.agent import ModelAgent
from ..agents.models import LanguageModel, has_adapter
from ..agents.models.classifier import classifier_name
from ..agents.renderer import Renderer
from .checkpoint import ADAPTER
from .config import TrainConfig
from .registry import ALGORITHMS

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as families call them


def handoff_record(
    config: TrainConfig, model: LanguageModel, agent: ModelAgent, prefix: str, lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the record, as JSON data; paths are relative to the run folder.

    `prefix` names the folder of the finished model, `lines` are the run's metrics. Where a run measured nothing of
    something, its entry is null.
    """
    assert agent.renderer is not None
    adapted, scores = has_adapter(model), ALGORITHMS[config.algo].scores
    return {
        "prefix": prefix,
        "folder": prefix,
        "base_model": config.model,
        "architecture": architecture(model, scores=scores),
        "dtype": str(model.head_weight.dtype).removeprefix("torch."),
        "weights": "merged" if adapted else "full",
        "adapter": f"{prefix}/{ADAPTER}" if adapted and not scores else None,
        "chat": chat(config, agent.renderer),
        "sampling": agent.sampling.model_dump(mode="json") if agent.sampling is not None else None,
        "max_model_length": agent.max_model_length,
        "algo": config.algo,
        "env": config.env,
        "env_args": config.env_args,
        "data": config.data or config.trajectories,
        "steps": config.max_steps,
        "success": success(lines),
    }


def architecture(model: LanguageModel, *, scores: bool = False) -> dict[str, Any]:
    """Return family and numbers of a model; `kind` is `dense` or `moe`, `class` that of transformers which opens it."""
    shape, data = model.config, model.config.to_dict()
    experts = next((int(data[key]) for key in _EXPERTS if data.get(key)), 0)
    return {
        "model_type": shape.model_type,
        "class": classifier_name(model.config) if scores else (data.get("architectures") or [None])[0],
        "kind": "moe" if experts else "dense",
        "num_experts": experts,
        "num_experts_per_tok": int(data.get("num_experts_per_tok") or 0),
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "eos_token_ids": list(shape.eos_token_ids),
    }


def chat(config: TrainConfig, renderer: Renderer) -> dict[str, Any]:
    """Return how the model is talked to. `tokenizer` is the fingerprint that its trajectories bear."""
    return {
        "format": renderer.chat_format.name,
        "template": blake2b(str(renderer.chat_template).encode(), digest_size=8).hexdigest(),
        "template_kwargs": dict(renderer.template_options),
        "thinking_ratio": config.thinking_ratio,
        "tokenizer": renderer.fingerprint,
        "stop_ids": list(renderer.stop_ids),
    }


def success(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last and the best success on held-out tasks with their steps, and that of the last training step."""
    evaluated = [line for line in lines if "eval/success" in line]
    trained = [line for line in lines if "success" in line]
    final = evaluated[-1] if evaluated else None
    best = max(evaluated, key=lambda line: line["eval/success"], default=None)  # the first of equals
    return {
        "final": None if final is None else {"step": final["step"], "success": final["eval/success"]},
        "best": None if best is None else {"step": best["step"], "success": best["eval/success"], "folder": "best"},
        "training": {"step": trained[-1]["step"], "success": trained[-1]["success"]} if trained else None,
    }
