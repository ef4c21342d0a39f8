"""What every import writes: a model folder that appears whole or not at all, with the tokenizer of another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError

from ...tools.errors import ModelError

_TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside `target` to write into, and rename it to `target` when the block ends without an error.

    Raises ModelError when `target` is there already and not an empty folder, and when the disk refuses.
    """
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target}: is there already and not an empty folder. Name another one, or remove it.")
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # left by a crash
    try:
        aside.mkdir(parents=True)
        yield aside
        os.replace(aside, target)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise ModelError(f"{target}: cannot write: {error}. Make room, or name another folder.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy what makes up the tokenizer of the folder `source`, chat template included."""
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _TOKENIZER_FILES):
            shutil.copyfile(file, target / file.name)
