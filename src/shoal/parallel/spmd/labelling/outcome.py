"""Read the label of a result off the ranks' results and the result of one process.

The ranks' results give the whole result if they are

joined along dim d, in segments g         → Split(d, g)
joined along two dims                     → Tiled, the ranks as a grid
added up, or averaged                     → Partial
equal                                     → Whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.base.plans.placement import Groups, proportions, segment_sizes
from shoal.parallel.spmd.labelling.labels import PARTIAL, WHOLE, Label, Split, Tiled, join_parts

MOST_GROUPS = 64
"""Largest number of segment counts tried, the smallest first, if no input's count fits."""


def infer_labels(
    whole: Any,
    results: Sequence[Any],
    labels: Sequence[Label],
    degree: int,
    shapes: Sequence[tuple[int, ...]] = (),
) -> Any:
    """Return the label of a result, or of each of several; None if the parts do not fit.

    Args:
        labels: labels of the inputs: their segments are tried first.
        shapes: shapes of the inputs, if the operation may have concatenated several.
    """
    if not isinstance(whole, list | tuple):
        return infer_label(whole, results, labels, degree, shapes)
    if any(len(result) != len(whole) for result in results):
        return None
    out = []
    for k, item in enumerate(whole):
        label = infer_label(item, [result[k] for result in results], labels, degree)
        if label is None:
            return None
        out.append(label)
    return tuple(out)


def infer_label(
    whole: Any,
    parts: Sequence[Any],
    labels: Sequence[Label],
    degree: int,
    shapes: Sequence[tuple[int, ...]] = (),
) -> Label | None:
    """Return the label of one result; None if the parts do not fit."""
    if not isinstance(whole, Tensor):
        return WHOLE if all(part == whole for part in parts) else None
    if any(part.shape != parts[0].shape or part.dim() != whole.dim() for part in parts):
        return None
    if parts[0].shape == whole.shape:
        if all(is_close(whole, part) for part in parts):
            return WHOLE
        added = whole.is_floating_point() and is_close(whole, torch.stack(list(parts)).sum(0))
        return PARTIAL if added else None
    dims = [d for d in range(whole.dim()) if whole.shape[d] != parts[0].shape[d]]
    thin = [
        _slice_middle(part, dims) for part in (whole, *parts)
    ]  # this rejects most wrong labels early
    known = [*_concatenated_segments(whole, dims, labels, shapes), *list_segments(labels)]
    for label in _enumerate_labels(whole, parts[0], dims, known, degree):
        if is_close(thin[0], join_parts(thin[1:], label)) and is_close(
            whole, join_parts(parts, label)
        ):
            return label
    return None


def is_average(whole: Any, parts: Sequence[Any]) -> bool:
    """Return whether the ranks' results average to the full result."""
    if not all(isinstance(t, Tensor) and t.shape == parts[0].shape for t in (whole, *parts)):
        return False
    return whole.is_floating_point() and is_close(whole, torch.stack(list(parts)).mean(0))


def _slice_middle(tensor: Tensor, dims: list[int]) -> Tensor:
    """Keep one index in the middle of every dim except `dims`."""
    for d in range(tensor.dim()):
        if d not in dims and tensor.shape[d]:
            tensor = tensor.narrow(d, tensor.shape[d] // 2, 1)
    return tensor


def _enumerate_labels(
    whole: Tensor, part: Tensor, dims: list[int], known: Sequence[Groups], degree: int
) -> Iterator[Label]:
    ratios = {d: whole.shape[d] // max(1, part.shape[d]) for d in dims}
    if any(ratios[d] * part.shape[d] != whole.shape[d] for d in dims):
        return
    if len(dims) == 1:
        (d,) = dims
        ratio = ratios[d]
        splits = [Split(d, g) for g in _candidate_segments(part.shape[d], known)]
        if ratio == degree:
            yield from splits
        elif degree % ratio == 0:
            copies = degree // ratio
            yield from (Tiled(((ratio, split), (copies, WHOLE))) for split in splits)
            yield from (Tiled(((copies, WHOLE), (ratio, split))) for split in splits)
    elif len(dims) == 2 and ratios[dims[0]] * ratios[dims[1]] == degree:
        for a, b in (dims, dims[::-1]):
            for one in _candidate_segments(part.shape[a], known):
                for other in _candidate_segments(part.shape[b], known):
                    yield Tiled(((ratios[a], Split(a, one)), (ratios[b], Split(b, other))))


def _concatenated_segments(
    whole: Tensor, dims: list[int], labels: Sequence[Label], shapes: Sequence[tuple[int, ...]]
) -> list[Groups]:
    """Return the segments of a result that concatenates its inputs: theirs, in order."""
    if len(dims) != 1 or len(shapes) < 2:
        return []
    (d,) = dims
    sizes: list[int] = []
    for shape, label in zip(shapes, labels, strict=True):
        if len(shape) != whole.dim() or any(
            k != d and shape[k] != whole.shape[k] for k in range(whole.dim())
        ):
            return []
        groups = label.groups if isinstance(label, Split) and label.dim == d else 1
        sizes += segment_sizes(shape[d], groups)
    return [proportions(sizes)] if sum(sizes) == whole.shape[d] and min(sizes) > 0 else []


def list_segments(labels: Sequence[Label | None]) -> list[Groups]:
    """Return the segments that the labels have, then 1.

    >>> list_segments([WHOLE, Split(0, 3), Split(1, (2, 1, 1))])
    [3, (2, 1, 1), 1]
    """
    found: list[Groups] = []
    for label in labels:
        for _, one in label.axes if isinstance(label, Tiled) else ((0, label),):
            if isinstance(one, Split):
                found.append(one.groups)
    return list(dict.fromkeys([*found, 1]))


def _candidate_segments(size: int, known: Sequence[Groups]) -> list[Groups]:
    """List segmentations to try for a cut dim: the known ones, then equal segments.

    Args:
        size: size of a rank's part of the dim.
        known: segmentations of the inputs: a count, or relative sizes.

    Returns:
        those by which `size` divides, each once.
    """
    every = [g for g in range(1, size + 1) if size % g == 0][:MOST_GROUPS]
    return [g for g in dict.fromkeys([*known, *every]) if segment_sizes(size, g)]


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    return bool(torch.allclose(one, other, rtol=1e-8, atol=1e-8, equal_nan=True))
