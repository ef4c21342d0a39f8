"""The torch backend: continuous batching over slots of a KV cache.

Sequences join and leave at every step, and a step is one pass through the model: one token of each that decodes, all
new tokens of each that joins. An episode keeps its slot while its tools run, so a next turn computes only what is new;
what prompts share is computed once and copied. All work happens inside the event loop, in the order in which requests
came: with tools that answer at once, the same requests give the same bits.

Memory: a sequence is admitted when its prompt and one more token fit. Idle sessions give way to it, and where a running
sequence needs more, the youngest one goes back to wait with what it has sampled; both are computed again later. To
reserve `max_new_tokens` in advance would leave most of the memory empty: most turns end long before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..tools.errors import ConfigError, RunError
from .backend import GenerateRequest, Generation, Layers
from .kv_cache import KVCache, Slot
from .model_passes import ModelPasses
from .models import LanguageModel
from .sampler import sample
from .stop_strings import contains_stop


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request on its way: its ids so far, the prompt's first, and who waits for it."""

    request: GenerateRequest
    future: asyncio.Future[Generation]
    tokens: list[int]
    slot: Slot | None = None
    logprobs: list[float] = field(default_factory=list)


class TorchEngine:
    """Samples from a `LanguageModel`.

    Args:
        model: the decoder; the engine may share it with a trainer (then `load_weights` copies nothing).
        max_model_length: longest sequence; at most the model's own context, and `max_cache_tokens`.
        max_sequences: slots, so sequences sampled or kept at the same time.
        version: version of the weights the model holds now.
        max_cache_tokens: places for tokens in the KV cache, all slots together; None is no bound. While rows are
            moved, one layer of one shelf is held twice.
        layers: how the model's layers are run, see `Layers`.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_model_length: int | None = None,
        max_sequences: int = 64,
        version: int = 0,
        max_cache_tokens: int | None = None,
        layers: Layers = "packed",
    ) -> None:
        if max_cache_tokens is not None and max_cache_tokens < 2:
            raise ConfigError(f"max_cache_tokens must be at least 2 (a prompt and a token), got {max_cache_tokens}")
        longest = model.config.max_position_embeddings
        self._length = min(max_model_length or longest, max_cache_tokens or longest, longest)
        self.model, self.version = model, version
        like = next(model.parameters()).detach().new_empty(0)
        self.device = like.device
        self.cache = KVCache(model.config, max_sequences, like, longest=self._length, max_tokens=max_cache_tokens)
        self._passes = ModelPasses(model, self.cache, layers)
        self._waiting: list[_Sequence] = []
        self._active: list[_Sequence] = []  # oldest first
        self._runner: asyncio.Task[None] | None = None

    @property
    def max_model_length(self) -> int:
        """Longest sequence, prompt and sampled tokens together."""
        return self._length

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises ConfigError for a prompt that cannot fit or ids outside the vocabulary."""
        self._check(request.prompt_ids, self._length - 1, f"max_model_length {self._length}")
        if request.sampling.stop and request.decode is None:
            raise ConfigError(f"stop strings {request.sampling.stop} need the request's `decode`: ids have no text")
        loop = asyncio.get_running_loop()
        sequence = _Sequence(request, loop.create_future(), list(request.prompt_ids))
        self._waiting.append(sequence)
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run())
        try:
            return await sequence.future
        finally:
            for queue in (self._waiting, self._active):  # still there only when this call was cancelled
                if sequence in queue:
                    queue.remove(sequence)
                    self._let_go(sequence)

    async def score(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return the log-probs of `ids[1:]`, each given the ids before it: full softmax at the temperature, in fp32.

        Temperature 0 is told at 1, as by `generate`. Raises ConfigError for ids that do not fit the model.
        """
        context = self.model.config.max_position_embeddings
        self._check(ids, context, f"the model's context is {context}")
        try:
            with torch.inference_mode():
                return self._passes.score(ids, temperature or 1.0)
        except (RuntimeError, MemoryError) as error:
            raise self._failure(error) from error

    def release(self, session: str) -> None:
        """Free the slot of a session."""
        self.cache.release(session)

    def metrics(self) -> dict[str, float]:
        """Nothing: weights are there at once."""
        return {}

    def close(self) -> None:
        """Nothing is held outside this process."""

    def load_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` (by parameter name) into the model and drop every kept key and value.

        Raises RunError, and changes nothing, while sequences are being sampled and for names or shapes that differ.
        """
        if self._active or self._waiting:
            raise RunError(f"load_weights: {len(self._active) + len(self._waiting)} sequences are being sampled")
        own = dict(self.model.named_parameters())
        if own.keys() != weights.keys():
            raise RunError(f"load_weights: names differ: {sorted(own.keys() ^ weights.keys())[:5]}")
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise RunError(f"load_weights: {name} must be {tuple(own[name].shape)}, got {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in weights.items():
                if tensor.data_ptr() != own[name].data_ptr():
                    own[name].copy_(tensor)
        self.version = version
        self._passes.weights_changed()
        self.cache.clear()

    def _check(self, ids: Sequence[int], most: int, why: str) -> None:
        if not 1 <= len(ids) <= most:
            bound = self.cache.max_tokens
            cache = f", bound by max_cache_tokens {bound}: raise it or shorten the prompt" if bound == most + 1 else ""
            raise ConfigError(f"a prompt must have 1 to {most} tokens ({why}{cache}), got {len(ids)}")
        size = self.model.config.vocab_size
        for token in (min(ids), max(ids)):
            if not 0 <= token < size:
                raise ConfigError(f"token id {token} is outside the vocabulary of {size}: another model's prompt?")

    async def _run(self) -> None:
        """Step until nothing waits. Between steps, finished episodes act and ask for their next turn."""
        while self._waiting or self._active:
            try:
                self.step()
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it; the rollout flags the episodes
                self._fail(self._failure(error))
            await asyncio.sleep(0)

    @torch.inference_mode()
    def step(self) -> None:
        """Make room for what runs, admit what waits and fits, and give every running sequence its next token."""
        self._make_room()
        self._admit()
        running = list(self._active)
        self._append(running, self._passes.next_logits([s.slot for s in running if s.slot is not None]))

    def _make_room(self) -> None:
        """Have room for one more token of each running sequence, oldest first; the youngest one gives way."""
        for sequence in list(self._active):
            while sequence.slot is not None and not self.cache.extend(sequence.slot):
                youngest = self._active.pop()
                youngest.slot = None
                self.cache.release(youngest.request.session)
                self._waiting.insert(0, youngest)

    def _admit(self) -> None:
        """Let waiting sequences run, in order of arrival, while there is room.

        One that shares much with what is computed only now waits for that: a group's prompt is computed once.
        """
        for sequence in list(self._waiting):
            if self.cache.pays_to_wait(sequence.tokens):
                continue
            sequence.slot = self.cache.acquire(sequence.request.session, sequence.tokens)
            if sequence.slot is None:
                break
            self._waiting.remove(sequence)
            self._active.append(sequence)

    def _append(self, sequences: Sequence[_Sequence], logits: Tensor) -> None:
        """Sample one token a sequence; finish those that stop or are full."""
        requests, places = [s.request for s in sequences], [len(s.logprobs) for s in sequences]
        drawn = sample(logits, [r.sampling for r in requests], [r.seed for r in requests], places)
        for sequence, token, logprob in zip(sequences, *drawn, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            reason = self._ending(sequence, token)
            if reason is not None:
                self._finish(sequence, reason)

    def _ending(self, sequence: _Sequence, token: int) -> Literal["stop", "length"] | None:
        """Tell whether its newest token ends a turn, and why."""
        request, tokens = sequence.request, sequence.tokens
        stop, decode, start = request.sampling.stop, request.decode, len(request.prompt_ids)
        if token in request.stop_ids or (stop and decode and contains_stop(tokens, start, stop, decode)):
            return "stop"
        full = len(tokens) >= self._length or len(tokens) - start >= request.sampling.max_new_tokens
        return "length" if full else None

    def _finish(self, sequence: _Sequence, reason: Literal["stop", "length"]) -> None:
        self._active.remove(sequence)
        self._let_go(sequence)
        if not sequence.future.done():
            ids = sequence.tokens[len(sequence.request.prompt_ids) :]
            sequence.future.set_result(Generation(ids, sequence.logprobs, reason, self.version))

    def _let_go(self, sequence: _Sequence) -> None:
        """Leave the slot to the session's next turn."""
        if sequence.slot is not None:
            self.cache.keep(sequence.slot)

    def _failure(self, error: Exception) -> RunError:
        """Name an error for those who wait."""
        told = f"the torch engine failed: {error!r}"
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            size = self.cache.allocated * self.cache.bytes_per_token
            told = (
                f"the torch engine is out of memory; {size >> 20} MiB of it were keys and values of "
                f"{self.cache.allocated} tokens: set or lower max_cache_tokens, or run fewer episodes at once ({error})"
            )
        failure = RunError(told)
        failure.__cause__ = error
        return failure

    def _fail(self, failure: RunError) -> None:
        """Tell those who run (or, when nobody does, who waited first), and go on with the others from scratch."""
        failed = self._active or self._waiting[:1]
        self._active = []
        self._waiting = [sequence for sequence in self._waiting if sequence not in failed]
        self.cache.clear()
        for sequence in failed:
            if not sequence.future.done():
                sequence.future.set_exception(failure)
