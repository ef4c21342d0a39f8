"""Bringing the trainer's weights to the servers after every step, and proving that they arrived.

For every server, in a thread of its own: pause, update, flush, go on; then its version is read and a fixed prompt is
scored. The version is the optimizer step, and the update itself sets it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Any, Literal

from ...tools.errors import ConfigError
from .adapter import AdapterWay
from .disk import DiskWay
from .distributed import DistributedWay
from .errors import Busy, Refused, ServerError, Unreachable, WrongVersion
from .parity import Parity
from .servers import Servers
from .tensor import TensorWay
from .ways import Way, flush, paused

if TYPE_CHECKING:
    from torch import Tensor

WayName = Literal["disk", "tensor", "distributed", "adapter"]

_MODEL = "/model_info"
_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class _Push:
    """What is on its way: a version, its weights, and the trainer's log-probs of the fixed prompts."""

    version: int
    weights: Mapping[str, Tensor]
    expected: Sequence[Sequence[float]]


class WeightSync:
    """Pushes weights to servers.

    Args:
        servers: where to.
        way: how the weights travel.
        parity: how their arrival is proved.
        model_folder: the policy's folder: a server that holds another kind of model is refused before anything is sent
            to it; None does not look.

    Attributes:
        metrics: of the last push: `sync/seconds`, `sync/logprob_gap` (largest difference from the trainer's log-probs)
            and `sync/servers` (how many have the version).

    A server that cannot be reached is left out while another has the version; it gets no requests until it has it too.
    Where the way keeps what it sent, that happens by itself as soon as the server is back, else in the next push.
    """

    def __init__(self, servers: Servers, way: Way, parity: Parity, model_folder: Path | None = None) -> None:
        self.servers, self.way, self.parity, self.model_folder = servers, way, parity, model_folder
        self.metrics: dict[str, float] = {}
        self._last: _Push | None = None
        self._lock = Lock()  # one push at a time: servers may come back in the middle of one
        self._looked_at: set[str] = set()
        servers.on_stale = self._bring_back

    def push(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Bring weights to every server, and return when all that can be reached sample with them.

        Raises RunError where the weights cannot be written (no server has changed), Refused, WrongVersion, Drifted and
        their like as a server gives cause, and Unreachable when none could be reached for `servers.patience_seconds`.
        """
        began = perf_counter()
        with self._lock:
            self.way.prepare(version, weights)
            push = _Push(version, weights, self.parity.measure())
            self.servers.expect(str(version))
            gaps = self._to_all(push)
            self._last = _Push(version, {}, push.expected)
        self.metrics = {
            "sync/seconds": perf_counter() - began,
            "sync/logprob_gap": max(gaps),
            "sync/servers": float(len(gaps)),
        }

    def extra_fields(self) -> dict[str, Any]:
        """Return what a request must carry to be sampled by the weights that were pushed last."""
        return self.way.fields(self._last.version) if self._last is not None else {}

    def close(self) -> None:
        """Give back what the way holds. The servers keep the weights they have."""
        self.servers.on_stale = None
        with self._lock:
            self.way.close()

    def _to_all(self, push: _Push) -> list[float]:
        """Push to all servers at once and return the gaps of those that have it: at least one, after some patience."""
        until = monotonic() + self.servers.patience_seconds
        with ThreadPoolExecutor(len(self.servers.urls)) as pool:
            while True:
                ended = list(pool.map(lambda url: self._to_reachable(url, push), self.servers.urls))
                gaps = [one for one in ended if isinstance(one, float)]
                if gaps:
                    return gaps
                if monotonic() > until:
                    raise next(one for one in ended if isinstance(one, ServerError))
                sleep(1.0)

    def _to_reachable(self, url: str, push: _Push) -> float | ServerError:
        """Push to one server. Returns the gap, or the error of a server that is gone or not ready yet."""
        try:
            return self._to_one(url, push)
        except (Unreachable, Busy) as error:
            self._looked_at.discard(url)  # who knows what comes back
            self.servers.fail(url, error)
            return error

    def _to_one(self, url: str, push: _Push) -> float:
        self._look_at(url)
        if self.way.pauses:
            with paused(self.servers, url):
                self.way.send(url, push.version, push.weights)
                flush(self.servers, url)
                self._check_version(url, push.version)
        else:
            self.way.send(url, push.version, push.weights)
            self._check_version(url, push.version)
        # A paused server scores nothing, so this comes after.
        return self.parity.check(self.servers, url, push.version, push.expected, self.way.fields(push.version))

    def _check_version(self, url: str, version: int) -> None:
        info = self.servers.get(url, _MODEL)
        got = info.get("weight_version") if isinstance(info, dict) else None
        if str(got) != str(version):
            raise WrongVersion(url, _MODEL, f"version {version} was pushed, it says that it has {got!r}")

    def _bring_back(self, url: str) -> None:
        """Push the last version to a server that came back without it, where the way still has it."""
        with self._lock:
            if self.way.keeps and self._last is not None:
                self._to_one(url, self._last)

    def _look_at(self, url: str) -> None:
        """Raise Refused for a server that holds another kind of model than the policy: weights would ruin it.

        Its kind is what it says; its shape is compared where its folder can be read from here.
        """
        if self.model_folder is None or url in self._looked_at:
            return
        facts, own = self.servers.facts(url), _config(self.model_folder)
        theirs = {"model_type": facts.model_type} | {key: _config(facts.model_path).get(key) for key in _SHAPE}
        for key, value in theirs.items():
            if value is not None and own.get(key) not in (None, value):
                raise Refused(
                    url,
                    _MODEL,
                    f"it serves {facts.model_path}, whose {key} is {value}, the policy is {self.model_folder}, whose "
                    f"{key} is {own[key]}: no weights were sent. Is this the server of a reward model?",
                )
        self._looked_at.add(url)


def make_way(
    name: WayName, servers: Servers, *, folder: Path, start: Path, save_adapter: Callable[[Path], None] | None = None
) -> Way:
    """Return the way of that name.

    `folder` is the run's own and seen by trainer and servers alike (for files); `start` is the model folder whose
    config and tokenizer go along; `save_adapter` writes the adapter of now into a folder. Raises ConfigError for an
    adapter without it.
    """
    if name == "tensor":
        return TensorWay(servers)
    if name == "distributed":
        return DistributedWay(servers)
    if name == "disk":
        return DiskWay(servers, folder, start)
    if save_adapter is None:
        raise ConfigError("weight_sync 'adapter' sends an adapter, and the model has none: give lora_r, or use disk")
    return AdapterWay(servers, folder, save_adapter)


def _config(folder: Path | str) -> dict[str, Any]:
    """Return the config of a model folder; empty where there is none to be read."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
