"""SGLang servers as a backend: ids in, ids and log-probs out, as from the torch engine.

Where they differ: a server's random numbers are its own (the seed of a request has no effect), and it ends a turn at
the model's own end tokens as well as at those of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...tools.errors import ConfigError, RunError
from ..backend import GenerateRequest, Generation
from ..stop_strings import contains_stop
from .servers import Servers
from .wire import Answer, adapter_version, request_body

if TYPE_CHECKING:
    from torch import Tensor


class Sync(Protocol):
    """How servers get weights. `metrics` are of the last push."""

    metrics: dict[str, float]

    def push(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Bring weights to every server, and return when all of them sample with these."""
        ...

    def extra_fields(self) -> dict[str, Any]:
        """Return what every request must carry now: `lora_path`, the name of an adapter, or nothing."""
        ...

    def close(self) -> None:
        """Give back what is held for it."""
        ...


class SGLangEngine:
    """Samples from SGLang servers that hold one model.

    Args:
        servers: the servers. The engine closes them.
        vocab_size: of the model: an id outside of it would end the server, so it is refused here.
        max_model_length: longest sequence, prompt and sampled tokens; at most what the servers can hold.
        sync: how `load_weights` reaches the servers; without it the weights stay as they are.
        version: of the weights the servers hold now, where they do not name a version by number themselves.

    Attributes:
        facts: what the servers said of themselves.
        on_close: called last when it is closed, by whoever gave it servers that shall end with it.

    Raises ConfigError where nobody knows the longest sequence or a server embeds instead of sampling; ServerError where
    a server cannot be asked.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        vocab_size: int,
        max_model_length: int | None = None,
        sync: Sync | None = None,
        version: int = 0,
    ) -> None:
        self.on_close: Callable[[], None] | None = None
        self.servers, self.vocab_size, self.sync, self.version = servers, vocab_size, sync, version
        self.facts = facts = [servers.facts(url) for url in servers.urls]
        for fact in facts:
            if not fact.is_generation:
                raise ConfigError(f"{fact.url}: its model {fact.model_path} embeds, it samples nothing")
        lengths = [fact.max_length for fact in facts if fact.max_length is not None]
        if max_model_length is not None:
            lengths.append(max_model_length)
        if not lengths:
            raise ConfigError(f"{servers.urls[0]} does not say how long a sequence may be: give max_model_length")
        self._length = min(lengths)
        self._reads_text = all(fact.has_tokenizer for fact in facts)

    @property
    def max_model_length(self) -> int:
        """Longest sequence, prompt and sampled tokens together."""
        return self._length

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Cancelling the call aborts it on the server.

        Stop strings end a turn where the text of its ids contains one, as with the torch engine. A server without a
        tokenizer samples on to the end of the turn, which is then cut there: what was sampled after a place has no say
        in what was sampled before.

        Raises ConfigError for a prompt that cannot fit or ids outside the vocabulary, ServerError as `Servers` does.
        """
        self._check(request.prompt_ids)
        stop, decode = request.sampling.stop, request.decode
        if stop and decode is None:
            raise ConfigError(f"stop strings {stop} need the request's `decode`: ids have no text")
        room = min(request.sampling.max_new_tokens, self._length - len(request.prompt_ids))
        extra = self.sync.extra_fields() if self.sync is not None else {}
        body = {**request_body(request, max_new_tokens=room, with_stop=self._reads_text), **extra}
        answer = await self.servers.generate(body)
        if stop and decode is not None:
            answer = _cut(answer, stop, decode)
        spans = self._spans(answer, extra.get("lora_path"))
        return Generation(
            ids=answer.ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish,
            policy_version=min(version for version, _, _ in spans),
            spans=tuple(spans) if len(spans) > 1 else (),
        )

    def release(self, session: str) -> None:
        """Nothing is kept: a server's cache of prefixes is its own."""

    def load_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Bring weights to the servers. Raises RunError without a `sync`, and what that raises."""
        if self.sync is None:
            raise RunError(f"load_weights: nothing says how version {version} reaches the servers: give a sync")
        self.sync.push(version, weights)
        self.version = version

    def metrics(self) -> dict[str, float]:
        """Return what the last push took, and how far the servers' log-probs were off: `sync/*`."""
        return dict(self.sync.metrics) if self.sync is not None else {}

    def close(self) -> None:
        """Abort what is under way and close the connections."""
        if self.sync is not None:
            self.sync.close()
        self.servers.close()
        if self.on_close is not None:
            self.on_close()

    def _check(self, ids: Sequence[int]) -> None:
        if not 1 <= len(ids) < self._length:
            raise ConfigError(
                f"a prompt must have 1 to {self._length - 1} tokens (max_model_length {self._length}), got {len(ids)}"
            )
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"token id {token} is outside the vocabulary of {self.vocab_size}: another model's prompt?"
                )

    def _spans(self, answer: Answer, adapter: str | None) -> list[tuple[int, int, int]]:
        """Return what each version sampled, as numbers; what has no number is the version the servers began with."""
        if adapter is not None:  # it stays what it was when the request was sent
            return [(adapter_version(adapter), 0, len(answer.ids))]
        spans: list[tuple[int, int, int]] = []
        for name, start, end in answer.spans:
            version = int(name) if name.isdecimal() else self.version
            if spans and spans[-1][0] == version:
                start = spans.pop()[1]  # noqa: PLW2901 - a pause in between changed nothing
            spans.append((version, start, end))
        return spans


def _cut(answer: Answer, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Answer:
    """Return the answer up to the token that completes a stop string, if any does."""
    for end in range(1, len(answer.ids) + 1):
        if contains_stop(answer.ids[:end], 0, stop, decode):
            spans = [(version, start, min(last, end)) for version, start, last in answer.spans if start < end]
            return Answer(answer.ids[:end], answer.logprobs[:end], "stop", spans)
    return answer
