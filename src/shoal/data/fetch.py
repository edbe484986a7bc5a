"""Fetches samples so that their random draws depend on the sample alone, in any process.

A dataset that augments draws from the generators of `random`, `numpy.random` and `torch` (CPU).
Before item i of epoch e these are seeded by (seed, e, i), before joining a micro-batch by (seed,
its start in the stream), and afterwards they are put back: neither the layout, nor the number of
workers, nor the model's own draws change an image's crop. Not covered: draws on a GPU, and
`numpy.random.default_rng()` without a seed. A dataset with `draws_nothing = True` skips this.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from shoal.base.errors import ClusterError, ConfigError, ShoalError, UserError
from shoal.data.order import Indices, samples_at

Collate = Callable[[list[Any]], Any]

BLOCK = 1024
"""Positions looked up at once: 0.3 ms for 1024, 0.2 ms for 8."""


def seed_draws(*key: object) -> None:
    """Seed `random`, `numpy.random` and torch's CPU generator from `key` (its text, hashed)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(np.frombuffer(digest, dtype="<u4"))
    torch.default_generator.manual_seed(number)


@contextmanager
def kept_draws() -> Iterator[None]:
    """Put `random`, `numpy.random` and torch's CPU generator back after the `with` block."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


@contextmanager
def seeded_draws(*key: object) -> Iterator[None]:
    """Inside, draws follow from `key` alone; afterwards the generators are as before."""
    with kept_draws():
        seed_draws(*key)
        yield


def draws_nothing(dataset: object) -> bool:
    """Tell whether a dataset promises to use no random generator: its attribute `draws_nothing`."""
    return bool(getattr(dataset, "draws_nothing", False))


PERMANENT = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Error numbers that a further attempt meets again; decoders raise OSError without a number."""


def load_error(what: str, error: Exception) -> ShoalError:
    """The one line for an exception in the user's own data code, with its traceback as a note.

    Gives   UserError; ClusterError where a disk, a mount or a connection is at fault, which may
            work again after a restart
    """
    lost = isinstance(error, ConnectionError | TimeoutError)
    transient = lost or (isinstance(error, OSError) and error.errno not in PERMANENT)
    kind: type[ShoalError] = ClusterError if transient else UserError
    wrapped = kind(f"{what}: {type(error).__name__}: {error}")
    wrapped.add_note("".join(traceback.format_exception(error)))
    return wrapped


def digest_of(value: Any) -> str:
    """Hash tensors, arrays, numbers and texts, however nested, to 24 hex digits.

    Values of other kinds (object arrays, sets, most numpy scalars) are passed over.
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
        _digest_into(total, [part for pair in sorted(value.items(), key=repr) for part in pair])
    elif isinstance(value, list | tuple):
        total.update(f"{len(value)}".encode())
        for part in value:
            _digest_into(total, part)
    elif value is None or isinstance(value, str | bytes | int | float):
        total.update(repr(value).encode())


def identity_of(dataset: Any) -> list[Any] | None:
    """Returns a dataset's length and hashes of its first and last sample; None where it raises.

    Both samples are loaded with fixed seeds, and the generators are put back afterwards.
    """
    try:
        with seeded_draws("identity"):
            count = len(dataset)
            return [count, digest_of(dataset[0]), digest_of(dataset[count - 1])]
    except Exception:
        return None


def sample_kind(dataset: Any) -> str:
    """Returns what a dataset's first sample has as inputs: images, numbers, or tokens.

    images   floats of two dims or more · numbers  floats of fewer
    tokens   whole numbers, and whatever is unknown: an iterable, which is not read, or a sample
             that is no tensor or fails
    The first sample is loaded; the generators are put back afterwards.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return "tokens"
    try:
        with kept_draws():
            first = dataset[0]
        inputs = torch.as_tensor(first[0] if isinstance(first, tuple | list) else first)
    except Exception:
        return "tokens"
    if not inputs.is_floating_point():
        return "tokens"
    return "images" if inputs.ndim > 1 else "numbers"


