"""The part of preflight that looks at SGLang servers: are they there, can they take what will be sent."""

from __future__ import annotations

import sys

from ..agents.sglang import check_server
from ..agents.sglang.facts import ServerFacts
from ..agents.sglang.launch import check_python
from ..agents.sglang.leftovers import leftovers
from ..tools.errors import ConfigError
from .config import TrainConfig
from .findings import Preflight


def look_at_servers(found: Preflight, config: TrainConfig) -> None:
    """Look at each server, or at the Python that is to start one; name servers that have outlived their owner."""
    for url in config.sglang_url:
        wanted = "an SGLang server that samples and takes weights"
        found.look("server", wanted, "`gymtune serve --model DIR`", lambda url=url: _server(url, config))  # type: ignore[misc]
    if config.sglang_launch:
        found.look("sglang", "a Python that has it", "--sglang-python PATH", lambda: _python(config))
    for record in leftovers():
        found.note("servers", "none whose owner is gone", f"`gymtune serve --end-leftovers` ends {record}")


def _server(url: str, config: TrainConfig) -> tuple[ServerFacts, str]:
    facts = check_server(url)
    if not facts.is_generation:
        raise ConfigError(f"{facts.url}: its model {facts.model_path} embeds or scores, it samples nothing")
    if config.weight_sync == "adapter" and facts.enable_lora is False:
        raise ConfigError(f"{facts.url}: weight_sync adapter wants a server that was started with SGLang's enable-lora")
    return facts, f"{facts.url}, SGLang {facts.version or '?'}, serving {facts.model_path}"


def _python(config: TrainConfig) -> tuple[str, str]:
    python = config.sglang_python or sys.executable
    version = check_python(python)
    return version, f"{python} has {version}"
