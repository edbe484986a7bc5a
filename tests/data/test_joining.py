"""Samples of a step are joined at once only where its micro-batches cannot tell."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shoal.base.errors import UserError
from shoal.data.digits import DeterministicTensors
from shoal.data.loading.dataset_kind import digest_of
from shoal.data.loading.fetch import (
    FetchedMicroBatches,
    Fetcher,
    NonUniformSamplesError,
    join_uniform,
)
from shoal.data.owner_split import OwnerSubset


class Pair(NamedTuple):
    """A kind that torch joins in its own way."""

    left: int
    right: int


KINDS: dict[str, Any] = {
    "tensors": lambda i: torch.arange(3) + i,
    "scalars": lambda i: torch.tensor(float(i)),
    "arrays": lambda i: np.full((2, 2), i, dtype=np.float32),
    "ints": lambda i: i,
    "floats": lambda i: i / 2,
    "bools": lambda i: i % 2 == 0,
    "texts": lambda i: f"text {i}",
    "pairs": lambda i: (torch.arange(3) + i, i),
    "lists": lambda i: [torch.arange(3) + i, f"{i}"],
    "dicts": lambda i: {"ids": torch.arange(3) + i, "more": (i, {"name": b"%d" % i})},
    "empty": lambda i: (),
}
OTHERS: dict[str, Any] = {
    "named tuples": lambda i: Pair(i, -i),
    "dtypes": lambda i: torch.tensor(i, dtype=torch.int64 if i % 4 < 2 else torch.float32),
    "numbers": lambda i: i if i % 4 < 2 else i / 2,
    "numpy's numbers": lambda i: np.float32(i),
    "parameters": lambda i: torch.nn.Parameter(torch.zeros(2) + i) if i % 4 < 2 else torch.zeros(2),
}


class Made:
    """Sample i is made by a function."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def same(one: Any, other: Any) -> bool:
    """Equal in kind, dtype and value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_micro_batches_are_as_if_joined_alone(name: str) -> None:
    """Those in a row, and those between which another rank has one."""
    make = {**KINDS, **OTHERS}[name]
    fetcher = Fetcher(Made(make), 16, 0, False, None)
    for spans in ([(4, 6), (6, 8), (8, 9)], [(0, 2), (6, 8)]):
        found = fetcher.values(spans)
        assert (found.sizes is not None) == (name in KINDS)
        alone = [default_collate([make(i) for i in range(*span)]) for span in spans]
        assert all(map(same, found.micro_batches(), alone))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_uniform(name: str) -> None:
    with pytest.raises(NonUniformSamplesError):
        join_uniform([OTHERS[name](i) for i in range(4)])


def test_what_cannot_be_joined_names_its_micro_batch() -> None:
    fetcher = Fetcher(Made(lambda i: torch.zeros(2 if i < 6 else i)), 16, 0, False, None)
    with pytest.raises(UserError, match=r"joining positions 6 … 7 \(epoch 0\)"):
        fetcher.values([(2, 4), (4, 6), (6, 8)])


def test_one_tensor_travels_for_all_micro_batches() -> None:
    """A worker's message costs by the tensor."""
    found = Fetcher(Made(KINDS["tensors"]), 64, 0, True, None).values([(0, 2), (2, 4), (4, 6)])
    assert isinstance(found, FetchedMicroBatches)
    assert isinstance(found.value, torch.Tensor)
    assert found.value.shape == (6, 3)


def test_a_digest_of_a_dict_needs_no_text_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is that of the pairs' texts, as in checkpoints before; text of a tensor is slow."""
    sample = {
        "b": torch.zeros(2),
        10: "ten",
        "a": {"y": torch.ones(3), "x": 1.5},
        1: b"one",
        "ab": 7,
    }
    pairs = [part for pair in sorted(sample.items(), key=repr) for part in pair]
    inside = pairs.index("a") + 1
    pairs[inside] = [part for pair in sorted(sample["a"].items(), key=repr) for part in pair]
    expected = digest_of(pairs)
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor: pytest.fail("text of a tensor"))
    assert digest_of(sample) == expected
    assert digest_of({**sample, "b": torch.ones(2)}) != expected


def test_a_dataset_that_joins_its_samples_itself_gives_the_same() -> None:
    """Tensors, and an owner's part of them; a part that changes samples is read one by one."""

    class Changed(OwnerSubset):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image, label + 1

    images, labels = torch.rand(9, 1, 2, 2), torch.arange(9)
    whole = DeterministicTensors(images, labels)
    own = np.array([1, 2, 3, 5, 8])
    for dataset in (whole, OwnerSubset(whole, own), Changed(whole, own)):
        fetcher = Fetcher(dataset, len(dataset), 3, True, None)
        at_once = fetcher.values([(0, 2), (2, 3)])
        fetcher._read_joined = None
        plain = fetcher.values([(0, 2), (2, 3)])
        assert at_once.sizes == plain.sizes == [2, 1]
        assert same(at_once.value, plain.value)
        assert [one.stride() for one in at_once.value] == [one.stride() for one in plain.value]
    assert not hasattr(Changed(whole, own), "read_joined")
    assert not hasattr(OwnerSubset([1, 2], own[:2]), "read_joined")
