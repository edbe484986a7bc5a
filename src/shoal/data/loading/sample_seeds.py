"""Makes a dataset's random draws depend on the sample alone, in any process and under any layout.

A dataset that augments draws from the generators of `random`, `numpy.random` and `torch` (CPU).
Before item i of epoch e these are seeded by (seed, e, i), before joining a micro-batch by (seed,
its start in the stream), and afterwards they are put back: neither the layout, nor the number of
workers, nor the model's own draws change an image's crop. Seeding all three takes 25 µs, more than
most samples; `Draws` therefore seeds those that a dataset was seen to draw from, and looks after
each step whether another one has moved.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class Generator(Protocol):
    """One of a process's own random generators."""

    def state(self) -> Hashable:
        """Where it stands: equal states draw equal numbers."""

    def put_back(self, state: Any) -> None:
        """Let it stand where `state` was read."""

    def seed(self, digest: bytes) -> None:
        """Let what it draws follow from 8 bytes alone."""


def _seen_at(address: int) -> Any:
    """The words and the place of a Mersenne Twister, wherever it is: `.raw` are its bytes now."""
    return (ctypes.c_char * PythonGenerator.SIZE).from_address(address)


class PythonGenerator:
    """That of `random`: its Mersenne Twister as CPython keeps it, where that is so, else its state.

    Python takes 9 µs to tell its state, and is asked twice a step; the bytes take 0.3. In CPython
    they follow the object's head: the place, then 624 words.
    """

    SIZE = 4 + 624 * 4

    def __init__(self) -> None:
        self._twister: Any = getattr(random, "_inst", None)
        words, place = random.getstate()[1][:-1], random.getstate()[1][-1]
        is_ours = type(self._twister) is random.Random and self._twister.__sizeof__() >= self.SIZE
        self._seen: Any = None
        if is_ours:
            self._seen = _seen_at(id(self._twister) + object.__basicsize__)
        self._is_raw = is_ours and struct.unpack("i624I", self._seen.raw) == (place, *words)

    def state(self) -> Hashable:
        """Bytes of the twister and the normal number that is left, or as `random.getstate`."""
        if self._is_raw:
            return self._seen.raw, self._twister.gauss_next
        return random.getstate()

    def put_back(self, state: Any) -> None:
        """Let it stand where `state` was read."""
        if self._is_raw:
            (raw, left), version = state, random.Random.VERSION
            place, *words = struct.unpack("i624I", raw)
            state = version, (*words, place), left
        random.setstate(state)

    def seed(self, digest: bytes) -> None:
        """From the digest as one number."""
        random.seed(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class _Whole:
    """The state of numpy's generator, compared by its text."""

    text: str
    state: Any = field(compare=False)

    @staticmethod
    def of_numpy() -> _Whole:
        state = np.random.get_state(legacy=False)
        return _Whole(repr(state), state)


class NumpyGenerator:
    """That of `numpy.random`: bytes of its Mersenne Twister where that tells all, else its state.

    numpy takes 20 µs to tell its state and 0.4 µs to say where the twister's 624 words and place
    lie. The rest of the state is a normal number that a draw may have left for the next one.
    """

    def __init__(self) -> None:
        self._known = b""
        self._is_all = False
        self._bits: Any = None
        self._seen: Any = None

    def state(self) -> Hashable:
        """Bytes of the twister, or the whole state."""
        bits: Any = np.random.mtrand._rand._bit_generator
        if bits is not self._bits:
            if type(bits) is not np.random.MT19937:
                return _Whole.of_numpy()
            self._bits, self._seen = bits, _seen_at(bits.ctypes.state_address)
        raw: bytes = self._seen.raw
        if raw != self._known:
            # Whoever leaves a normal number has moved the twister.
            self._known, self._is_all = raw, not np.random.get_state(legacy=False)["has_gauss"]
        return raw if self._is_all else _Whole.of_numpy()

    def put_back(self, state: Any) -> None:
        """Let it stand where `state` was read."""
        if isinstance(state, _Whole):
            np.random.set_state(state.state)
            return
        words, place = (
            np.frombuffer(state[:-4], dtype=np.uint32),
            int.from_bytes(state[-4:], "little"),
        )
        np.random.set_state(("MT19937", words, place, 0, 0.0))

    def seed(self, digest: bytes) -> None:
        """From two words."""
        np.random.seed(np.frombuffer(digest, dtype="<u4"))


class TorchGenerator:
    """That of torch on the CPU."""

    def state(self) -> Hashable:
        """Its 5,056 bytes; `torch.get_rng_state` takes 2 µs more to give the same."""
        return torch.default_generator.get_state().numpy().tobytes()

    def put_back(self, state: Any) -> None:
        """As `torch.set_rng_state`."""
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seed(self, digest: bytes) -> None:
        """From the digest as one number."""
        torch.default_generator.manual_seed(int.from_bytes(digest, "little"))


GENERATORS: tuple[Generator, ...] = (PythonGenerator(), NumpyGenerator(), TorchGenerator())
STATES = tuple(generator.state for generator in GENERATORS)


def seed_draws(*key: object, generators: tuple[Generator, ...] = GENERATORS) -> None:
    """Seed `random`, `numpy.random` and torch's CPU generator from `key` (its text, hashed)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    for generator in generators:
        generator.seed(digest)


@contextmanager
def kept_draws() -> Iterator[None]:
    """Put `random`, `numpy.random` and torch's CPU generator back after the `with` block."""
    before = [generator.state() for generator in GENERATORS]
    try:
        yield
    finally:
        for generator, state in zip(GENERATORS, before, strict=True):
            generator.put_back(state)


@contextmanager
def seeded_draws(*key: object) -> Iterator[None]:
    """Inside, draws follow from `key` alone; afterwards the generators are as before."""
    with kept_draws():
        seed_draws(*key)
        yield


def draws_nothing(dataset: object) -> bool:
    """Tell whether a dataset promises to use no random generator: its attribute `draws_nothing`."""
    return bool(getattr(dataset, "draws_nothing", False))


class _Moved(BaseException):
    """A generator moved that had not been seeded; no error of the work's own."""


class Draws:
    """Seeds the generators that somebody draws from, and watches the others.

        draws.during(work)      `work` calls draws.seed(key) before each thing that may draw

    One that moved without being seeded is seeded from then on, and the work is done again: what
    draws in every sample is found after the first one. So all values are those of always seeding.

    Note:
        a sample that draws and puts the generator back itself (`fork_rng` without a seed) is not
        seen to draw.
    """

    def __init__(self) -> None:
        self._drawn: tuple[Generator, ...] = ()
        self._before: list[Hashable] = []
        self._seeds = 0

    @property
    def only_watches(self) -> bool:
        """Nobody drew so far: `seed` does nothing."""
        return not self._drawn and self._seeds >= 2

    def seed(self, *key: object) -> None:
        """Let draws follow from `key` alone, until the next call."""
        self._seeds += 1
        if self._seeds == 2 and self._moved():
            raise _Moved
        if self._drawn:
            seed_draws(*key, generators=self._drawn)

    def during(self, work: Callable[[], T]) -> T:
        """What `work` gives. The generators stand as before afterwards. Errors: those of `work`."""
        self._before = [state() for state in STATES]
        try:
            while True:
                try:
                    result = work()
                except _Moved:
                    pass
                except Exception:
                    if not self._moved():
                        raise
                else:
                    if not self._moved():
                        return result
                self._drawn += self._moved()
        finally:
            if self._drawn:
                for generator, before in zip(GENERATORS, self._before, strict=True):
                    if generator in self._drawn:
                        generator.put_back(before)

    def _moved(self) -> tuple[Generator, ...]:
        """Generators that were not seeded and no longer stand where they stood."""
        if not self._drawn and [state() for state in STATES] == self._before:
            return ()
        moved: tuple[Generator, ...] = ()
        for generator, state in zip(GENERATORS, self._before, strict=True):
            if generator not in self._drawn and generator.state() != state:
                moved += (generator,)
        return moved
