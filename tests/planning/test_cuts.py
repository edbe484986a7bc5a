"""Cuts of buckets: every element has one owner, shares are even, whole parameters stay whole."""

from __future__ import annotations

import itertools
import random

import pytest

from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.base.plans.tensor_shards import flat_slices
from shoal.planning.bucket_shards import cut_buckets
from shoal.planning.gradient_buckets import plan_buckets

LLAMA_BLOCK = [
    (64, 64),
    (64, 64),
    (64, 64),
    (64, 64),
    (64,),
    (172, 64),
    (172, 64),
    (64, 172),
    (64,),
]
SHAPES = [(257, 64), *(LLAMA_BLOCK * 3), (64,)]


def rows_of(shapes: list[tuple[int, ...]]) -> list[Placement]:
    return [Placement(f"p{n}", shape, "float32", trains=True) for n, shape in enumerate(shapes)]


def over(ranks: int) -> Layout:
    return Layout(dp_shard=ranks, zero=1)


def loads(buckets, ranks: int) -> list[int]:
    """Elements that each rank owns, over all buckets."""
    return [sum(b.cuts[rank + 1] - b.cuts[rank] for b in buckets) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_even_cuts_are_equal_and_pad_less_than_a_rank_each(ranks: int) -> None:
    rows = rows_of(SHAPES)
    plain = plan_buckets(rows, over(ranks), bucket_bytes=60_000)
    assert len(plain) > 2
    for before, after in zip(plain, cut_buckets(plain, rows, over(ranks)), strict=True):
        sizes = {b - a for a, b in itertools.pairwise(after.cuts)}
        assert len(sizes) == 1, "collectives of equal parts are one call"
        assert after.cuts[0] == 0
        assert after.cuts[-1] == after.elements
        assert 0 <= after.elements - before.elements < ranks
        assert after.names == before.names


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_whole_parameters_have_one_owner(ranks: int) -> None:
    rows = rows_of(SHAPES)
    sizes = {f.name: f.elements for f in rows}
    plain = plan_buckets(rows, over(ranks), bucket_bytes=60_000)
    cut = cut_buckets(plain, rows, over(ranks), whole_parameters=True)
    for before, after in zip(plain, cut, strict=True):
        assert after.elements == before.elements, "nothing is padded"
        ends = {0, *itertools.accumulate(sizes[name] for name in after.names)}
        assert set(after.cuts) <= ends, "a cut goes through a parameter"
        assert list(after.cuts) == sorted(after.cuts)
        assert (after.cuts[0], after.cuts[-1], len(after.cuts)) == (0, after.elements, ranks + 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_owners_of_whole_parameters_hold_about_the_same(ranks: int) -> None:
    """Within the largest parameter of even; the rank with most would need the memory."""
    rows = rows_of(SHAPES)
    plain = plan_buckets(rows, over(ranks), bucket_bytes=60_000)
    held = loads(cut_buckets(plain, rows, over(ranks), whole_parameters=True), ranks)
    total, largest = sum(f.elements for f in rows), max(f.elements for f in rows)
    assert sum(held) == total
    assert max(held) - total / ranks <= largest


def test_more_ranks_than_parameters_leaves_some_without() -> None:
    rows = rows_of([(8, 8), (8,)])
    (bucket,) = cut_buckets(plan_buckets(rows, over(4)), rows, over(4), whole_parameters=True)
    shares = [b - a for a, b in itertools.pairwise(bucket.cuts)]
    assert sorted(shares) == [0, 0, 8, 64]


def test_slices_of_a_flat_run_are_its_elements_in_order() -> None:
    """Whatever a cut goes through: boxes hold exactly its elements, in the order of the buffer."""
    dice = random.Random(0)
    for shape in [(), (7,), (5, 3), (2, 3, 4), (3, 1, 2, 2), (1, 6)]:
        total = 1
        for length in shape:
            total *= length
        places = list(itertools.product(*(range(n) for n in shape)))
        for _ in range(40):
            start, stop = sorted((dice.randint(0, total), dice.randint(0, total)))
            found = []
            for box in flat_slices(shape, start, stop):
                found += list(itertools.product(*(range(a, b) for a, b in box)))
            assert found == places[start:stop], (shape, start, stop)
