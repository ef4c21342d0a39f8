"""Weights in the body of a request: for servers that share no file system with the trainer."""

from __future__ import annotations

import pickle
from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .ways import PUSH_SECONDS, Bucket, Way, buckets, update_session

if TYPE_CHECKING:
    from torch import Tensor

_UPDATE = "/update_weights_from_tensor"


class TensorWay(Way):
    """Sends weights as pickled tensors in base64, in buckets, once for each tensor-parallel rank of a server.

    Pickle is what servers take (they unpickle an allow-list of types); none is ever read here. The numbers are inline,
    so no memory is shared with the server and it may be anywhere.
    """

    def send(self, url: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """Send every weight to one server."""
        ranks = self.servers.facts(url).tp_size or 1
        with update_session(self.servers, url):
            for bucket, name in buckets(weights, version):
                body = {
                    "serialized_named_tensors": [pack(bucket)] * ranks,
                    "load_format": None,
                    "weight_version": name,
                    "flush_cache": False,
                }
                self.servers.post(url, _UPDATE, body, seconds=PUSH_SECONDS)


def pack(bucket: Bucket) -> str:
    """Return a bucket as a server reads it."""
    return b64encode(pickle.dumps([(name, _alone(tensor)) for name, tensor in bucket], protocol=4)).decode("ascii")


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU with a storage of its own: pickle writes whole storages."""
    there = tensor.detach().cpu().contiguous()
    return there.clone() if there.untyped_storage().nbytes() != there.nbytes else there
