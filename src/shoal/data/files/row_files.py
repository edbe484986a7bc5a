"""Readers of row files: JSON lines (.jsonl, or packed .jsonl.gz), and parquet by pyarrow.

A row is one object. An error names the file and the number of an unreadable row. Only some rows of
a file are in memory at a time.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from shoal.base.errors import ConfigError
from shoal.data.files.file_formats import HEAD_BYTES, find_format

AT_ONCE = 256
"""Parquet rows that become Python objects at a time."""


def read_objects(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FILE:LINE`, object) of every line that is not empty.

    Raises:
        ConfigError: a line is not JSON, no object, or unreadable; with file and line.
    """
    number = 0
    try:
        # the format says one object a line, so only \n ends one
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = _check_start(path, line)
                if line.strip():
                    yield f"{path}:{number}", _object(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}:{number + 1}: cannot be read: {error}") from error


def read_lines_at(
    path: str, places: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) of the lines that begin in each byte range (start, stop), in order.

    A packed file can only be read from its start, so it yields as many bytes there.

    Raises:
        ConfigError: as `read_objects`.
    """
    try:
        if path.endswith(".gz"):
            left = sum(stop - start for start, stop in places)
            with gzip.open(path) as file:
                for number, line in enumerate(file, 1):
                    if left <= 0:
                        return
                    left -= len(line)
                    if line.strip():
                        yield f"{path}:{number}", _object(line, f"{path}:{number}")
            return
        with open(path, "rb") as file:
            for start, stop in places:
                file.seek(max(0, start - 1))
                if start:  # the line that began before
                    file.readline()
                while (at := file.tell()) < stop and (line := file.readline()):
                    if not at:
                        line = _check_start(path, line)
                    if line.strip():
                        yield f"{path}: byte {at}", _object(line, f"{path}: the line at byte {at}")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _check_start(path: str, line: bytes) -> bytes:
    """Return a file's first line without a byte order mark.

    Raises:
        ConfigError: the file is packed, or of another known format.
    """
    known = None if line.lstrip().startswith(b"{") else find_format(line[:HEAD_BYTES])
    if known is not None and not path.endswith(".gz"):
        hint = f"mv {path} {path}.gz" if known.name == "gzip" else known.hint(path)
        raise ConfigError(f"{path}: is {known.name}, not JSON lines; try: {hint}")
    return line.removeprefix(codecs.BOM_UTF8)


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: is {type(value).__name__}, an object is wanted: {{…}}")
    return value


def read_parquet(
    path: str, keys: Sequence[str], groups: Sequence[int] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FILE: row N`, object) of every row, N from 1.

    Args:
        keys: columns to read; none, or one that the file lacks: all columns.
        groups: row groups to read, page by page, so that an early stop reads no more; none: all.

    Raises:
        ConfigError: the file is no parquet, or is damaged.
    """
    import pyarrow.parquet  # of the extra `data`; check_data says so where it is missing

    number = 0
    try:
        # before it buffers pages, it fetches whole columns
        reads = {"buffer_size": 2**16, "pre_buffer": False} if groups else {}
        with pyarrow.parquet.ParquetFile(path, **reads) as file:
            wanted = list(keys) if set(keys) <= set(file.schema_arrow.names) else []
            number = sum(file.metadata.row_group(n).num_rows for n in range(min(groups, default=0)))
            some = {"row_groups": list(groups)} if groups else {}
            for batch in file.iter_batches(AT_ONCE, columns=wanted or None, **some):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"{path}: row {number + 1}: cannot be read: {said}") from error


def parquet_columns(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one (`FILE: row 1`, object) with a file's columns, if it has a row.

    It reads the file's metadata, none of its rows. Raises a ConfigError, as `read_parquet`.
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"{path}: row 1: cannot be read: {said}") from error
    if rows:
        texts = (pyarrow.types.is_string, pyarrow.types.is_large_string)
        yield (
            f"{path}: row 1",
            {f.name: "" if any(i(f.type) for i in texts) else None for f in schema},
        )


MOST_GROUPS = 16
LEAST_PAGE, PAGE_ROWS = 2**20, 1024
"""Usual page size of parquet writers, and its least rows: the smallest readable unit."""


def read_row_groups(
    files: Sequence[tuple[str, int]], keys: Sequence[str], wanted: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) of the first rows of row groups, spread over the bytes of files.

    Args:
        files: (path, bytes) of each file.
        wanted: bytes of all places together.

    Note:
        It reads up to MOST_GROUPS row groups whose first pages are a sixteenth of all bytes, by the
        files' metadata; at least one.

    Raises:
        ConfigError: as `read_parquet`.
    """
    import pyarrow.parquet

    ends = list(accumulate(size for _, size in files))
    left = ends[-1] // 16
    chosen: dict[tuple[int, int], None] = {}
    for number in (int(f"{n:04b}"[::-1], 2) for n in range(MOST_GROUPS)):  # 0, 8, 4, 12, …
        at = (2 * number + 1) * ends[-1] // (2 * MOST_GROUPS)
        which = next(n for n, end in enumerate(ends) if at < end)
        path, size = files[which]
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                group, cost = _group_at(file.metadata, keys, 1 - (ends[which] - at) / size)
        except (OSError, pyarrow.ArrowException) as error:
            said = str(error).splitlines()[0]
            raise ConfigError(f"{path}: row 1: cannot be read: {said}") from error
        if group >= 0 and (which, group) not in chosen and (not chosen or cost <= left):
            chosen[which, group] = None
            left -= cost
    for which, group in sorted(chosen):
        share = wanted // len(chosen)
        path = files[which][0]
        for place, row in read_parquet(path, keys, (group,)):
            if share <= 0:
                break
            share -= sum(len(str(row.get(key, ""))) for key in keys)
            yield place, row


def _group_at(about: Any, keys: Sequence[str], share: float) -> tuple[int, int]:
    """Return the row group at a share of a file, and the approximate size of its first pages."""
    group = min(int(share * about.num_row_groups), about.num_row_groups - 1)
    if group < 0 or not about.row_group(group).num_rows:
        return -1, 0
    found = about.row_group(group)
    cost = 0
    for number in range(found.num_columns):
        column = found.column(number)
        if column.path_in_schema.partition(".")[0] in keys or not keys:
            page = max(LEAST_PAGE, PAGE_ROWS * column.total_compressed_size // found.num_rows)
            cost += min(column.total_compressed_size, page)
    return group, cost
