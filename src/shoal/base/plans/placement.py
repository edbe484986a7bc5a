"""Placement of each tensor of a model: the ranks that hold, sum and step it, as plain rows.

`parallel/placement_rows.py` makes the rows once per start, the same on every rank, from the layout
and the traced model. All users read these rows: weight sharding, gradient buckets, sums over ranks,
the gradient's norm, checkpoints, the prediction and the proof. A row names axes, never ranks;
process groups are bound to axes when a run starts.

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
from shoal.base.plans.tensor_shards import Box, Shard, dtype_bytes

DATA_AXES = ("dp_replicate", "dp_shard")
EXPERT_AXES = ("expert_replicate", "expert_shard")
TABLE_AXES = ("table_replicate", "table_shard")
"""Data axes of a table on a server, of degree 1: its gradient is summed there alone."""

At = Mapping[str, int]
"""Index of a rank along every axis (`Layout.at`)."""


@dataclass(frozen=True)
class DimCut:
    """Cut of a tensor's dim by the ranks of one axis, and the part of each rank.

    Attributes:
        axis: tp, ep, servers.
        dim: dim of the whole tensor.
        segments: boundaries of the parts in each segment of the dim; all segments have as many
            parts. A fused q, k, v has three segments; a rank stores its parts of all segments in
            order.
        part: index of the part of each rank of the axis; ranks with the same index hold the same
            elements.

    >>> fused = DimCut("tp", 0, ((0, 2, 4), (4, 5, 6)), (0, 1))
    >>> fused.spans(1), fused.copies
    (((2, 4), (5, 6)), 1)
    >>> DimCut("tp", 0, ((0, 2, 4),), (0, 0, 1, 1)).copies  # 4 ranks share 2 key/value heads
    2
    """

    axis: str
    dim: int
    segments: tuple[tuple[int, ...], ...]
    part: tuple[int, ...]

    @property
    def copies(self) -> int:
        """Number of ranks of the axis that hold the same part."""
        return len(self.part) // (len(self.segments[0]) - 1)

    def spans(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) along the dim of each segment's part on rank `rank` of the axis."""
        number = self.part[rank]
        return tuple((ends[number], ends[number + 1]) for ends in self.segments)

    def boxes(self, shape: tuple[int, ...], rank: int) -> tuple[Box, ...]:
        """Return the boxes of a rank's elements in the whole tensor, in stored order.

        >>> DimCut("tp", 1, ((0, 1, 2), (2, 3, 4)), (0, 1)).boxes((2, 4), 0)
        (((0, 1), (0, 1)), ((0, 1), (2, 3)), ((1, 2), (0, 1)), ((1, 2), (2, 3)))
        """
        spans = tuple(span for span in self.spans(rank) if span[0] < span[1])
        after = tuple((0, n) for n in shape[self.dim + 1 :])
        before: Iterable[Box] = [tuple((0, n) for n in shape[: self.dim])]
        if len(spans) > 1:  # row by row: the parts of one row are adjacent
            rows = (range(n) for n in shape[: self.dim])
            before = (tuple((k, k + 1) for k in index) for index in itertools.product(*rows))
        return tuple((*head, span, *after) for head, span in itertools.product(before, spans))


Groups = int | tuple[int, ...]
"""Segments of a dim: number of equal ones, or their relative sizes (no common divisor)."""


def segment_sizes(size: int, groups: Groups) -> tuple[int, ...]:
    """Return the sizes of a dim's segments, in order; () if the dim does not divide so.

    >>> segment_sizes(12, 3), segment_sizes(16, (2, 1, 1)), segment_sizes(10, (2, 1, 1))
    ((4, 4, 4), (8, 4, 4), ())
    """
    shares = (1,) * groups if isinstance(groups, int) else groups
    unit, rest = divmod(size, sum(shares))
    return () if rest else tuple(share * unit for share in shares)


