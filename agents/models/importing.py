"""Make a model folder of a file in another format, chosen by its suffix."""

from __future__ import annotations

from pathlib import Path

from ...tools.errors import ConfigError
from .gguf_file import import_gguf
from .minimind import import_minimind

_TAKES = "wanted a .gguf file, or MiniMind's .pth"


def import_model(source: Path, out: Path, tokenizer: Path | None = None) -> Path:
    """Write the model of `source` (`.gguf`, or MiniMind's `.pth`) as the Hugging Face folder `out`, and return it.

    `tokenizer` is a folder with the tokenizer that a `.pth` lacks; a `.gguf` brings its own.
    Raises ConfigError for another kind of file, and what `import_gguf` and `import_minimind` raise.
    """
    suffix = source.suffix.lower()
    if suffix == ".pth":
        return import_minimind(source, tokenizer, out)
    if suffix != ".gguf":
        what = "a folder, which needs no import if it is a Hugging Face model" if source.is_dir() else repr(suffix)
        raise ConfigError(f"{source}: cannot import {what}: {_TAKES}.")
    if tokenizer is not None:
        raise ConfigError(f"{source}: a .gguf brings its own tokenizer; leave out {tokenizer}.")
    return import_gguf(source, out)
