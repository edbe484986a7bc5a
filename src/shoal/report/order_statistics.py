"""Medians, percentiles and distinct values, equal to numpy's, without `numpy.ma`.

numpy's `median`, `percentile` and `unique` ask whether an array is masked, and so import
`numpy.ma` at their first call: 9 ms of processor time, a twelfth of the report at a run's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def median(values: Any, axis: int | None = None) -> Any:
    """Return the median of an array, or of a sequence, over one axis or over all values.

    NaN where a value is NaN, and of no values.

    >>> float(median([3.0, 1.0, 2.0])), median([[1.0, 5.0], [2.0, 7.0]], axis=0).tolist()
    (2.0, [1.5, 6.0])
    """
    import numpy as np

    array = np.asarray(values)
    array, along = (array.reshape(-1), 0) if axis is None else (array, axis)
    count = array.shape[along]
    if not count:
        return np.full([n for at, n in enumerate(array.shape) if at != along], np.nan)[()]
    middle = ((count - 1) // 2, count // 2)
    ordered = np.partition(array, [*middle, count - 1], axis=along)  # NaN last
    low, high, last = (ordered.take(at, axis=along) for at in (*middle, count - 1))
    kind = array.dtype if array.dtype.kind == "f" else float
    return np.where(last == last, (low + high) / 2, np.nan).astype(kind, copy=False)[()]


def percentile(
    values: Any, share: float | Sequence[float], axis: int | None = None, *, lower: bool = False
) -> Any:
    """Return percentiles of an array over one axis or over all values, interpolated linearly.

    Args:
        values: without NaN, at least one.
        share: 0 to 100; several: a leading dimension of the result, which is fp64.
        lower: take the nearest value below, interpolate nothing.

    >>> float(percentile([1.0, 2.0, 4.0], 75)), percentile([1, 2, 4], [0, 100]).tolist()
    (3.0, [1.0, 4.0])
    """
    import numpy as np

    array = np.asarray(values)
    array, along = (array.reshape(-1), 0) if axis is None else (array, axis)
    last = array.shape[along] - 1
    # As in numpy: several shares are fp64, and so are their percentiles of narrower values.
    shares: Any = np.array(share, float) if np.ndim(share) else [share]
    places = [one / 100 * last for one in shares]
    needed = {min(int(place) + more, last) for place in places for more in (0, 1)}
    ordered = np.partition(array, sorted(needed), axis=along)
    found = [_interpolate(ordered, place, along, lower) for place in places]
    return np.stack(found).astype(float) if np.ndim(share) else found[0]


def distinct(values: Any) -> Any:
    """Return the distinct values of an array, ascending; NaN is not expected.

    >>> distinct([3, 1, 3]).tolist()
    [1, 3]
    """
    import numpy as np

    ordered = np.sort(np.asarray(values).reshape(-1))
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)]]


def _interpolate(ordered: Any, place: float, axis: int, lower: bool) -> Any:
    """Interpolate the value at a position of an axis, by numpy's formula that stays in range."""
    below = int(place)
    low = ordered.take(below, axis=axis)
    if lower or place == below:
        return low
    high, part = ordered.take(below + 1, axis=axis), place - below
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)
