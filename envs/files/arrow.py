"""Rows of parquet files and of `datasets` (extra `data`), brought to JSON's terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from ...tools.errors import ConfigError, DataError
from .records import Row
from .strict_json import JsonError

_BATCH = 64  # rows held at once
_EXTRA = "needs the extra `data`: pip install 'gymtune[data]'"


def is_dataset(name: str) -> bool:
    """Whether `name` is a folder that `datasets` saved."""
    return any((Path(name) / file).exists() for file in ("state.json", "dataset_dict.json"))


def table_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a parquet file, of a folder that `datasets` saved, or of `hf:NAME[:CONFIG][:SPLIT]`.

    Arrow puts null where a key is missing, in schemas of tools too: such keys are dropped at every depth. Dates and
    decimals become text.

    Raises:
        DataError: There is no such thing, or it has several splits.
        ConfigError: The extra is not installed.
    """
    values = _parquet(name) if name.endswith(".parquet") else _dataset(name)
    for line, value in enumerate(values, 1):
        try:
            if isinstance(value, Exception):
                raise JsonError(f"what Arrow cannot read ({value})")
            yield Row(line, {key: _plain(item, key) for key, item in value.items() if item is not None})
        except JsonError as error:
            yield Row(line, None, error.came, error.path)


def _parquet(name: str) -> Iterator[dict[str, Any] | Exception]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{name}: reading parquet {_EXTRA}") from None
    try:
        with pyarrow.parquet.ParquetFile(name) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                yield from _values(batch)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{name}: cannot read as parquet: {error}") from error


def _values(batch: Any) -> Iterator[dict[str, Any] | Exception]:
    """Yield the rows of a batch; where one cannot be turned into Python's values, the error in its place."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        for index in range(batch.num_rows):
            try:
                value: dict[str, Any] | Exception = batch.slice(index, 1).to_pylist()[0]
            except ValueError as error:
                value = error
            yield value


def _dataset(name: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{name}: reading data sets {_EXTRA}") from None
    try:
        if name.startswith("hf:"):
            source, *rest = name.removeprefix("hf:").split(":")
            split = rest.pop() if rest else "train"
            found = datasets.load_dataset(source, *rest[:1], split=split, streaming=True)
        else:
            found = datasets.load_from_disk(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{name}: cannot read: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        raise DataError(f"{name}: has several splits; name one: {', '.join(f'{name}/{split}' for split in found)}")
    yield from found


def _plain(value: Any, path: str) -> Any:
    """Return `value` as JSON has it, without keys that hold null. Raises JsonError for what has no JSON form."""
    match value:
        case dict():
            return {key: _plain(item, f"{path}.{key}") for key, item in value.items() if item is not None}
        case list():
            return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
        case float() if not math.isfinite(value):
            raise JsonError(f"{value}, which is no JSON", path)
        case date() | time():
            return value.isoformat()
        case Decimal() | timedelta():
            return str(value)
        case str() | bool() | int() | float() | None:
            return value
        case _:
            raise JsonError(f"a {type(value).__name__}, which is no JSON", path)
