"""The order of samples: a bijection per epoch, from nothing but integers."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from shoal.data.loading import sample_order
from shoal.data.loading.sample_order import permute, samples_at


@pytest.mark.parametrize("samples", [*range(1, 70), 127, 128, 129, 1000, 4097, 65_537])
def test_every_index_once(samples: int) -> None:
    for epoch in range(3):
        got = permute(np.arange(samples), samples, seed=7, epoch=epoch)
        assert np.array_equal(np.sort(got), np.arange(samples))


@pytest.mark.parametrize("samples", [2, 18, 33, 64, 65, 1797, 4096])
def test_few_samples_are_looked_up_in_the_order_of_the_network(samples: int) -> None:
    """All at once by tables, and one by one as for many samples; numbers of earlier versions."""
    width = max(sample_order.MIN_BITS, (samples - 1).bit_length())
    rounds = sample_order._rounds(5, 2, samples, width)
    found = np.arange(samples, dtype=np.uint64)
    found = sample_order._network(found, rounds, width)
    while (outside := found >= samples).any():
        found[outside] = sample_order._network(found[outside], rounds, width)
    assert permute(np.arange(samples), samples, seed=5, epoch=2).tolist() == found.tolist()
    assert permute([samples - 1], samples, seed=5, epoch=2).tolist() == found[-1:].tolist()


def test_differs_per_epoch_seed_and_length() -> None:
    def first(samples: int, seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(permute(np.arange(20), samples, seed, epoch).tolist())

    orders = [first(1000, s, e) for s, e in itertools.product(range(5), range(5))]
    orders += [first(1001, 0, 0), first(1000, -1, 0), first(1000, 2**70, 0)]
    assert len(set(orders)) == len(orders)


def test_the_order_of_a_seed_never_changes() -> None:
    """Resumed runs of later versions rely on these very numbers."""
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == GOLDEN_10
    assert permute([0, 1, 2], 10**12, seed=3, epoch=4).tolist() == GOLDEN_BIG


GOLDEN_10 = [9, 5, 0, 2, 3, 7, 1, 4, 6, 8]
GOLDEN_BIG = [372145804494, 400839500499, 867261218489]


def test_a_range_is_the_same_as_its_parts() -> None:
    whole = permute(np.arange(1000), 1000, 1, 2)
    parts = [permute(np.arange(i, i + 100), 1000, 1, 2) for i in range(0, 1000, 100)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert samples_at(2300, 2310, 1000, seed=1)[1].tolist() == whole[300:310].tolist()


@pytest.mark.parametrize("samples", [3, 4])
def test_all_shuffles_of_few_samples_are_alike_frequent(samples: int) -> None:
    found = Counter(tuple(permute(range(samples), samples, 1, e).tolist()) for e in range(300))
    expected = 300 / math.factorial(samples)
    counts = [found[p] for p in itertools.permutations(range(samples))]
    chi2 = sum((c - expected) ** 2 / expected for c in counts)
    freedom = len(counts) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_are_not_related() -> None:
    order = permute(np.arange(100_003), 100_003, 5, 0)
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_003), order)[0, 1]) < 0.02


def test_memory_does_not_grow_with_the_dataset() -> None:
    tracemalloc.start()
    permute(np.arange(64), 10**15, 0, 0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 200_000


def test_a_range_in_two_epochs_is_refused() -> None:
    with pytest.raises(ValueError, match="positions 8 … 11 lie in two epochs of 10 samples"):
        samples_at(8, 12, 10, seed=0)


def test_unshuffled_is_the_datasets_order() -> None:
    epoch, indices = samples_at(13, 16, 10, seed=0, shuffle=False)
    assert (epoch, indices.tolist()) == (1, [3, 4, 5])
