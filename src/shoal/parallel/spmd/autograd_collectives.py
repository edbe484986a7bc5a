"""Differentiable collectives inside a split layer, with their forward and backward communication.

A value that every rank holds whole has one of two gradients: the same whole gradient on every rank,
or a part on each rank that must still be summed ("in parts"). These functions convert between the
two kinds of whole value and split values:

    function    forward                     backward                   between
    enter       nothing                     all-reduce                 whole → whole, part gradients
    reduce      all-reduce                  nothing                    summands → whole
    scatter     reduce-scatter              all-gather                 summands → split
    gather      all-gather                  own part │ reduce-scatter  split → whole │ in parts
    part        own part                    all-gather │ zeros around  whole → split │ in parts
    once        on rank 0, zeros elsewhere  the same                   a bias added by one rank only
    dropout     own part of the mask that one process would draw
    complete    all-gather of a buffer of which every rank wrote its own part

Source: Megatron-LM's f and g (Shoeybi et al. 2019, 1909.08053), sequence parallelism: Korthikanti
et al. 2022 (2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.parallel.spmd.labelling.labels import (
    WHOLE,
    Label,
    Split,
    Tiled,
    cut_tensor,
    grid_coordinates,
    join_parts,
)


class PendingReduceScatter(Protocol):
    """Handle of a pending reduce-scatter."""

    def result(self) -> Tensor:
        """Wait for the reduce-scatter and return this rank's part of the sum, flat."""


class Axis(Protocol):
    """Ranks that share a layer: a `fabric` World, or a stand-in for it."""

    @property
    def rank(self) -> int:
        """Index of this rank on the axis."""

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""

    def all_reduce(self, tensor: Tensor) -> Any:
        """Sum a tensor over the ranks, in place."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All-gather a tensor [...] of every rank into [size, ...]."""

    def reduce_scatter(self, tensor: Tensor, cuts: Sequence[int]) -> PendingReduceScatter:
        """Start to sum a flat tensor; rank r receives elements cuts[r] to cuts[r + 1]."""


def enter(value: Tensor, axis: Axis) -> Tensor:
    """Pass a replicated value into split work; its gradient is all-reduced if it needs one."""
    if not value.requires_grad:
        return value
    return _Enter.apply(value, axis)


def reduce(value: Tensor, axis: Axis) -> Tensor:
    """All-reduce the partial sums of all ranks to the full value."""
    return _Reduce.apply(value, axis)


def scatter(value: Tensor, axis: Axis, split: Split) -> Tensor:
    """Reduce-scatter partial sums to parts: the bytes of `gather`, half of `reduce`."""
    return _Scatter.apply(value, axis, split)


def gather(value: Tensor, axis: Axis, split: Split | Tiled, part_gradients: bool) -> Tensor:
    """All-gather the ranks' parts to the full value.

    Args:
        part_gradients: the gradient of the whole is in parts: the backward pass reduce-scatters it.
    """
    return _Gather.apply(value, axis, split, part_gradients)


def slice_own_part(value: Tensor, axis: Axis, label: Split | Tiled, part_gradients: bool) -> Tensor:
    """Return this rank's part of a replicated value.

    Args:
        part_gradients: the gradient of the whole may stay in parts, with zeros around this rank's
            part; it is summed over the ranks later.
    """
    if not value.requires_grad:
        own_part = cut_tensor(value, label, axis.rank, axis.size)
        # A view that autograd saves for the backward pass would keep the whole table in memory.
        is_view = own_part.untyped_storage().nbytes() > own_part.nbytes
        return own_part.clone() if is_view else own_part
    if part_gradients:
        return cut_tensor(value, label, axis.rank, axis.size)
    if isinstance(label, Tiled):  # several ranks hold the same part: their gradients are summed
        return cut_tensor(enter(value, axis), label, axis.rank, axis.size)
    return _SlicePart.apply(value, axis, label)


def keep_on_first_rank(value: Tensor, axis: Axis) -> Tensor:
    """Return the value on rank 0 and zeros elsewhere, so that a sum over ranks counts it once."""
    if axis.rank == 0:
        return value
    return _Zeros.apply(value)


