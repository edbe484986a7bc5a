"""Inspection of datasets besides training: identity, map-style or not; joining of samples.

No function here advances a stream or a generator: training reads the samples again.
"""

from __future__ import annotations

import errno
import hashlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from shoal.base.errors import ClusterError, ShoalError, UserError
from shoal.data.loading.sample_seeds import seeded_rng

Collate = Callable[[list[Any]], Any]

PERMANENT = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Error numbers that recur at every attempt; decoders raise OSError without a number."""


def load_error(what: str, error: Exception) -> ShoalError:
    """Return the one-line error for an exception in the user's data code, traceback as a note.

    Returns:
        UserError; ClusterError if a disk, a mount or a connection is at fault, which may work again
        after a restart.
    """
    kind: type[ShoalError] = ClusterError if is_transient(error) else UserError
    wrapped = kind(f"{what}: {type(error).__name__}: {error}")
    wrapped.add_note("".join(traceback.format_exception(error)))
    return wrapped


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: a disk, a mount or a connection failed.

    >>> (
    ...     is_transient(OSError(5, "Input/output error")),
    ...     is_transient(FileNotFoundError(2, "no such file")),
    ... )
    (True, False)
    """
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno not in PERMANENT


def digest_of(value: Any) -> str:
    """Hash tensors, arrays, numbers and texts, however nested, to 24 hex digits.

    Values of other kinds (object arrays, sets, most numpy scalars) are ignored.
    """
    total = hashlib.blake2b(digest_size=12)
    _digest_into(total, value)
    return total.hexdigest()


def _digest_into(total: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        total.update(f"{value.dtype} {list(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        total.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        # In the order of the pairs' texts; a value's text, say of a tensor, may take milliseconds.
        pairs = sorted(value.items(), key=lambda pair: f"({pair[0]!r}, ")
        _digest_into(total, [part for pair in pairs for part in pair])
    elif isinstance(value, list | tuple):
        total.update(f"{len(value)}".encode())
        for part in value:
            _digest_into(total, part)
    elif value is None or isinstance(value, str | bytes | int | float):
        total.update(repr(value).encode())


def dataset_identity(dataset: Any) -> list[Any] | None:
    """Return a dataset's length and hashes of its first and last sample; None if it raises.

    Both samples are loaded with fixed seeds, and the generators are restored afterwards.
    """
    try:
        with seeded_rng("identity"):
            count = len(dataset)
            return [count, digest_of(dataset[0]), digest_of(dataset[count - 1])]
    except Exception:
        return None


def join_samples(samples: list[Any], collate: Collate | None, where: str) -> Any:
    """Join a list of samples to one batch; `collate` None is torch's default_collate.

    Raises:
        UserError: collate failed; names `where`. ClusterError if a disk or a connection failed.
    """
    try:
        return default_collate(samples) if collate is None else collate(samples)
    except Exception as error:
        hint = "; unequal samples need collate=… of run.loader (data.collate=pkg.mod:function)"
        hint = "" if collate else hint
        raise load_error(f"collate (data.collate): joining {where}{hint}", error) from error


def is_indexed(dataset: object) -> bool:
    """Return whether a dataset is map-style: `__getitem__` and `__len__`, no IterableDataset."""
    if isinstance(dataset, IterableDataset):  # inherits a __getitem__ that only raises
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
