"""Columns of metrics.jsonl, read as a stream, and their reduction to what a chart can show.

A million rows are 400 MB. Blocks of the file become columns of floats; msgspec decodes them, a
block with a damaged line is read again line by line. A chart gets `BUCKETS` groups of steps, of
each the least and the greatest value at their own steps, and the mean: a spike of one step stays.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, lt
from pathlib import Path
from typing import Any

from shoal.base.runlog.damaged_lines import Record, is_number, parse_step

NUMBERS = (
    "loss", "grad_norm", "lr", "tokens", "step_s", "peak_memory_bytes", "mfu", "comm_exposed_s",
    "data_wait_s", "loop_s",
)  # fmt: skip
"""Fields of a row that become columns."""
MAIN = NUMBERS[:6]
"""Those of a run of half a million steps."""
BLOCK_BYTES = 1 << 20
LONGEST_LINE = 1 << 24
"""Bytes of a line that is dropped unread: no step has as many."""
SMALL_BYTES, LARGE_BYTES = 1 << 20, 1 << 27
"""Size up to which msgspec is not worth its import · from which only `MAIN` is read."""
BUCKETS = 400
MOST_OWN = 8
"""Metrics of the user's own that are read."""
LARGEST_STEP = 1 << 53


@dataclass
class StepMetrics:
    """Rows of a run as columns, in the order of steps.

    Attributes:
        steps: step numbers, ascending.
        columns: name → a value for each step; NaN where a row has none. `tokens_per_s` is computed.
        marked: rows of the steps that the reader was asked to keep, whole.
        damaged: lines that are no row.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(default_factory=dict)
    marked: dict[int, Record] = field(default_factory=dict)
    damaged: int = 0

    def column(self, name: str) -> tuple[Sequence[int], Sequence[float]]:
        """Return the steps and the values of a column, without those that are missing."""
        import numpy as np

        values = self.columns.get(name, array("d"))
        missing = np.isnan(np.array(values))
        if not values or not missing.any():
            return (self.steps if values else array("q")), values
        known = np.flatnonzero(~missing)
        steps, numbers = np.array(self.steps)[known], np.array(values)[known]
        return array("q", steps.tobytes()), array("d", numbers.tobytes())

    def running_sum(self, name: str) -> Sequence[float]:
        """Return the sum of a column up to each step; a missing value adds nothing."""
        import numpy as np

        with np.errstate(over="ignore"):
            sums = np.nancumsum(np.array(self.columns.get(name, array("d"))))
        return array("d", sums.tobytes())


@dataclass(frozen=True)
class SampledSeries:
    """A series with at most a few points per group of steps.

    Attributes:
        steps, values: the least and the greatest point of each group, or all points of a short one.
        mean_steps, means: the last step of each group, and its mean; () if all points are there.
        count: points before.
    """

    steps: Sequence[int]
    values: Sequence[float]
    mean_steps: Sequence[int] = ()
    means: Sequence[float] = ()
    count: int = 0


def sample_series(
    steps: Sequence[int], values: Sequence[float], buckets: int = BUCKETS
) -> SampledSeries:
    """Reduce a series to the extremes and the mean of each of `buckets` groups of equal size.

    >>> sample_series(range(8), [1, 1, 9, 1, 1, 1, 0, 1], buckets=2).values
    [1.0, 9.0, 1.0, 0.0]
    """
    count = len(values)
    if count <= 3 * buckets:
        return SampledSeries(list(steps), list(values), count=count)
    import numpy as np

    numbers, places = np.asarray(values, np.float64), np.asarray(steps, np.int64)
    edges = [count * number // buckets for number in range(buckets + 1)]
    kept: list[int] = []
    means = []
    for first, end in pairwise(edges):
        part = numbers[first:end]
        ends = {first + int(part.argmin()), first + int(part.argmax())}
        kept += sorted(ends)
        with np.errstate(over="ignore"):
            mean = float(part.mean())
        means.append(mean if math.isfinite(mean) else float(part[0]))
    last = [end - 1 for end in edges[1:]]
    return SampledSeries(
        places[kept].tolist(), numbers[kept].tolist(), places[last].tolist(), means, count
    )


def sample_knots(metrics: StepMetrics, knots: int = BUCKETS) -> list[tuple[int, float, float]]:
    """Return (step, tokens so far, seconds of steps so far) at some steps, for other x axes."""
    tokens, seconds = metrics.running_sum("tokens"), metrics.running_sum("step_s")
    count = len(metrics.steps)
    if not count or len(tokens) != count or len(seconds) != count:
        return []
    if not math.isfinite(tokens[-1] + seconds[-1]):
        return []
    places = sorted({*range(0, count, max(1, count // knots)), count - 1})
    return [(metrics.steps[at], tokens[at], seconds[at]) for at in places]


def iter_blocks(path: Path, limit_bytes: int = 1 << 40) -> Iterator[bytes]:
    """Yield the whole lines of a file in blocks; without a half-written last line.

    Lines longer than `LONGEST_LINE` are left out. A missing or unreadable file has none.
    """
    rest, skips = b"", False
    try:
        with path.open("rb") as file:
            while limit_bytes > 0 and (block := file.read(BLOCK_BYTES)):
                limit_bytes -= len(block)
                end = block.rfind(b"\n") + 1
                if not end:
                    skips = skips or len(rest) > LONGEST_LINE
                    rest = b"" if skips else rest + block
                    continue
                whole = b"".join((rest, memoryview(block)[:end]))
                if skips:
                    whole, skips = whole[whole.find(b"\n") + 1 :], False
                rest = block[end:]
                if whole:
                    yield whole
    except OSError:
        return


def read_step_metrics(
    path: Path, keep: Iterable[int] = (), numbers: Sequence[str] = NUMBERS
) -> StepMetrics:
    """Read metrics.jsonl into columns.

    Args:
        path: may be missing, damaged, or growing.
        keep: steps whose rows are kept whole.
        numbers: fields to read; of a very long file `MAIN` at most.
    """
    found, marks = StepMetrics(), set(keep)
    try:
        size = path.stat().st_size
    except OSError:
        return found
    names = MAIN if size > LARGE_BYTES else numbers
    found.columns = {name: array("d") for name in names}
    decode = _make_decoder(names) if size > SMALL_BYTES else _decode_lines
    for block in iter_blocks(path):
        steps, columns, damaged = decode(block)
        _append_rows(found, steps, columns)
        found.damaged += damaged
        if steps and any(steps[0] <= step <= steps[-1] for step in marks):
            for step in marks.intersection(steps):
                found.marked.update((step, row) for row in _rows_of(block, step))
    found.columns = {name: values for name, values in found.columns.items() if _is_known(values)}
    if not all(map(lt, found.steps, found.steps[1:])):
        _sort_rows(found)
    if "tokens" in found.columns and "step_s" in found.columns:
        _add_rates(found)
    return found


Columns = dict[str, Sequence[float]]
Decoded = tuple[Sequence[int], Columns, int]
"""Steps of a block, its columns, and its damaged lines."""


def _decode_lines(block: bytes) -> Decoded:
    """Decode a block line by line; tolerates damage."""
    lines = block.splitlines()
    rows = [row for line in lines if (row := parse_step(line)) is not None]
    rows = [row for row in rows if 0 <= row["step"] < LARGEST_STEP]
    columns: Columns = {name: [_number(row.get(name)) for row in rows] for name in NUMBERS}
    columns |= _own_columns([row.get("metrics") for row in rows])
    return [int(row["step"]) for row in rows], columns, len(lines) - len(rows)


def _make_decoder(names: Sequence[str]) -> Callable[[bytes], Decoded]:
    """Return a decoder of some columns that is ten times as fast for blocks without damage."""
    import msgspec

    kinds = [(name, float | None, None) for name in names]
    own = [("metrics", Any, None)] if len(names) == len(NUMBERS) else []
    row = msgspec.defstruct("row", [("step", int), *kinds, *own], gc=False)
    decoder, getters = msgspec.json.Decoder(row), [(name, attrgetter(name)) for name in names]
    step_of = attrgetter("step")

    def decode(block: bytes) -> Decoded:
        try:
            rows: list[Any] = decoder.decode_lines(block)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _decode_lines(block)
        steps = list(map(step_of, rows))
        if not rows or min(steps) < 0 or max(steps) >= LARGEST_STEP:
            return _decode_lines(block)
        columns = _own_columns(list(map(attrgetter("metrics"), rows))) if own else {}
        for name, getter in getters:
            values = list(map(getter, rows))
            missing = None in values
            columns[name] = [math.nan if v is None else v for v in values] if missing else values
        return steps, columns, 0

    return decode


def _own_columns(metrics: Sequence[Any]) -> Columns:
    """Return columns of the user's own metrics, by their names behind `metrics.`."""
    if not any(metrics):
        return {}
    rows = [one if isinstance(one, dict) else {} for one in metrics]
    names = dict.fromkeys(key for one in rows for key in list(one)[:MOST_OWN])
    return {f"metrics.{name}": [_number(one.get(name)) for one in rows] for name in names}


