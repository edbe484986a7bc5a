"""Random seeds per sample: a dataset's draws depend on the sample alone, under any layout.

A dataset that augments draws from the generators of `random`, `numpy.random` and `torch` (CPU).
Before item i of epoch e they are seeded by (seed, e, i), before joining a micro-batch by (seed, its
start in the stream), and afterwards they are restored. So neither the layout, nor the number of
workers, nor the model's own draws change an image's crop. Seeding all three takes 25 µs, more than
most samples. `DrawSeeder` therefore seeds only the generators that a dataset uses, and checks after
each step whether another one has advanced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from shoal.fabric.device import NumpyGenerator, PythonGenerator

T = TypeVar("T")


class GeneratorState(Protocol):
    """Interface of one of a process's own random generators."""

    def state(self) -> Hashable:
        """Return the generator's state: equal states draw equal numbers."""

    def restore(self, state: Any) -> None:
        """Restore a state that `state` returned."""

    def seed(self, digest: bytes) -> None:
        """Seed the generator from 8 bytes alone."""


class TorchGenerator:
    """Generator of torch on the CPU."""

    def state(self) -> Hashable:
        """Return its 5,056 bytes; `torch.get_rng_state` takes 2 µs more for the same."""
        return torch.default_generator.get_state().numpy().tobytes()

    def restore(self, state: Any) -> None:
        """Restore a state as `torch.set_rng_state`."""
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seed(self, digest: bytes) -> None:
        """Seed from the digest as one integer."""
        torch.default_generator.manual_seed(int.from_bytes(digest, "little"))


GENERATORS: tuple[GeneratorState, ...] = (PythonGenerator(), NumpyGenerator(), TorchGenerator())
STATES = tuple(generator.state for generator in GENERATORS)


def seed_draws(*key: object, generators: tuple[GeneratorState, ...] = GENERATORS) -> None:
    """Seed `random`, `numpy.random` and torch's CPU generator from `key` (its text, hashed)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    for generator in generators:
        generator.seed(digest)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore `random`, `numpy.random` and torch's CPU generator after the `with` block."""
    before = [generator.state() for generator in GENERATORS]
    try:
        yield
    finally:
        for generator, state in zip(GENERATORS, before, strict=True):
            generator.restore(state)


@contextmanager
def seeded_rng(*key: object) -> Iterator[None]:
    """Seed draws inside by `key` alone; restore the generators afterwards."""
    with preserved_rng():
        seed_draws(*key)
        yield


def draws_nothing(dataset: object) -> bool:
    """Return whether a dataset promises not to use random generators: attribute `draws_nothing`."""
    return bool(getattr(dataset, "draws_nothing", False))


class _GeneratorAdvanced(BaseException):
    """Signal that an unseeded generator advanced; no error of the work itself."""


class DrawSeeder:
    """Seeds for the generators that a dataset uses, and a watch on the others.

        draws.during(work)      `work` calls draws.seed(key) before each thing that may draw

    A generator that advanced without a seed is seeded from then on, and the work is repeated. A
    dataset that draws in every sample is detected after the first one. So all values equal those of
    always seeding.

    Note:
        A sample that draws and restores the generator itself (`fork_rng` without a seed) is not
        detected.
    """

    def __init__(self) -> None:
        self._drawn: tuple[GeneratorState, ...] = ()
        self._before: list[Hashable] = []
        self._seeds = 0

    @property
    def only_watches(self) -> bool:
        """True while no draw was detected: `seed` does nothing."""
        return not self._drawn and self._seeds >= 2

    def seed(self, *key: object) -> None:
        """Seed draws by `key` alone, until the next call."""
        self._seeds += 1
        if self._seeds == 2 and self._advanced_generators():
            raise _GeneratorAdvanced
        if self._drawn:
            seed_draws(*key, generators=self._drawn)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result, with the generators restored afterwards."""
        self._before = [state() for state in STATES]
        try:
            while True:
                try:
                    result = work()
                except _GeneratorAdvanced:
                    pass
                except Exception:
                    if not self._advanced_generators():
                        raise
                else:
                    if not self._advanced_generators():
                        return result
                self._drawn += self._advanced_generators()
        finally:
            if self._drawn:
                for generator, before in zip(GENERATORS, self._before, strict=True):
                    if generator in self._drawn:
                        generator.restore(before)

    def _advanced_generators(self) -> tuple[GeneratorState, ...]:
        """Return the unseeded generators that have advanced."""
        if not self._drawn and [state() for state in STATES] == self._before:
            return ()
        moved: tuple[GeneratorState, ...] = ()
        for generator, state in zip(GENERATORS, self._before, strict=True):
            if generator not in self._drawn and generator.state() != state:
                moved += (generator,)
        return moved
