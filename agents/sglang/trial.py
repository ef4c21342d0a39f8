"""A trial of a server: what it is, and whether a few tokens come back as they must. Nothing on it is changed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..backend import GenerateRequest
from ..trajectory import Sampling
from .facts import ServerFacts
from .servers import Servers
from .wire import GENERATE, read_scores, request_body, scoring_body

_PROMPT = (1, 2)  # ids that every vocabulary has
_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """What a server said of itself, the ids and log-probs that it sampled after a fixed prompt, and how far these are
    from the log-probs that it gives the same ids when it scores them.
    """

    facts: ServerFacts
    ids: list[int]
    logprobs: list[float]
    gap: float


def try_server(url: str, *, api_key: str | None = None) -> Trial:
    """Ask a server what it is, let it sample a few tokens at temperature 1, and let it score these.

    Raises the typed errors: Unreachable where nobody answers, BadAnswer for what is no SGLang server, or one whose ids
    and log-probs do not belong together.
    """
    servers = Servers([url], api_key=api_key, patience_seconds=0.0)
    try:
        facts = servers.facts(url)
        request = GenerateRequest(_PROMPT, Sampling(), (), seed=0, session="trial")
        answer = asyncio.run(servers.generate(request_body(request, max_new_tokens=_TOKENS)))
        ids = [*_PROMPT, *answer.ids]
        scores = read_scores(facts.url, ids, servers.post(url, GENERATE, scoring_body(ids)))
    finally:
        servers.close()
    told = scores[len(_PROMPT) - 1 :]
    gap = max(abs(said - scored) for said, scored in zip(answer.logprobs, told, strict=True))
    return Trial(facts, answer.ids, answer.logprobs, gap)
