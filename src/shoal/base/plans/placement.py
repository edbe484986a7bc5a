"""Who holds, sums and steps each tensor of a model: one row of plain data per parameter and buffer.

`parallel/placement_rows.py` makes the rows once per start, the same on every rank, from the layout
and from what the model does. Whatever has to know reads them: cutting weights, gradient buckets,
sums over ranks, the gradient's norm, checkpoints, the prediction and the proof. A row names axes,
never ranks; process groups are bound to axes when a run starts.

    data axes    dp_replicate, dp_shard; of experts that are dealt: expert_replicate, expert_shard
    model axes   tp and ep, which may cut a tensor inside; cp, whose ranks hold the same; pp
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.base.layouts.layout import Layout
from shoal.base.plans.tensor_shards import Box, Shard, bytes_of

DATA_AXES = ("dp_replicate", "dp_shard")
EXPERT_AXES = ("expert_replicate", "expert_shard")
TABLE_AXES = ("table_replicate", "table_shard")
"""Of degree 1: a part of a table on a server is summed there alone."""

At = Mapping[str, int]
"""Where a rank is along every axis (`Layout.at`)."""


@dataclass(frozen=True)
class Cut:
    """How the ranks of one axis cut a dim of a tensor, and which part each of them holds.

    Attributes:
        axis: tp, ep, servers.
        dim: of the whole tensor.
        segments: the dim's segments, each cut into as many parts: where parts begin and end. A
            fused q, k, v has three; a rank's parts of all segments are stored one after another.
        part: number of the part of each rank of the axis; those with the same hold the same
            elements.

    >>> fused = Cut("tp", 0, ((0, 2, 4), (4, 5, 6)), (0, 1))
    >>> fused.spans(1), fused.copies
    (((2, 4), (5, 6)), 1)
    >>> Cut("tp", 0, ((0, 2, 4),), (0, 0, 1, 1)).copies  # 4 ranks share 2 key/value heads
    2
    """

    axis: str
    dim: int
    segments: tuple[tuple[int, ...], ...]
    part: tuple[int, ...]

    @property
    def copies(self) -> int:
        """How many ranks of the axis hold the same part."""
        return len(self.part) // (len(self.segments[0]) - 1)

    def spans(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) along the dim, of each segment's part that rank `rank` of the axis has."""
        number = self.part[rank]
        return tuple((ends[number], ends[number + 1]) for ends in self.segments)

    def boxes(self, shape: tuple[int, ...], rank: int) -> tuple[Box, ...]:
        """Where a rank's elements lie in the whole tensor, in the order in which they are stored.

        >>> Cut("tp", 1, ((0, 1, 2), (2, 3, 4)), (0, 1)).boxes((2, 4), 0)
        (((0, 1), (0, 1)), ((0, 1), (2, 3)), ((1, 2), (0, 1)), ((1, 2), (2, 3)))
        """
        spans = tuple(span for span in self.spans(rank) if span[0] < span[1])
        after = tuple((0, n) for n in shape[self.dim + 1 :])
        before: Iterable[Box] = [tuple((0, n) for n in shape[: self.dim])]
        if len(spans) > 1:  # row by row: what a segment has of one row is stored beside the next's
            rows = (range(n) for n in shape[: self.dim])
            before = (tuple((k, k + 1) for k in index) for index in itertools.product(*rows))
        return tuple((*head, span, *after) for head, span in itertools.product(before, spans))


Groups = int | tuple[int, ...]
"""Segments of a dim: how many equal ones, or their sizes in proportion (no common divisor)."""


def segment_sizes(size: int, groups: Groups) -> tuple[int, ...]:
    """Sizes of a dim's segments, in order; none where the dim does not divide so.

    >>> segment_sizes(12, 3), segment_sizes(16, (2, 1, 1)), segment_sizes(10, (2, 1, 1))
    ((4, 4, 4), (8, 4, 4), ())
    """
    shares = (1,) * groups if isinstance(groups, int) else groups
    unit, rest = divmod(size, sum(shares))
    return () if rest else tuple(share * unit for share in shares)


