"""What ranks compare about DataLoaders of the user's own: samplers, epochs, labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shoal.base.errors import ConfigError
from shoal.trainer.guards.reports.batch_report import refuse_unlike_loaders
from shoal.trainer.guards.reports.own_loaders import (
    SamplerEpochs,
    count_information_bits,
    describe_loaders,
    find_other_labels,
    list_rows,
)

DRAWN = torch.Generator().manual_seed(0)
ROWS = torch.randn(24, 6, generator=DRAWN)


def message_of(place: int, *, labels: Any = None, **sampler: Any) -> dict[str, Any]:
    """What a rank tells after its first batch."""
    labels = torch.arange(24) % 3 if labels is None else labels
    data = TensorDataset(ROWS, labels)
    dealt = DistributedSampler(data, 2, sampler.pop("rank", place), **sampler)
    batches = iter(DataLoader(data, 4, sampler=dealt))
    next(batches)
    told, _ = describe_loaders(4)
    return told


def test_loaders_that_deal_one_dataset_pass() -> None:
    refuse_unlike_loaders(1, [message_of(0, seed=3), message_of(1, seed=3)])


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"seed": 1}, "has seed = 0 on rank 0 and 1 on rank 1"),
        ({"shuffle": False}, "has shuffle = True on rank 0 and False on rank 1"),
        ({"rank": 0}, "of ranks 0 and 1 both have rank = 0"),
        ({"labels": 2 - torch.arange(24) % 3}, "sample 0 .* has label 0 on rank 0 and 2 on rank 1"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_what_differs_is_named(other: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        refuse_unlike_loaders(1, [message_of(0), message_of(1, **other)])


def test_ranks_may_have_data_of_their_own() -> None:
    """Other inputs are no label mistake, nor are other labels of inputs without information."""
    labels = torch.arange(24) % 3
    first = list_rows(loaded(TensorDataset(ROWS, labels)))
    assert (
        find_other_labels(first[0], list_rows(loaded(TensorDataset(-ROWS, 2 - labels)))[0]) is None
    )
    ones = torch.ones(24, 6)
    bare, other = (list_rows(loaded(TensorDataset(ones, y)))[0] for y in (labels, 2 - labels))
    assert find_other_labels(bare, other) is None


def loaded(data: Any) -> list[Any]:
    return [iter(DataLoader(data, 4))]


def test_an_epoch_in_the_order_of_the_one_before_is_seen_at_its_first_batch() -> None:
    sampler = DistributedSampler(TensorDataset(ROWS), 2, 0)
    epochs = SamplerEpochs(sampler)
    assert [epochs.repeats(4) for _ in range(3)] == [False] * 3
    assert epochs.repeats(4), "12 samples are an epoch of this rank"
    sampler.set_epoch(1)
    assert not epochs.repeats(4)


def test_reversed_arrays_have_information_too() -> None:
    assert count_information_bits([np.arange(64.0)[::-1], "text"]) == 64 * 6
