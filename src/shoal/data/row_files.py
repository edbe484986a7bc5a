"""Reads the files that hold rows: JSON lines (.jsonl, or packed .jsonl.gz), and parquet by pyarrow.

A row is one object. What cannot be read is told with its file and number. Of a file some rows are
in memory at a time.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from shoal.base.errors import ConfigError

AT_ONCE = 256
"""Rows that are made Python objects at once; of parquet."""


def read_objects(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FILE:LINE`, object) of every line that is not empty.

    Errors   ConfigError with file and line for what is not JSON, no object, or cannot be read
    """
    number = 0
    try:
        # the format says one object a line, so only \n ends one
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _object(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}:{number + 1}: cannot be read: {error}") from error


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: is {type(value).__name__}, an object is wanted: {{…}}")
    return value


def read_parquet(path: str, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FILE: row N`, object) of every row, N from 1.

    keys     columns to read; none, or one that the file has not: all of them
    Errors   ConfigError for a file that is no parquet, or is damaged
    """
    import pyarrow.parquet  # of the extra `data`; check_data says so where it is missing

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = list(keys) if set(keys) <= set(file.schema_arrow.names) else []
            for batch in file.iter_batches(AT_ONCE, columns=wanted or None):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"{path}: row {number + 1}: cannot be read: {said}") from error
