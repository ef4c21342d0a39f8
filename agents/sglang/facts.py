"""What a server says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BadAnswer


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself; None where it does not say (a router, an older version).

    `max_length` is the longest sequence, prompt and sampled tokens together.
    """

    url: str
    model_path: str
    tokenizer_path: str
    weight_version: str
    is_generation: bool
    model_type: str | None = None
    version: str | None = None
    max_length: int | None = None
    has_tokenizer: bool | None = None
    enable_lora: bool | None = None
    tp_size: int | None = None
    dp_size: int | None = None


def other_model(facts: ServerFacts, folder: Path) -> str | None:
    """Return what to be told where a server has another folder than this one; None where it has it, or was pushed to.

    The folder may be a copy on another machine, so this is a word of caution and no error.
    """
    if facts.weight_version != "default" or Path(facts.model_path).resolve() == folder.resolve():
        return None
    return f"{facts.url} serves {facts.model_path}, not {folder}: is it the same model? Its weights are what samples"


def read_facts(url: str, model: Any, server: Any) -> ServerFacts:
    """Return the facts in the answers of `/model_info` and `/server_info` (None where it has no such page).

    Raises BadAnswer when the first names no model: this is no SGLang server.
    """
    if not isinstance(model, dict):
        raise BadAnswer(url, "/model_info", "its answer is no JSON object, so this is no SGLang server")
    if "model_path" not in model:
        raise BadAnswer(url, "/model_info", "it names no model, so this is no SGLang server")
    told = server if isinstance(server, dict) else {}
    skips = told.get("skip_tokenizer_init")
    return ServerFacts(
        url=url,
        model_path=str(model["model_path"]),
        tokenizer_path=str(model.get("tokenizer_path", "")),
        weight_version=str(model.get("weight_version", "")),
        is_generation=bool(model.get("is_generation", True)),
        model_type=model.get("model_type"),
        version=told.get("version"),
        max_length=told.get("max_req_input_len"),
        has_tokenizer=None if skips is None else not skips,
        enable_lora=bool(told.get("enable_lora") or told.get("lora_paths")) if told else None,
        tp_size=told.get("tp_size"),
        dp_size=told.get("dp_size"),
    )
