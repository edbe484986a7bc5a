"""Labels: what is cut is put together again, and where it lies is told right."""

from __future__ import annotations

import pytest
import torch

from shoal.base.errors import PlanError
from shoal.base.plans.placement import make_even_cut
from shoal.parallel.spmd.labelling.labels import (
    PARTIAL,
    WHOLE,
    Split,
    Tiled,
    cut_tensor,
    join_parts,
)

GRID = Tiled(((2, Split(0, 3)), (2, Split(1))))
COPIES = Tiled(((2, Split(1)), (2, WHOLE)))


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("label", [Split(0), Split(1), Split(0, 3), Split(1, 2), Split(2)])
def test_what_is_cut_is_put_together_again(label: Split, degree: int) -> None:
    whole = torch.arange(36 * 24 * 12).view(36, 24, 12)
    shards = [cut_tensor(whole, label, rank, degree) for rank in range(degree)]
    assert torch.equal(join_parts(shards, label), whole)
    assert all(shard.is_contiguous() for shard in shards)
    assert len({shard.shape for shard in shards}) == 1


@pytest.mark.parametrize("label", [GRID, COPIES])
def test_ranks_as_a_grid(label: Tiled) -> None:
    whole = torch.arange(12 * 8).view(12, 8)
    shards = [cut_tensor(whole, label, rank, 4) for rank in range(4)]
    assert torch.equal(join_parts(shards, label), whole)
    assert shards[0].numel() == whole.numel() // (4 if label is GRID else 2)


def test_segments_are_cut_each() -> None:
    qkv = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])
    assert cut_tensor(qkv, Split(0, 3), 1, 2).tolist() == [2, 3, 12, 13, 22, 23]


def test_sums_and_wholes() -> None:
    parts = [torch.ones(2), torch.full((2,), 4.0)]
    assert join_parts(parts, PARTIAL).tolist() == [5, 5]
    assert join_parts(parts, WHOLE) is parts[0]


@pytest.mark.parametrize(
    "split",
    [
        Split(0),
        Split(1),
        Split(0, 3),
        Split(1, 2),
        Split(2, 3),
        Split(0, (2, 1)),
        Split(1, (2, 1, 1)),
    ],
)
def test_boxes_say_where_the_stored_elements_lie(split: Split) -> None:
    whole = torch.arange(12 * 8 * 6).view(12, 8, 6)
    placed = make_even_cut("tp", split.dim, whole.shape[split.dim], 2, groups=split.groups)
    for rank in range(2):
        stored = cut_tensor(whole, split, rank, 2).reshape(-1)
        found = [
            whole[tuple(slice(a, b) for a, b in box)].reshape(-1)
            for box in placed.boxes(tuple(whole.shape), rank)
        ]
        assert torch.equal(torch.cat(found), stored)


def test_what_is_cut_in_unequal_segments_is_joined_again() -> None:
    whole = torch.arange(16 * 3).view(16, 3)
    shards = [cut_tensor(whole, Split(0, (2, 1, 1)), rank, 2) for rank in range(2)]
    assert shards[1][:, 0].tolist() == [12, 15, 18, 21, 30, 33, 42, 45]
    assert torch.equal(join_parts(shards, Split(0, (2, 1, 1))), whole)


def test_a_size_that_does_not_divide_is_named() -> None:
    with pytest.raises(PlanError, match=r"size 8 in segments of 2 : 1 : 1 does not divide into 4"):
        cut_tensor(torch.zeros(8), Split(0, (2, 1, 1)), 0, 4)
    with pytest.raises(PlanError, match="size 10 does not divide into 4 equal parts"):
        cut_tensor(torch.zeros(10), Split(0), 0, 4)
    with pytest.raises(
        PlanError,
        match="size 12 in 3 segments does not divide into 8 equal parts; try: a degree that divides 4",
    ):
        cut_tensor(torch.zeros(12), Split(0, 3), 0, 8)
