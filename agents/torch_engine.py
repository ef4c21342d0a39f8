"""The torch backend: continuous batching over slots of a KV cache.

Sequences join and leave at every step. An episode keeps its slot while its tools run, so a next turn prefills only
what is new; the samples of a group share one prefill of their prompt. All work happens inside the event loop, in the
order in which requests came: with tools that answer at once, the same requests give the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..tools.errors import ConfigError, RunError
from .backend import GenerateRequest, Generation
from .kv_cache import CacheAttend, KVCache
from .models import Decoder
from .sampler import sample

_LIKE = 1.5  # prompts prefilled together differ in length by at most this factor: padding costs as much as tokens


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request on its way: what it has sampled so far, and who waits for it."""

    request: GenerateRequest
    future: asyncio.Future[Generation]
    slot: int = -1
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TorchEngine:
    """Samples from a `Decoder`.

    Args:
        model: the decoder; the engine may share it with a trainer (then `load_weights` copies nothing).
        max_model_length: longest sequence; at most the model's own context.
        max_sequences: slots, so sequences sampled or kept at the same time.
        version: version of the weights the model holds now.
    """

    def __init__(
        self, model: Decoder, *, max_model_length: int | None = None, max_sequences: int = 64, version: int = 0
    ) -> None:
        longest = model.config.max_position_embeddings
        self._length = min(max_model_length or longest, longest)
        self.model, self.version = model, version
        parameter = next(model.parameters())
        self.device = parameter.device
        self.cache = KVCache(model.config, max_sequences, parameter.dtype, self.device)
        self._waiting: list[_Sequence] = []
        self._active: list[_Sequence] = []
        self._runner: asyncio.Task[None] | None = None

    @property
    def max_model_length(self) -> int:
        """Longest sequence, prompt and sampled tokens together."""
        return self._length

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises ConfigError for a prompt that cannot fit or ids outside the vocabulary."""
        self._check(request)
        loop = asyncio.get_running_loop()
        sequence = _Sequence(request, loop.create_future())
        self._waiting.append(sequence)
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run())
        try:
            return await sequence.future
        finally:
            for queue in (self._waiting, self._active):  # still there only when this call was cancelled
                if sequence in queue:
                    queue.remove(sequence)

    def release(self, session: str) -> None:
        """Free the slot of a session."""
        self.cache.release(session)

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
        self.cache.clear()

    def _check(self, request: GenerateRequest) -> None:
        room = self._length - len(request.prompt_ids)
        if not request.prompt_ids or room < 1:
            raise ConfigError(
                f"a prompt must have 1 to {self._length - 1} tokens (max_model_length {self._length}), "
                f"got {len(request.prompt_ids)}"
            )
        size = self.model.config.vocab_size
        for token in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= token < size:
                raise ConfigError(f"token id {token} is outside the vocabulary of {size}: another model's prompt?")

    async def _run(self) -> None:
        """Step until nothing waits. Between steps, finished episodes act and ask for their next turn."""
        try:
            while self._waiting or self._active:
                self.step()
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it; the rollout flags the episodes
            failed = [*self._waiting, *self._active]
            self._waiting, self._active = [], []
            for sequence in failed:
                if not sequence.future.done():
                    failure = RunError(f"the torch engine failed: {error!r}")
                    failure.__cause__ = error
                    sequence.future.set_exception(failure)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what waits and has a slot (prefill), then give every active sequence its next token."""
        decoding = list(self._active)
        admitted = self._admit()
        self._active += admitted
        if admitted:
            self._prefill(admitted)
        if decoding:
            self._decode(decoding)

    def _admit(self) -> list[_Sequence]:
        """Move waiting sequences to slots, in order of arrival, while there are slots."""
        admitted = []
        busy = {sequence.slot for sequence in self._active}
        for sequence in list(self._waiting):
            slot = self.cache.acquire(sequence.request.session, sequence.request.prompt_ids, busy)
            if slot is None:
                break
            sequence.slot = slot
            busy.add(slot)
            self._waiting.remove(sequence)
            admitted.append(sequence)
        return admitted

    def _prefill(self, admitted: Sequence[_Sequence]) -> None:
        """Compute keys and values of the prompts' new tokens, equal prompts once, and sample each first token."""
        twins: dict[tuple[int, ...], list[_Sequence]] = {}
        for sequence in admitted:
            fresh = self.cache.lengths[sequence.slot] == 0
            key = tuple(sequence.request.prompt_ids) if fresh else (-1, sequence.slot)
            twins.setdefault(key, []).append(sequence)
        firsts = [group[0] for group in twins.values()]
        news = [s.request.prompt_ids[self.cache.lengths[s.slot] :] for s in firsts]
        hidden = self._last_hidden([s.slot for s in firsts], news)
        for sequence, new in zip(firsts, news, strict=True):
            self.cache.lengths[sequence.slot] += len(new)
        for group in twins.values():
            self.cache.copy(group[0].slot, [s.slot for s in group[1:]])
        counts = torch.tensor([len(group) for group in twins.values()], device=self.device)
        logits = self.model.logits(hidden).repeat_interleave(counts, 0)
        ordered = [sequence for group in twins.values() for sequence in group]
        self._append(ordered, logits)

    def _last_hidden(self, slots: Sequence[int], news: Sequence[Sequence[int]]) -> Tensor:
        """Run new tokens of some slots through the model, like lengths together -> last hidden states (rows, E)."""
        order = sorted(range(len(news)), key=lambda i: len(news[i]), reverse=True)
        hidden: list[Tensor] = [torch.empty(0)] * len(news)
        while order:
            longest = len(news[order[0]])
            bucket = [i for i in order if len(news[i]) * _LIKE >= longest]
            order = order[len(bucket) :]
            found = self._forward([slots[i] for i in bucket], [news[i] for i in bucket])
            for row, i in enumerate(bucket):
                hidden[i] = found[row, len(news[i]) - 1]
        return torch.stack(hidden)

    def _decode(self, sequences: Sequence[_Sequence]) -> None:
        """Feed each sequence its last token and sample the next."""
        for sequence in sequences:  # the rows to compute should lie side by side
            if sequence.slot >= len(sequences):
                sequence.slot = self.cache.move_down(sequence.request.session, sequence.slot)
        slots = self.cache.rows([s.slot for s in sequences])
        last = {s.slot: s.ids[-1] for s in sequences}
        hidden = self._forward(slots, [[last.get(slot, 0)] for slot in slots])
        place = {slot: row for row, slot in enumerate(slots)}
        rows = torch.tensor([place[s.slot] for s in sequences], device=self.device)
        for sequence in sequences:
            self.cache.lengths[sequence.slot] += 1
        self._append(sequences, self.model.logits(hidden[rows, 0]))

    def _forward(self, slots: Sequence[int], news: Sequence[Sequence[int]]) -> Tensor:
        """Run new tokens (padded on the right) of some slots through the model -> hidden (rows, T, E)."""
        width = max(map(len, news))
        ids = torch.tensor([[*new, *([0] * (width - len(new)))] for new in news], device=self.device)
        starts = torch.tensor([self.cache.lengths[slot] for slot in slots], device=self.device)
        positions = starts[:, None] + torch.arange(width, device=self.device)
        hidden: Tensor = self.model(ids, positions, CacheAttend(self.cache, slots, positions))
        return hidden

    def _append(self, sequences: Sequence[_Sequence], logits: Tensor) -> None:
        """Sample one token a sequence; finish those that stop or are full."""
        requests, places = [s.request for s in sequences], [len(s.ids) for s in sequences]
        drawn = sample(logits, [r.sampling for r in requests], [r.seed for r in requests], places)
        for sequence, token, logprob in zip(sequences, *drawn, strict=True):
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            request = sequence.request
            room = min(request.sampling.max_new_tokens, self._length - len(request.prompt_ids))
            if token in request.stop_ids or len(sequence.ids) >= room:
                self._finish(sequence, "stop" if token in request.stop_ids else "length")

    def _finish(self, sequence: _Sequence, reason: Literal["stop", "length"]) -> None:
        self._active.remove(sequence)
        self.cache.keep(sequence.slot, [*sequence.request.prompt_ids, *sequence.ids])
        if not sequence.future.done():
            sequence.future.set_result(Generation(sequence.ids, sequence.logprobs, reason, self.version))
