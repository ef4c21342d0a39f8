"""Weights by broadcast: trainer and server join a process group of their own (NCCL between GPUs, else gloo).

The fastest way between machines, and the most delicate: trainer and servers must reach each other by more than HTTP,
and their torch versions must agree on how a group is made.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx

from .errors import ServerError
from .servers import Servers
from .ways import Bucket, Way, buckets, update_session

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_JOIN, _LEAVE, _UPDATE = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
)
_TICK = 0.002


class DistributedWay(Way):
    """Broadcasts weights, bucket by bucket, in a group of the trainer (rank 0) and the ranks of one server.

    A group a server, so that one that dies takes no other with it; the group is given up at the first error and made
    anew in the next push. The default group, which a distributed trainer has, is not touched. `seconds` bound the
    making of a group and each broadcast.
    """

    def __init__(self, servers: Servers, *, seconds: float = 120.0) -> None:
        super().__init__(servers)
        self.seconds = seconds
        self._groups: dict[str, tuple[str, ProcessGroup]] = {}

    def send(self, url: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """Broadcast every weight to one server."""
        try:
            if url not in self._groups:
                cuda = next(iter(weights.values())).is_cuda
                self._groups[url] = self._join(url, "nccl" if cuda else "gloo")
            with update_session(self.servers, url):
                for bucket, name in buckets(weights, version):
                    self._broadcast(url, bucket, name)
        except BaseException:
            self._leave(url)
            raise

    def close(self) -> None:
        """Tear every group down, on both sides."""
        for url in list(self._groups):
            self._leave(url)

    def _join(self, url: str, backend: str) -> tuple[str, ProcessGroup]:
        """Make the group of a server; both sides must come, so the server is asked from another thread."""
        from torch._C._distributed_c10d import TCPStore

        name, ranks = f"gymtune-{uuid4().hex}", self.servers.facts(url).tp_size or 1
        host, limit = _own_address(url), timedelta(seconds=self.seconds)
        store = TCPStore(host, 0, ranks + 1, is_master=True, timeout=limit, wait_for_workers=False)
        body = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": ranks + 1,
            "group_name": name,
            "backend": backend,
        }
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.servers.post, url, _JOIN, body, seconds=self.seconds)
            try:
                group = init_custom_group(backend, store, ranks + 1, name, limit)
            except RuntimeError as error:
                asked.result()  # what the server says of it comes first
                raise ServerError(url, _JOIN, f"no {backend} group with the server at {host}: {error}") from error
            asked.result()
        return name, group

    def _broadcast(self, url: str, bucket: Bucket, version: str) -> None:
        """Tell the server what comes, and broadcast it in the same order."""
        from torch.distributed import broadcast

        name, group = self._groups[url]
        tensors = [tensor.contiguous() for _, tensor in bucket]
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": name,
            "weight_version": version,
            "flush_cache": False,
        }
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.servers.post, url, _UPDATE, body, seconds=self.seconds)
            try:
                self._await([broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors], asked)
            except RuntimeError as error:
                asked.result()
                raise ServerError(url, _UPDATE, f"broadcast of version {version} failed: {error}") from error
            asked.result()

    def _await(self, works: list[Any], asked: Future[Any]) -> None:
        """Wait for broadcasts. Raises what the server answers when it will take no part in them, RuntimeError late."""
        until = monotonic() + self.seconds
        for work in works:
            while not work.is_completed():
                if asked.done():
                    asked.result()
                if monotonic() > until:
                    raise RuntimeError(f"the server took no part for {self.seconds:g} s")
                sleep(_TICK)
            work.wait()

    def _leave(self, url: str) -> None:
        """Give a group up. The server may be gone, or the group broken: then there is nothing to be done."""
        from torch.distributed import destroy_process_group

        if url not in self._groups:
            return
        name, group = self._groups.pop(url)
        try:
            self.servers.post(url, _LEAVE, {"group_name": name}, seconds=10.0)
        except ServerError:
            pass
        finally:
            destroy_process_group(group)


def init_custom_group(backend: str, store: Any, size: int, name: str, limit: timedelta) -> ProcessGroup:
    """Return a named process group of `size` in which this process is rank 0, whatever other groups there are.

    `torch.distributed.init_process_group` makes the default group alone, and `new_group` only parts of it; so this
    takes the steps of the former, as the server does on its side. Raises RuntimeError when the others do not come.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import Backend
    from torch.distributed import distributed_c10d as c10d

    group: ProcessGroup
    group, _ = c10d._new_process_group_helper(
        size, 0, [], Backend(backend), PrefixStore(name, store), group_name=c10d.GroupName(name), timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _own_address(url: str) -> str:
    """Return the address under which a server reaches this machine: that of the way to the server. Nothing is sent."""
    address = httpx.URL(url)
    family, _, _, _, place = socket.getaddrinfo(address.host, address.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        found: str = probe.getsockname()[0]
    return found
