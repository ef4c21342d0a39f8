"""Backend: ids in, ids and log-probs out. The torch engine, a server or a test double stand behind it alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol

from .trajectory import Sampling

Layers = Literal["packed", "plain", "compiled", "deterministic"]
"""How the sampler runs a model's layers.

`packed`: in float32 on a CPU, with a copy of the weights in a faster layout (`models.packed`): the memory of the
weights once more. Where a model cannot be packed this is `plain`.
`plain`: as the trainer does.
`compiled`: through `torch.compile`.
`deterministic`: the same seeds give the same tokens and log-probs to the bit, whatever else is in the batch and however
often a sequence gave way (fp32 on a CPU, for one number of threads). Several times slower.
"""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample.

    `prompt_ids` are the whole history; a backend that kept the sequence of `session` computes only what is new.
    `seed` fixes the turn's randomness on backends that promise it (torch). `decode` gives the text of sampled ids: a
    backend that has no tokenizer of its own needs it for the stop strings of `sampling`.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int
    session: str
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled turn: ids with the token that ended them (a stop token, or one that completes a stop string), their
    log-probs, and the weights' version.

    Log-probs are those of the full softmax of logits / temperature in fp32 (temperature 1 when sampling is greedy).
    `policy_version` is that of the oldest weights that sampled any of it. Where the weights changed on the way, `spans`
    says what each version sampled: (version, start, end), counted in `ids`; empty where one version sampled all.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    spans: tuple[tuple[int, int, int], ...] = ()


class Backend(Protocol):
    """What samples. One request a call: an episode awaits its own turn, the backend batches what waits together."""

    @property
    def max_model_length(self) -> int:
        """Longest sequence (prompt and sampled tokens) the backend can hold."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Cancelling the call frees what it held."""
        ...

    def release(self, session: str) -> None:
        """Forget what was kept for a session (its episode is over)."""
        ...

    def load_weights(self, version: int, weights: Any) -> None:
        """Use `weights` from the next token on; what was sampled with older ones carries its own version."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what there is to say of the last `load_weights`, by names of metrics."""
        ...

    def close(self) -> None:
        """Give back what is held outside this process: connections, a server of its own. No call follows."""
        ...


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that is a pure function of `parts` (run, task, sample, turn): equal in every process."""
    digest = blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