def join(samples: list[Any], collate: Collate | None, where: str) -> Any:
    """Join a list of samples to one batch; `collate` None is torch's default_collate.

    Errors   UserError that names `where`; ClusterError where a disk or a connection failed
    """
    try:
        return default_collate(samples) if collate is None else collate(samples)
    except Exception as error:
        hint = "" if collate else "; unequal samples need data.collate=pkg.mod:function"
        raise load_error(f"data.collate: joining {where}{hint}", error) from error


def first_samples(data: Any, collate: Collate | None, count: int = 4) -> Any:
    """Join the first `count` samples to a batch; data and generators stay as they were.

    data     map-style, or an iterable with `state_dict()`
    Errors   ConfigError for an iterable that could not be put back; as `join`; the dataset's own
    """
    with kept_draws():
        if is_indexed(data):
            samples = [data[place] for place in range(min(count, len(data)))]
        elif hasattr(data, "state_dict"):
            state = copy.deepcopy(data.state_dict())
            samples = list(islice(iter(data), count))
            data.load_state_dict(state)
        else:
            raise ConfigError(
                "data.source: can only be iterated, so no sample can be looked at without taking "
                "it; nearest: a dataset with __getitem__ and __len__, or with state_dict()"
            )
    return join(samples, collate, "the first samples")


class Fetcher:
    """Loads stream positions of a map-style dataset; the same bits in any process.

    `fetcher.value(start, stop)` is one micro-batch, joined. Errors: UserError that names the
    sample, its epoch and its position.
    """

    def __init__(
        self, dataset: Any, samples: int, seed: int, shuffle: bool, collate: Collate | None
    ) -> None:
        self.dataset = dataset
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self.collate = collate
        self._block_start = 0
        self._block: Indices = np.zeros(0, dtype=np.int64)

    def ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Dataset indices of stream positions start … stop − 1, all of one epoch."""
        if start < self._block_start or stop > self._block_start + len(self._block):
            epoch_stop = (start // self.samples + 1) * self.samples
            ahead = max(stop, min(start + BLOCK, epoch_stop))
            _, self._block = samples_at(start, ahead, self.samples, self.seed, shuffle=self.shuffle)
            self._block_start = start
        block = self._block[start - self._block_start : stop - self._block_start]
        return tuple(block.tolist())

    def own_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The same as a person knows them: indices of the dataset before a part was held out."""
        return tuple(map(self._own, self.ids(start, stop)))

    def _own(self, index: int) -> int:
        whole = getattr(self.dataset, "whole_index", None)
        return index if whole is None else int(whole(index))

    def value(self, start: int, stop: int) -> Any:
        """The joined samples of stream positions start … stop − 1."""
        quiet = draws_nothing(self.dataset)
        untouched = quiet and self.collate is None
        with nullcontext() if untouched else kept_draws():
            epoch = start // self.samples
            items = [
                self._item(index, epoch, start + offset, seeded=not quiet)
                for offset, index in enumerate(self.ids(start, stop))
            ]
            if not untouched:
                seed_draws(self.seed, "collate", start)
            return join(items, self.collate, f"positions {start} … {stop - 1} (epoch {epoch})")

    def _item(self, index: int, epoch: int, position: int, *, seeded: bool) -> Any:
        if seeded:
            seed_draws(self.seed, epoch, index)
        try:
            return self.dataset[index]
        except Exception as error:
            where = f"data.source: sample {self._own(index)} (epoch {epoch}, position {position})"
            raise load_error(where, error) from error


def is_indexed(dataset: object) -> bool:
    """Tell whether a dataset is map-style: has `__getitem__` and `__len__`, no IterableDataset."""
    if isinstance(dataset, IterableDataset):  # inherits a __getitem__ that only raises
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
