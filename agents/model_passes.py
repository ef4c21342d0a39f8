"""What runs the model for the engine: from new tokens of many slots, side by side, to the logits of the next ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tools.errors import ConfigError
from .backend import Layers
from .cache_attend import CacheAttend, Piece, arrange
from .compiled import compile_model
from .kv_cache import KVCache, Slot
from .models import CausalAttend, Decoder, LanguageModel
from .models.packed import PackedDecoder

_PASS = 4096  # most tokens in one pass: bounds what its activations take
_EXACT_PASS = 32  # tokens, padding included, of every pass of the deterministic mode
_SCORED = 2**23  # logits held at once while scoring


class ModelPasses:
    """Runs a decoder over slots of a cache.

    `deterministic` layers: a token's numbers depend on the tokens before it alone, to the bit, not on what else is in
    the pass, nor on whether it was part of a prompt, decoded, or computed again. In fp32 on a CPU what breaks this is
    the shape of products: other numbers of rows are summed in another order. So every pass has the same number of rows,
    and every token attends alone, over a width that its position decides.
    """

    def __init__(self, model: LanguageModel, cache: KVCache, layers: Layers) -> None:
        if layers not in get_args(Layers):
            raise ConfigError(f"unknown layers {layers!r}: wanted one of {', '.join(get_args(Layers))}")
        self.model, self.cache, self.exact = model, cache, layers == "deterministic"
        self._compiled = compile_model(model) if layers == "compiled" else None
        self._packs = layers == "packed" and PackedDecoder.suits(model)
        self._packed: PackedDecoder | None = None
        self._size = _exact_size(model) if self.exact else _PASS
        self._device = next(model.parameters()).device

    def next_logits(self, slots: Sequence[Slot]) -> Tensor:
        """Compute what the slots do not hold yet of their tokens -> logits of each one's next token (N, V)."""
        pieces = [Piece(slot, slot.tokens[slot.length :], owner) for owner, slot in enumerate(slots)]
        hidden = torch.empty(0)
        for batch in self._deal(arrange(pieces)):
            found = self._run(batch)
            ends = torch.tensor([len(piece.ids) for piece in batch], device=self._device).cumsum(0) - 1
            if hidden.numel() == 0:
                hidden = found.new_empty(len(slots), found.shape[-1])
            # A slot that goes on in the next pass is written over then.
            hidden[torch.tensor([piece.owner for piece in batch], device=self._device)] = found[ends]
        return self._logits(hidden)

    def weights_changed(self) -> None:
        """Forget what was made of the weights."""
        self._packed = None

    def score(self, ids: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probs of `ids[1:]` in fp32, beside the cache."""
        tokens = torch.tensor([list(ids)], device=self._device)
        places = torch.arange(tokens.shape[1], device=self._device)[None]
        hidden = self.model(tokens, places, CausalAttend())[0, :-1]
        rows = max(1, _SCORED // self.model.config.vocab_size)
        found: list[float] = []
        for part, told in zip(torch.split(hidden, rows), torch.split(tokens[0, 1:], rows), strict=True):
            logprobs = (self.model.logits(part) / temperature).log_softmax(-1)
            found += logprobs.gather(-1, told[:, None])[:, 0].tolist()
        return found

    def _deal(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Deal pieces out to passes of a bounded number of tokens, cutting those that do not fit."""
        batch, room = list[Piece](), self._size
        for piece in pieces:
            ids = piece.ids
            while ids:
                batch.append(Piece(piece.slot, ids[:room], piece.owner))
                ids, room = ids[room:], room - len(batch[-1].ids)
                if room == 0:
                    yield batch
                    batch, room = [], self._size
        if batch:
            yield batch

    def _run(self, batch: Sequence[Piece]) -> Tensor:
        """Run one pass and note what the slots hold now -> hidden states of the tokens side by side (N, E)."""
        ids = [token for piece in batch for token in piece.ids]
        places = [place for p in batch for place in range(p.slot.length, p.slot.length + len(p.ids))]
        rows = self._size if self.exact else PackedDecoder.rows(len(ids)) if self._packs else len(ids)
        padding = [0] * (rows - len(ids))
        tokens = torch.tensor([ids + padding, places + padding], device=self._device)
        forward = self._compiled or self._layers()
        hidden: Tensor = forward(tokens[:1], tokens[1:], CacheAttend(self.cache, batch, self.exact))
        for piece in batch:
            piece.slot.length += len(piece.ids)
        return hidden[0]

    def _layers(self) -> LanguageModel | PackedDecoder:
        """Return what runs: the model, or its packed copy, made when it is first needed with these weights."""
        if self._packs and self._packed is None:
            self._packed = PackedDecoder(cast("Decoder", self.model))
        return self._packed or self.model

    def _logits(self, hidden: Tensor) -> Tensor:
        """Map (N, E) to logits (N, V)."""
        if not self.exact:
            return self._layers().logits(hidden)
        padded = torch.cat((hidden, hidden.new_zeros(-len(hidden) % self._size, hidden.shape[1])))
        return torch.cat([self.model.logits(part) for part in torch.split(padded, self._size)])[: len(hidden)]


@torch.inference_mode()
def _exact_size(model: LanguageModel) -> int:
    """Return how many tokens a pass may have so that none's numbers depend on its place: 32, or else 1.

    That is so where the machine's products treat all rows alike, which is tried, and where a layer does nothing but
    products by row: a mixture of experts, or layers we do not know, may make products of other shapes.
    """
    if getattr(model.config, "num_experts", 0) or not getattr(model, "native", True):
        return 1
    generator = torch.Generator().manual_seed(0)
    for weight in {weight.shape: weight for weight in model.parameters() if weight.dim() == 2}.values():
        row = torch.randn(1, weight.shape[1], generator=generator).to(weight)
        product = F.linear(row.repeat(_EXACT_PASS, 1), weight)
        if not torch.equal(product, product[:1].expand_as(product)):
            return 1
    return _EXACT_PASS