def count_gradient_once(value: Tensor, axis: Axis) -> Tensor:
    """Keep the gradient of a value on rank 0 only, so that a sum over ranks counts it once."""
    if not value.requires_grad:
        return value
    return _CountGradientOnce.apply(value, axis)


def dropout(
    value: Tensor,
    *axes: Axis,
    labels: Sequence[Label],
    probability: float,
    order: tuple[int, ...],
) -> Tensor:
    """Apply dropout to this rank's part, with the mask that one process draws for the full value.

    Args:
        value: this rank's part, labelled `labels` over the axes, the outermost first.
        order: dims of the whole value in the order of its memory on one process, the slowest first:
            on CPU torch draws masks in the order of memory.
    """
    shape = list(value.shape)
    for axis, label in zip(axes, labels, strict=True):
        shape = compute_whole_shape(shape, label, axis.size)
    with torch.no_grad():
        ones = value.new_ones([shape[d] for d in order]).permute(_inverse(order))
        mask = F.dropout(ones, probability, True)
        for axis, label in zip(axes, labels, strict=True):
            mask = cut_tensor(mask, label, axis.rank, axis.size)
    return value * mask


def gather_buffer(own: Tensor, axis: Axis, buffer: Tensor, split: Split) -> None:
    """All-gather a buffer of which every rank wrote its own part."""
    # past the count of writes, as F.batch_norm itself does: its backward pass reads no statistics
    buffer.data.copy_(_all_gather(own, axis, split))


def compute_whole_shape(part: Sequence[int], label: Label, degree: int) -> list[int]:
    """Return the full tensor's shape, from the shape of a rank's part."""
    shape = list(part)
    axes = label.axes if isinstance(label, Tiled) else ((degree, label),)
    for parts, one in axes:
        if isinstance(one, Split):
            shape[one.dim] *= parts
    return shape


def _inverse(order: Sequence[int]) -> list[int]:
    places = [0] * len(order)
    for place, dim in enumerate(order):
        places[dim] = place
    return places


def _all_reduced_copy(value: Tensor, axis: Axis) -> Tensor:
    out = value.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(out)
    return out


def _is_replica(label: Tiled, rank: int) -> bool:
    places = zip(grid_coordinates(label, rank), label.axes, strict=True)
    return any(place and one == WHOLE for place, (_, one) in places)


def _all_gather(value: Tensor, axis: Axis, split: Split | Tiled) -> Tensor:
    return join_parts(axis.all_gather(value.contiguous()).unbind(0), split)


def _reduce_scatter(value: Tensor, axis: Axis, split: Split | Tiled) -> Tensor:
    parts = [cut_tensor(value, split, rank, axis.size) for rank in range(axis.size)]
    flat = torch.cat([one.reshape(-1) for one in parts])
    count = parts[0].numel()
    pending = axis.reduce_scatter(flat, [count * rank for rank in range(axis.size + 1)])
    return pending.result().view(parts[0].shape)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _all_reduced_copy(upstream, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        return _all_reduced_copy(value, axis)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, split: Split) -> Tensor:
        ctx.axis, ctx.split = axis, split
        return _reduce_scatter(value, axis, split)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(upstream, ctx.axis, ctx.split), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, axis: Axis, split: Split | Tiled, part_gradients: bool
    ) -> Tensor:
        ctx.axis, ctx.split, ctx.part_gradients = axis, split, part_gradients
        return _all_gather(value, axis, split)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.part_gradients:
            own = _reduce_scatter(upstream, ctx.axis, ctx.split)
        else:
            own = cut_tensor(upstream, ctx.split, ctx.axis.rank, ctx.axis.size)
        if isinstance(ctx.split, Tiled) and _is_replica(ctx.split, ctx.axis.rank):
            own = torch.zeros_like(own)  # the gather used the first of equal parts only
        return own, None, None, None


class _SlicePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, split: Split) -> Tensor:
        ctx.axis, ctx.split = axis, split
        return cut_tensor(value, split, axis.rank, axis.size)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(upstream, ctx.axis, ctx.split), None, None


class _CountGradientOnce(_Enter):
    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return (upstream if ctx.axis.rank == 0 else torch.zeros_like(upstream)), None


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return torch.zeros_like(upstream)
