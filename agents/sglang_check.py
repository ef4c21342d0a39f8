"""A dry check of an SGLang server: is it there, which model, which weights. Nothing is generated, nothing changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from ..tools.errors import RunError

_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    url: str
    model_path: str
    tokenizer_path: str
    weight_version: str
    is_generation: bool


def check_server(url: str) -> ServerFacts:
    """Ask a server for its model. Raises RunError when it cannot be reached, is not ready, or is no SGLang server."""
    base = url.rstrip("/")
    try:
        with httpx.Client(base_url=base, timeout=_SECONDS, trust_env=False) as client:
            client.get("/health").raise_for_status()
            found: Any = client.get("/model_info").raise_for_status().json()
    except httpx.HTTPStatusError as error:
        raise RunError(f"{base}: {error.request.url.path} answered {error.response.status_code}; not ready?") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RunError(f"{base}: no server can be reached: {error or type(error).__name__}") from error
    except ValueError as error:
        raise RunError(f"{base}: /model_info is no JSON, so this is no SGLang server") from error
    if not isinstance(found, dict) or "model_path" not in found:
        raise RunError(f"{base}: /model_info names no model, so this is no SGLang server")
    return ServerFacts(
        url=base,
        model_path=str(found["model_path"]),
        tokenizer_path=str(found.get("tokenizer_path", "")),
        weight_version=str(found.get("weight_version", "")),
        is_generation=bool(found.get("is_generation", True)),
    )