def _number(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def _append_rows(
    found: StepMetrics, steps: Sequence[int], columns: dict[str, Sequence[float]]
) -> None:
    before, missing = len(found.steps), array("d", [math.nan])
    found.steps.extend(steps)
    for name in columns:
        if name not in found.columns and len(found.columns) < len(NUMBERS) + MOST_OWN:
            found.columns[name] = missing * before
    for name, values in found.columns.items():
        values.extend(array("d", columns[name]) if name in columns else missing * len(steps))


def _is_known(values: array[float]) -> bool:
    return any(value == value for value in values)


def _add_rates(found: StepMetrics) -> None:
    """Add the column `tokens_per_s`, as the recorder computes it."""
    import numpy as np

    amounts, seconds = np.array(found.columns["tokens"]), np.array(found.columns["step_s"])
    with np.errstate(all="ignore"):
        rates = np.where(seconds > 0, amounts / seconds, np.nan)
    rates[~np.isfinite(rates)] = np.nan
    found.columns["tokens_per_s"] = array("d", rates.tobytes())


def _rows_of(block: bytes, step: int) -> Iterator[Record]:
    mark = f'"step":{step},'.encode()
    for line in block.splitlines():
        row = parse_step(line) if mark in line[:400].replace(b" ", b"") else None
        if row is not None and row["step"] == step:
            yield row


def _sort_rows(found: StepMetrics) -> None:
    """Order rows by step; the last of several rows of a step counts."""
    last = {step: at for at, step in enumerate(found.steps)}
    order = [last[step] for step in sorted(last)]
    found.steps = array("q", [found.steps[at] for at in order])
    for name, values in found.columns.items():
        found.columns[name] = array("d", [values[at] for at in order])