def proportions(sizes: Sequence[int]) -> Groups:
    """Segments of these sizes, whatever the size of the whole.

    >>> proportions([64, 64, 64]), proportions([64, 32, 32])
    (3, (2, 1, 1))
    """
    common = math.gcd(*sizes)
    shares = tuple(size // common for size in sizes)
    return len(shares) if max(shares) == 1 else shares


def even_cut(axis: str, dim: int, size: int, parts: int, *, groups: Groups = 1) -> Cut:
    """Cut a dim of `size` into segments, and each into `parts` equal parts, one per rank.

    Args:
        size: divides into such segments, and each of them by `parts`, which is not checked.

    >>> even_cut("tp", 0, 12, 2, groups=3).segments
    ((0, 2, 4), (4, 6, 8), (8, 10, 12))
    """
    segments, start = [], 0
    for length in segment_sizes(size, groups):
        segments.append(tuple(start + part * (length // parts) for part in range(parts + 1)))
        start += length
    return Cut(axis, dim, tuple(segments), tuple(range(parts)))


@dataclass(frozen=True)
class Placement:
    """Who holds, sums and steps one parameter or buffer of the model under a layout.

    Attributes:
        name, shape, dtype: of the whole; dtype is what is kept and, of a parameter, stepped.
        trains: a gradient is computed and the optimizer steps it.
        is_buffer: no parameter.
        compute: format of the copy that forward passes read, where that is narrower; "" without
            one.
        stages: ranks of the pipeline that hold it.
        cut: how tp or ep cuts it inside; None: each rank of a stage has all of it.
        sum_over: axes over which its gradient is summed, in that order: data axes at first.
        data: what data-parallel ranks do with it: `whole`, all keep and step it all · `states`, all
            keep it, and each steps a share of its gradient bucket (zero 1, 2) · `rows`, each keeps
            and steps some rows (zero 3).
        unit: zero 3: name of the module with which it is gathered; "" the rest, at once.
        calls: how often a forward pass calls that unit, and so gathers it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trains: bool = False
    compute: str = ""
    stages: tuple[int, ...] = (0,)
    cut: Cut | None = None
    sum_over: tuple[str, ...] = ()
    data: str = "whole"
    unit: str = ""
    calls: int = 1
    is_buffer: bool = False

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Placement:
        """Make a row of what `dataclasses.asdict` and JSON made of one."""
        cut = record["cut"]
        if cut is not None:
            segments = tuple(tuple(ends) for ends in cut["segments"])
            cut = Cut(cut["axis"], cut["dim"], segments, tuple(cut["part"]))
        lists = {key: tuple(record[key]) for key in ("shape", "stages", "sum_over")}
        return Placement(**{**record, **lists, "cut": cut})

    @property
    def element_bytes(self) -> int:
        """Size of one element as it is kept."""
        return bytes_of(self.dtype)

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether data-parallel ranks have dealt it out: it has data axes of its own."""
        return self.cut is not None and self.cut.axis == "ep"

    @property
    def is_table(self) -> bool:
        """Whether it is on servers, each of which has some columns, while the rest is not."""
        return self.cut is not None and self.cut.axis == "servers"

    @property
    def tp_cut(self) -> Cut | None:
        """How tensor-parallel ranks cut it; None where each has all of it."""
        return self.cut if self.cut is not None and self.cut.axis == "tp" else None

    @property
    def data_axes(self) -> tuple[str, str]:
        """The axes of the ranks that hold the same part and see other micro-batches."""
        if self.is_table:
            return TABLE_AXES
        return EXPERT_AXES if self.is_expert else DATA_AXES

    def degree(self, axis: str, layout: Layout) -> int:
        """Degree of an axis, as this tensor sees the ranks."""
        if layout.serves and axis == "dp_replicate":
            return layout.dp_replicate - layout.servers  # which hold tables alone
        grid = layout.expert_degrees if self.is_expert else layout.degrees
        return grid.get(axis, 1)

    def shard(self, at: At) -> Shard:
        """The part with which a rank computes; under zero 3, once it is gathered."""
        whole = Shard.whole(self.name, self.shape, self.dtype)
        if self.cut is None:
            return whole
        return replace(whole, slices=self.cut.boxes(self.shape, at[self.cut.axis]))

    def local_shape(self, at: At) -> tuple[int, ...]:
        """Shape of that part."""
        if self.cut is None:
            return self.shape
        width = sum(stop - start for start, stop in self.cut.spans(at[self.cut.axis]))
        return (*self.shape[: self.cut.dim], width, *self.shape[self.cut.dim + 1 :])

    def kept(self, at: At, layout: Layout) -> Shard:
        """The part that stays on a rank between steps: under zero 3, ceil(rows / ranks) rows."""
        part = self.shard(at)
        if self.data != "rows":
            return part
        axis = self.data_axes[1]
        shape = self.local_shape(at)
        rows = -(-shape[0] // self.degree(axis, layout))
        width = math.prod(shape[1:])
        start, stop = (min((at[axis] + k) * rows, shape[0]) * width for k in (0, 1))
        return replace(part, slices=part.part(start, stop))

    def copies_in_model(self, layout: Layout) -> int:
        """How many ranks of one copy of the model hold the same part of it.

        >>> Placement("norm", (8,), "float32").copies_in_model(Layout(tp=4))
        4
        """
        inside = self.tp_cut.copies if self.tp_cut else layout.tp
        return inside * layout.cp * len(self.stages)

    def copies_of_sum(self, layout: Layout) -> int:
        """How many ranks hold the same element of its summed gradient.

        >>> row = Placement("w", (8,), "float32", data="rows")
        >>> row.copies_of_sum(Layout(dp_replicate=2, dp_shard=4, zero=3))
        2
        """
        outer, inner = (self.degree(axis, layout) for axis in self.data_axes)
        along = {"whole": outer * inner, "states": 1, "rows": outer}
        return along[self.data] * self.copies_in_model(layout)

    def travels_with(self, layout: Layout) -> tuple[Any, ...]:
        """Gradients that are equal in this may share a bucket: summed over the same ranks."""
        sharers = self.stages if "pp" in self.sum_over else ()
        return self.is_expert, self.data, self.copies_in_model(layout), self.sum_over, sharers


def rows_of_records(records: Iterable[Mapping[str, Any]]) -> tuple[Placement, ...]:
    """Read the rows of a plan.json."""
    return tuple(Placement.of_record(record) for record in records)
