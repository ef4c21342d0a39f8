"""Weights as a LoRA adapter that a server loads beside its model: small, and nothing stands still."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .disk import VersionFolders
from .errors import Refused
from .servers import Servers
from .ways import PUSH_SECONDS, Way
from .wire import adapter_name, adapter_version

if TYPE_CHECKING:
    from torch import Tensor

_LOAD, _UNLOAD, _LOADED, _VERSION = "/load_lora_adapter", "/unload_lora_adapter", "/v1/models", "/update_weight_version"


class AdapterWay(Way):
    """Writes an adapter a version into `place` and lets servers load it under a name of its own.

    A turn is sampled whole by the adapter that its request names, so requests run on while the next one is loaded. Two
    are kept loaded: requests that were begun with the one before end with it. Servers must be started with
    --enable-lora, --max-lora-rank and --lora-target-modules that cover the adapter. `save` writes it into a folder in
    PEFT's format.
    """

    pauses = False
    keeps = True

    def __init__(self, servers: Servers, place: Path, save: Callable[[Path], None]) -> None:
        super().__init__(servers)
        self.folders, self.save = VersionFolders(place), save
        self._versions: list[int] = []  # of the folders that are kept

    def prepare(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter of a version. `weights`, which are merged, are not needed."""
        self.folders.write(version, self.save)
        self._versions = [*(one for one in self._versions if one != version), version][-2:]

    def send(self, url: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """Load what is kept and not there yet, after all that is older has been unloaded."""
        loaded = self._loaded(url)
        for one in loaded - set(self._versions) | ({version} & loaded):  # a version pushed again has other numbers
            self._unload(url, one)
        for one, folder in zip(self._versions, self.folders.kept, strict=True):
            if one == version or one not in loaded:
                self._load(url, one, folder)
        self.servers.post(url, _VERSION, {"new_version": str(version), "abort_all_requests": False})

    def fields(self, version: int) -> dict[str, Any]:
        """Return the name of a version's adapter."""
        return {"lora_path": adapter_name(version)}

    def _loaded(self, url: str) -> set[int]:
        """Return the versions whose adapters a server holds, those of a run that died included."""
        answer = self.servers.get(url, _LOADED)
        found = set()
        for card in answer.get("data", []) if isinstance(answer, dict) else []:
            with suppress(ValueError, KeyError):
                found.add(adapter_version(card["id"]))
        return found

    def _load(self, url: str, version: int, folder: Path) -> None:
        body = {"lora_name": adapter_name(version), "lora_path": str(folder), "pinned": False}
        try:
            self.servers.post(url, _LOAD, body, seconds=PUSH_SECONDS)
        except Refused as error:
            told = (
                f"{error.told}; start the server with --enable-lora and with --max-lora-rank and --lora-target-modules "
                f"that cover the adapter in {folder}, which it must see, or send merged weights with weight_sync disk"
            )
            raise Refused(url, _LOAD, told, error.status) from error

    def _unload(self, url: str, version: int) -> None:
        """Unload an adapter; the server waits for requests that still use it."""
        self.servers.post(url, _UNLOAD, {"lora_name": adapter_name(version)}, seconds=PUSH_SECONDS)
