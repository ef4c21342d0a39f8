"""Weights through files: a folder a version, whole or absent, that trainer and servers both see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from ...tools.errors import RunError
from ..models.folder import copy_tokenizer
from .errors import Refused
from .servers import Servers
from .ways import PUSH_SECONDS, Way

if TYPE_CHECKING:
    from torch import Tensor

_UPDATE = "/update_weights_from_disk"
_CONFIGS = ("config.json", "generation_config.json")


class VersionFolders:
    """The folders `v000012` of a run below `place`, the last two of them: a server may still read the one before.

    `place` is the run's own: what other folders of versions stand there, left by a run that died, is removed.
    """

    def __init__(self, place: Path) -> None:
        self.place = place.resolve()  # servers have another working directory
        self.kept: list[Path] = []

    def write(self, version: int, fill: Callable[[Path], None]) -> Path:
        """Let `fill` write a folder aside, bring it to the disk and rename it; return it.

        Raises RunError when the disk refuses; the folders that were there before stay.
        """
        target = self.place / f"v{version:06d}"
        aside = self.place / f".{target.name}.partial"
        try:
            self._make_room(target)
            aside.mkdir(parents=True)
            fill(aside)
            for file in aside.iterdir():
                with file.open("rb+") as handle:
                    os.fsync(handle.fileno())  # a full disk may say so only now
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
            raise RunError(
                f"{target}: cannot write the weights of version {version}: {error}; the servers still have the version "
                "before. Make room, or name another weight_sync_dir, and go on with --resume"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self.kept = [*(path for path in self.kept if path != target), target][-2:]
        return target

    def _make_room(self, target: Path) -> None:
        before = [path for path in self.kept if path != target][-1:]
        for path in (*self.place.glob("v[0-9]*"), *self.place.glob(".v[0-9]*.partial")):
            if path not in (*before, target):
                shutil.rmtree(path, ignore_errors=True)


class DiskWay(Way):
    """Writes Hugging Face folders into `place` and lets servers load them.

    `start` is the model folder whose config and tokenizer go beside the weights, so that whoever opens the folder finds
    a whole model. The simplest way and the one to begin with: it needs a file system that the servers see under the
    same path, and a server that was started anew can have the weights again.
    """

    keeps = True

    def __init__(self, servers: Servers, place: Path, start: Path) -> None:
        super().__init__(servers)
        self.folders, self.start = VersionFolders(place), start

    def prepare(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Write the folder of a version."""
        self.folders.write(version, lambda folder: self._fill(folder, weights))

    def send(self, url: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """Let a server load the folder that was written last."""
        folder = self.folders.kept[-1]
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": False,  # it is asked for by itself, until it is done
            "abort_all_requests": False,
        }
        try:
            self.servers.post(url, _UPDATE, body, seconds=PUSH_SECONDS)
        except Refused as error:
            told = (
                f"{error.told}; the old weights go on serving. Does the server see {folder}? Name a weight_sync_dir "
                "that it shares, or send the weights with weight_sync tensor"
            )
            raise Refused(url, _UPDATE, told, error.status) from error

    def _fill(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        # A head that is tied to the embedding goes once, as in every file; safetensors refuses memory with two names.
        once = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(list(weights.items()))}
        tensors = {name: weights[name].detach().cpu().contiguous() for name in once.values()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for name in _CONFIGS:
            if (self.start / name).is_file():
                shutil.copyfile(self.start / name, folder / name)
        copy_tokenizer(self.start, folder)
