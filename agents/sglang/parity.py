"""The proof that weights arrived: a fixed prompt, scored by the server and by the trainer's own model.

The version that a server names says which weights it was sent; this says that it computes with them as the trainer
does. What it finds: weights that were garbled, sent in part, mapped to other names or to another model, a LoRA adapter
that is not applied, another rope or norm. What it cannot find: in half precision, weights that are one small step old
(that is what the version is for); and a cache of the old weights, for scoring uses none (a push waits for the flush).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from .errors import Drifted, WrongVersion
from .servers import Servers
from .ways import PUSH_SECONDS
from .wire import GENERATE, read_scores, scoring_body

if TYPE_CHECKING:
    import torch

    from ..models import LanguageModel

Score = Callable[[Sequence[int]], Sequence[float]]
"""From ids to the log-probs of `ids[1:]`, each after those before it, at temperature 1."""

_LENGTHS = (32, 2)
_LEAST_TOLERANCE = 1e-3


class Parity:
    """Compares servers with the trainer on fixed prompts.

    Args:
        score: the trainer's log-probs of ids.
        vocab_size: of the model.
        tolerance: largest difference of two log-probs that is let pass.
    """

    def __init__(self, score: Score, vocab_size: int, tolerance: float) -> None:
        self.score, self.tolerance = score, tolerance
        draw = Random(0)
        self.prompts = [[draw.randrange(vocab_size) for _ in range(length)] for length in _LENGTHS]

    def measure(self) -> list[list[float]]:
        """Return the trainer's log-probs of each prompt, as its model is now."""
        return [list(self.score(ids)) for ids in self.prompts]

    def check(
        self, servers: Servers, url: str, version: int, expected: Sequence[Sequence[float]], fields: Mapping[str, Any]
    ) -> float:
        """Return the largest difference between a server's log-probs and the `expected` ones.

        `fields` go into the requests. Raises WrongVersion for an answer by other weights, Drifted beyond the tolerance.
        """
        gap = 0.0
        for ids, wanted in zip(self.prompts, expected, strict=True):
            answer = servers.post(url, GENERATE, {**scoring_body(ids), **fields}, seconds=PUSH_SECONDS)
            found = read_scores(url, ids, answer)
            got = answer["meta_info"].get("weight_version")
            if got != str(version):
                raise WrongVersion(url, GENERATE, f"version {version} was pushed, it scored with {got!r}")
            gaps = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
            gap = max(gap, *(one if one < inf else inf for one in gaps))  # nan is no small gap
        if gap > self.tolerance:
            raise Drifted(url, GENERATE, self._drifted(version, gap))
        return gap

    def _drifted(self, version: int, gap: float) -> str:
        return (
            f"after version {version} was pushed, log-probs of a fixed prompt differ by {gap:.3g} from the trainer's, "
            f"{self.tolerance:.3g} are let pass (sync_tolerance). Likely: the server serves another model or has "
            "another dtype, quantisation or attention backend than the trainer; weights arrived under other names; or "
            "an adapter is not applied"
        )


def default_tolerance(dtype: torch.dtype) -> float:
    """Return the difference of log-probs that rounding alone may make in `dtype`, and at least 1e-3.

    64 eps, for: a log-prob hangs on logits of size up to 16; each is rounded some 64 times on its way (twice in each of
    32 layers), by up to eps / 2 of it, with random sign, so that sqrt(64) = 8 of them add up: 16 * 8 * eps / 2. That
    is 0.5 in bfloat16, 0.06 in float16 and 8e-6 in float32, where 1e-3 leaves room for longer sums and larger models.
    """
    import torch

    return max(_LEAST_TOLERANCE, 64 * torch.finfo(dtype).eps)


def score_with(model: LanguageModel, temperature: float = 1.0) -> Score:
    """Return the scores of a model, computed without gradient or dropout."""
    import torch
    from torch import nn

    from ..models import CausalAttend

    assert isinstance(model, nn.Module)

    @torch.no_grad()
    def score(ids: Sequence[int]) -> list[float]:
        training = model.training
        model.eval()  # an adapter may have dropout
        try:
            tokens = torch.tensor([list(ids)], device=model.head_weight.device)
            places = torch.arange(tokens.shape[1], device=tokens.device)[None]
            hidden = model(tokens, places, CausalAttend())[0, :-1]
            logprobs = (model.logits(hidden) / temperature).log_softmax(-1)
            found: list[float] = logprobs.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
        finally:
            model.train(training)
        return found

    return score
