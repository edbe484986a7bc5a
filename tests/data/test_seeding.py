"""Draws follow from the sample alone, whatever a dataset draws from, and how often."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from proof_rows import rows
from shoal.base.errors import UserError
from shoal.data.loading import sample_seeds
from shoal.data.loading.loader import Loader

DRAWS = {
    "nothing": lambda: 0.0,
    "random": random.random,
    "a normal of random": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "a normal of numpy": np.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "all": lambda: random.random() + np.random.rand() + torch.rand(()).item(),
}


class Sometimes(Dataset[Any]):
    """Sample i is i and a draw, of every `every`-th one; counts how often each is read."""

    def __init__(self, what: str, every: int, samples: int = 24) -> None:
        self.what, self.every, self.samples = what, every, samples
        self.read: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read[index] += 1
        drawn = 0.0 if index % self.every else DRAWS[self.what]()
        return torch.tensor([float(index), drawn], dtype=torch.float64)


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    """Draws while joining."""
    return torch.stack(samples) + torch.rand(())


def values(dataset: Any, **settings: Any) -> list[Any]:
    """Every micro-batch of an epoch."""
    loader = Loader(dataset, **{"batch": 6, "micro_batch": 2, "seed": 5, **settings})
    return [m.value.tolist() for step in loader for m in step.micro_batches]


def always_seeded(dataset: Any, collate: Any = torch.stack) -> list[Any]:
    """The same by the definition: all generators are seeded before each sample and each joining."""
    loader = Loader(dataset, batch=6, micro_batch=2, seed=5)
    found = []
    for start in range(0, len(dataset), 2):
        samples = []
        for index in loader._fetcher.ids(start, start + 2):
            sample_seeds.seed_draws(5, 0, index)
            samples.append(dataset[index])
        sample_seeds.seed_draws(5, "collate", start)
        found.append(collate(samples).tolist())
    return found


@pytest.mark.parametrize(
    ("what", "workers"),
    rows(
        [tuple(DRAWS), (0, 2)],
        kept=[*((what, 0) for what in DRAWS), ("nothing", 2), ("a normal of numpy", 2), ("all", 2)],
    ),
)
def test_draws_are_those_of_seeding_always(what: str, workers: int) -> None:
    """Also where the first samples draw nothing, and where a normal number is left over."""
    for every in (1, 7):
        np.random.randn()  # leaves the second of a pair
        random.gauss(0, 1)
        assert values(Sometimes(what, every), workers=workers) == always_seeded(
            Sometimes(what, every)
        )
        found = values(Sometimes(what, every), workers=workers, collate=noisy)
        assert found == always_seeded(Sometimes(what, every), noisy)


@pytest.mark.parametrize("what", DRAWS)
def test_generators_stand_as_before(what: str) -> None:
    for every in (1, 7):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        np.random.randn(), random.gauss(0, 1)
        before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
        values(Sometimes(what, every), collate=noisy)
        after = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
        assert before == after


def test_what_draws_in_every_sample_is_read_once_more_alone() -> None:
    quiet, drawing, late = Sometimes("nothing", 1), Sometimes("all", 1), Sometimes("torch", 7)
    values(quiet), values(drawing), values(late)
    assert sum(quiet.read.values()) == 24
    assert sum(drawing.read.values()) == 24 + 1
    assert sum(late.read.values()) <= 24 + 6  # a step


@pytest.mark.parametrize(("what", "seeded"), [("nothing", 0), ("torch", 24), ("all", 72)])
def test_only_what_is_drawn_from_is_seeded(
    monkeypatch: pytest.MonkeyPatch, what: str, seeded: int
) -> None:
    """Seeding all three for every sample takes 25 µs of it."""
    calls = Counter[str]()
    for generator in sample_seeds.GENERATORS:
        kind = type(generator)
        own = kind.seed

        def counted(self: Any, digest: bytes, own: Any = own, kind: Any = kind) -> None:
            calls[kind.__name__] += 1
            own(self, digest)

        monkeypatch.setattr(kind, "seed", counted)
    values(Sometimes(what, 1))
    assert sum(calls.values()) == seeded


def test_an_error_of_a_sample_that_drew_names_it_once() -> None:
    """What fails by what it drew must fail by the sample's own draws."""

    class Unlucky(Sometimes):
        def __getitem__(self, index: int) -> torch.Tensor:
            sample = super().__getitem__(index)
            if index == 9:
                raise ValueError(f"drew {torch.rand(()).item()}")
            return sample

    sample_seeds.seed_draws(5, 0, 9)
    told = f"data.source: sample 9 (epoch 0, position 9): ValueError: drew {torch.rand(()).item()}"
    with pytest.raises(UserError) as caught:
        values(Unlucky("nothing", 1), shuffle=False)
    assert str(caught.value) == told


def test_a_numpy_of_another_kind_of_generator() -> None:
    own = np.random.get_bit_generator()
    wanted = always_seeded(Sometimes("torch", 7))
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        before = repr(np.random.get_state(legacy=False))
        assert values(Sometimes("torch", 7)) == wanted
        assert repr(np.random.get_state(legacy=False)) == before
    finally:
        np.random.set_bit_generator(own)


def test_numpys_own_generator_may_be_exchanged() -> None:
    ours, before = sample_seeds.NumpyGenerator(), np.random.get_bit_generator()
    first = ours.state()
    try:
        np.random.set_bit_generator(np.random.MT19937(5))
        second = ours.state()
        assert second != first
        np.random.rand()
        assert ours.state() != second
        np.random.set_bit_generator(np.random.PCG64(5))
        third = ours.state()
        np.random.rand()
        assert ours.state() != third
    finally:
        np.random.set_bit_generator(before)
    assert ours.state() == first
