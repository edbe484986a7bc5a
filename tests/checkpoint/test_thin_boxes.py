"""Weights cut within segments of their columns: thousands of thin boxes, a few stored slices."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from checkpoint_cases import Heard, alone

from shoal.base.plans.tensor_shards import Box, Shard
from shoal.checkpoint.agreement.rank_pieces import view_patch
from shoal.checkpoint.format.boxes import elements, explain_untiled, merge_boxes
from shoal.checkpoint.format.listing import read_manifest
from shoal.checkpoint.load import read
from shoal.checkpoint.save import write
from shoal.checkpoint.save.background_save import BackgroundSaver

SHAPES = [((6, 12), 1, 3), ((2, 3, 12), 2, 2), ((12, 5), 0, 3), ((4, 12, 3), 1, 2), ((1, 12), 1, 3)]
"""Shape, dim that is cut, segments."""


def parts(shape: tuple[int, ...], dim: int, groups: int, degree: int) -> list[tuple[Box, ...]]:
    """Boxes of every rank, in the order in which a contiguous part stores their elements."""
    width = shape[dim] // groups // degree
    heads = [
        tuple((k, k + 1) for k in index) for index in itertools.product(*map(range, shape[:dim]))
    ]
    tail = tuple((0, n) for n in shape[dim + 1 :])
    return [
        tuple(
            (*head, ((g * degree + rank) * width, (g * degree + rank + 1) * width), *tail)
            for head in heads
            for g in range(groups)
        )
        for rank in range(degree)
    ]


def gathered(whole: torch.Tensor, slices: tuple[Box, ...]) -> torch.Tensor:
    """What a rank with these boxes stores, flat."""
    boxes = [whole[tuple(slice(*span) for span in box)] for box in slices]
    return torch.cat([box.reshape(-1) for box in boxes])


@pytest.mark.parametrize(("shape", "dim", "groups"), SHAPES)
def test_patches_show_the_same_elements_in_few_boxes(
    shape: tuple[int, ...], dim: int, groups: int
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found: list[Box] = []
    for slices in parts(shape, dim, groups, 2):
        shard = Shard("w", shape, "int64", slices)
        # Cut once more, as data ranks do, also within a row.
        for first, last in ((0, shard.elements), (0, 7), (5, shard.elements)):
            part = shard.part(first, min(last, shard.elements))
            flat = gathered(whole, part)
            for patch in merge_boxes(part):
                box = whole[tuple(slice(*span) for span in patch.box)]
                assert torch.equal(view_patch(flat, patch), box), (part, patch)
        assert len(merge_boxes(slices)) == groups
        found += [patch.box for patch in merge_boxes(slices)]
    assert explain_untiled(shape, found) is None


def test_thick_neighbours_stay_apart() -> None:
    """Another rank may hold one of them alone, as a copy: it must find the same box there."""
    slices = (((0, 2), (0, 3)), ((2, 4), (0, 3)))
    assert [patch.box for patch in merge_boxes(slices)] == list(slices)


def test_uneven_gaps_are_not_one_box() -> None:
    slices = (((0, 1), (0, 2)), ((5, 6), (0, 4)), ((1, 2), (0, 2)), ((2, 3), (0, 2)))
    found = merge_boxes(slices)
    assert sum(elements(patch.box) for patch in found) == 10
    whole = torch.arange(24).view(6, 4)
    flat = gathered(whole, slices)
    for patch in found:
        box = whole[tuple(slice(*span) for span in patch.box)]
        assert torch.equal(view_patch(flat, patch), box)


def test_few_slices_are_stored_and_come_back_in_order(tmp_path: Path) -> None:
    """Saved at once and beside training, twice over the same plan; loaded as it was held."""
    shape = (40, 24)
    halves = parts(shape, 1, 3, 2)
    saver = BackgroundSaver(alone(), Heard())
    for step in (1, 2, 3):
        whole = torch.randn(shape)
        pieces = []
        for half, slices in enumerate(halves):
            shard = Shard(f"w{half}", (40, 12), "float32", tuple(_moved(box) for box in slices))
            pieces.append(write.Piece(shard, gathered(whole, slices).view(40, 12)))
        if step == 1:
            path = write.save(tmp_path, step, pieces, {}, alone(), Heard(), keep=9).path
        else:
            saver.start(tmp_path, step, pieces, {}, keep=9)
            outcome = saver.wait()
            assert outcome is not None
            assert outcome.saved is not None
            path = outcome.saved.path
        manifest = read_manifest(path)
        assert [len(tensor.slices) for tensor in manifest.tensors.values()] == [3, 3]
        loaded = read.load(path, [piece.shard for piece in pieces])
        for piece in pieces:
            assert torch.equal(loaded[piece.shard.name].view(40, 12), piece.data)
    saver.close()


def _moved(box: Box) -> Box:
    """The same box in a tensor of the half's own columns."""
    rows, (start, stop) = box
    segment, width = start // 8, stop - start
    return rows, (segment * width, (segment + 1) * width)