def proportions(sizes: Sequence[int]) -> Groups:
    """Return the proportions of segments of these sizes, whatever the size of the whole.

    >>> proportions([64, 64, 64]), proportions([64, 32, 32])
    (3, (2, 1, 1))
    """
    common = math.gcd(*sizes)
    shares = tuple(size // common for size in sizes)
    return len(shares) if max(shares) == 1 else shares


def make_even_cut(axis: str, dim: int, size: int, parts: int, *, groups: Groups = 1) -> DimCut:
    """Cut a dim of `size` into segments, and each into `parts` equal parts, one per rank.

    Args:
        size: must divide into these segments, and each segment by `parts`; not checked.

    >>> make_even_cut("tp", 0, 12, 2, groups=3).segments
    ((0, 2, 4), (4, 6, 8), (8, 10, 12))
    """
    segments, start = [], 0
    for length in segment_sizes(size, groups):
        segments.append(tuple(start + part * (length // parts) for part in range(parts + 1)))
        start += length
    return DimCut(axis, dim, tuple(segments), tuple(range(parts)))


@dataclass(frozen=True)
class Placement:
    """Placement of one parameter or buffer under a layout: the ranks that hold, sum and step it.

    Attributes:
        name, shape, dtype: those of the whole tensor; dtype is the stored one, which the optimizer
            updates.
        trains: it has a gradient and the optimizer updates it.
        is_buffer: it is a buffer, not a parameter.
        compute: format of the narrower copy that forward passes read; "" without one.
        stages: pipeline ranks that hold it.
        cut: its cut by tp or ep; None: each rank of a stage has all of it.
        sum_over: axes over which its gradient is summed, in that order: data axes at first.
        data: its split over data-parallel ranks: `whole`, all keep and update it all · `states`,
            all keep it, and each updates a share of its gradient bucket (zero 1, 2) · `rows`, each
            keeps and updates some rows (zero 3).
        unit: zero 3: name of the module with which it is gathered; "": with the root.
        calls: calls of that unit in a forward pass, each of which gathers it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trains: bool = False
    compute: str = ""
    stages: tuple[int, ...] = (0,)
    cut: DimCut | None = None
    sum_over: tuple[str, ...] = ()
    data: str = "whole"
    unit: str = ""
    calls: int = 1
    is_buffer: bool = False

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Placement:
        """Make a row from the result of `dataclasses.asdict` or from JSON."""
        cut = record["cut"]
        if cut is not None:
            segments = tuple(tuple(ends) for ends in cut["segments"])
            cut = DimCut(cut["axis"], cut["dim"], segments, tuple(cut["part"]))
        lists = {key: tuple(record[key]) for key in ("shape", "stages", "sum_over")}
        return Placement(**{**record, **lists, "cut": cut})

    @property
    def element_bytes(self) -> int:
        """Stored size of one element in bytes."""
        return dtype_bytes(self.dtype)

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """True if data-parallel ranks share it as experts: it has its own data axes."""
        return self.cut is not None and self.cut.axis == "ep"

    @property
    def is_table(self) -> bool:
        """True if it is a table on servers, each of which has some columns."""
        return self.cut is not None and self.cut.axis == "servers"

    @property
    def tp_cut(self) -> DimCut | None:
        """Its cut by tensor-parallel ranks; None if each has all of it."""
        return self.cut if self.cut is not None and self.cut.axis == "tp" else None

    @property
    def data_axes(self) -> tuple[str, str]:
        """Axes of the ranks that hold the same part and see other micro-batches."""
        if self.is_table:
            return TABLE_AXES
        return EXPERT_AXES if self.is_expert else DATA_AXES

    def degree(self, axis: str, layout: Layout) -> int:
        """Return the degree of an axis for this tensor."""
        if layout.serves and axis == "dp_replicate":
            return layout.dp_replicate - layout.servers  # which hold tables alone
        grid = layout.expert_degrees if self.is_expert else layout.degrees
        return grid.get(axis, 1)

    def shard(self, at: At) -> Shard:
        """Return the part with which a rank computes; under zero 3, after gathering."""
        whole = Shard.whole(self.name, self.shape, self.dtype)
        if self.cut is None:
            return whole
        return replace(whole, slices=self.cut.boxes(self.shape, at[self.cut.axis]))

    def local_shape(self, at: At) -> tuple[int, ...]:
        """Return the shape of the part with which a rank computes (`shard`)."""
        if self.cut is None:
            return self.shape
        width = sum(stop - start for start, stop in self.cut.spans(at[self.cut.axis]))
        return (*self.shape[: self.cut.dim], width, *self.shape[self.cut.dim + 1 :])

    def stored_shard(self, at: At, layout: Layout) -> Shard:
        """Return a rank's part between steps: under zero 3, ceil(rows / ranks) rows."""
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
        """Return how many ranks of one model replica hold the same slice of this tensor.

        >>> Placement("norm", (8,), "float32").copies_in_model(Layout(tp=4))
        4
        """
        inside = self.tp_cut.copies if self.tp_cut else layout.tp
        return inside * layout.cp * len(self.stages)

    def copies_of_sum(self, layout: Layout) -> int:
        """Return how many ranks hold the same element of its summed gradient.

        >>> row = Placement("w", (8,), "float32", data="rows")
        >>> row.copies_of_sum(Layout(dp_replicate=2, dp_shard=4, zero=3))
        2
        """
        outer, inner = (self.degree(axis, layout) for axis in self.data_axes)
        along = {"whole": outer * inner, "states": 1, "rows": outer}
        return along[self.data] * self.copies_in_model(layout)

    def bucket_key(self, layout: Layout) -> tuple[Any, ...]:
        """Return a key of its gradient's sums; gradients with equal keys may share a bucket."""
        sharers = self.stages if "pp" in self.sum_over else ()
        return self.is_expert, self.data, self.copies_in_model(layout), self.sum_over, sharers


def find_lowest_copies(
    layout: Layout, ranks: int, axes: Sequence[str], stages: Sequence[int]
) -> list[int]:
    """Return, for every rank, the lowest rank that holds the same tensors.

    Args:
        layout: of all ranks.
        ranks: how many there are.
        axes: over which ranks hold the same.
        stages: pipeline stages that hold the same; (): each has tensors of its own.

    >>> find_lowest_copies(Layout(dp_shard=2, tp=2, zero=3), 4, ("tp",), ())
    [0, 0, 2, 2]
    """
    experts = any(axis.startswith("expert") for axis in axes)
    grid = layout.expert_degrees if experts else layout.degrees
    firsts: dict[tuple[Any, ...], int] = {}
    found = []
    for rank in range(ranks):
        at = layout.at(rank)
        place = tuple(at[axis] for axis in grid if axis not in axes and axis != "pp")
        stage: Any = "shared" if at.get("pp", 0) in stages else at.get("pp", 0)
        found.append(firsts.setdefault((place, stage), rank))
    return found
