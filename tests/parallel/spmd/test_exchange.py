"""Exchanges: forward values and gradients, against the formulas, on threads that act as ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from threads import on_ranks

from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.labelling.labels import WHOLE, Split, Tiled, cut_tensor, join_parts

SPLITS = [Split(0), Split(1), Split(1, 2)]
SIZE = 2


def numbers(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def passes(function, *shape: int):
    """(value, output, gradient of the value) of every rank; upstream gradients differ by rank."""

    def work(axis):
        value = numbers(axis.rank, *shape).requires_grad_()
        out = function(value, axis)
        upstream = numbers(50 + axis.rank, *out.shape)
        out.backward(upstream)
        return value.detach(), out.detach(), upstream, value.grad

    return on_ranks(SIZE, work)


def test_enter_sums_gradients_only() -> None:
    ranks = passes(autograd_collectives.enter, 3, 4)
    total = sum(r[2] for r in ranks)
    for value, out, _, grad in ranks:
        assert torch.equal(out, value)
        torch.testing.assert_close(grad, total)


def test_enter_is_free_without_gradients() -> None:
    def work(axis):
        value = torch.ones(2)
        assert autograd_collectives.enter(value, axis) is value
        return sum(axis.counts.values())

    assert on_ranks(SIZE, work) == [0, 0]


def test_reduce_sums_values_only() -> None:
    ranks = passes(autograd_collectives.reduce, 3, 4)
    total = sum(r[0] for r in ranks)
    for value, out, upstream, grad in ranks:
        torch.testing.assert_close(out, total)
        assert torch.equal(grad, upstream)
        assert not torch.equal(value, out), "the summand itself stays as it is"


@pytest.mark.parametrize("split", SPLITS)
def test_scatter_is_reduce_then_cut(split: Split) -> None:
    ranks = passes(lambda v, axis: autograd_collectives.scatter(v, axis, split), 4, 8)
    total = sum(r[0] for r in ranks)
    whole = join_parts([r[2] for r in ranks], split)
    for rank, (_, out, _, grad) in enumerate(ranks):
        torch.testing.assert_close(out, cut_tensor(total, split, rank, SIZE))
        torch.testing.assert_close(grad, whole)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("parts", [True, False])
def test_gather(split: Split, parts: bool) -> None:
    ranks = passes(lambda v, axis: autograd_collectives.gather(v, axis, split, parts), 4, 8)
    whole = join_parts([r[0] for r in ranks], split)
    total = sum(r[2] for r in ranks)
    for rank, (_, out, upstream, grad) in enumerate(ranks):
        assert torch.equal(out, whole)
        source = total if parts else upstream
        torch.testing.assert_close(grad, cut_tensor(source, split, rank, SIZE))


def test_gather_from_ranks_that_hold_copies() -> None:
    """Two parts on four ranks: the first of two equal parts is gathered, and gets the gradient."""
    label = Tiled(((2, Split(0)), (2, WHOLE)))

    def work(axis):
        value = numbers(axis.rank // 2, 3).requires_grad_()
        autograd_collectives.gather(value, axis, label, True).backward(
            torch.ones(6, dtype=torch.float64)
        )
        return value.grad.tolist()

    assert on_ranks(4, work) == [[4] * 3, [0] * 3, [4] * 3, [0] * 3]


@pytest.mark.parametrize("split", SPLITS)
def test_part_of_a_whole_value(split: Split) -> None:
    ranks = passes(lambda v, axis: autograd_collectives.slice_own_part(v, axis, split, False), 4, 8)
    whole = join_parts([r[2] for r in ranks], split)
    for rank, (value, out, _, grad) in enumerate(ranks):
        assert torch.equal(out, cut_tensor(value, split, rank, SIZE))
        assert torch.equal(grad, whole)
    ranks = passes(lambda v, axis: autograd_collectives.slice_own_part(v, axis, split, True), 4, 8)
    torch.testing.assert_close(sum(r[3] for r in ranks), join_parts([r[2] for r in ranks], split))


def test_a_bias_is_added_by_rank_0_alone() -> None:
    ranks = passes(autograd_collectives.keep_on_first_rank, 5)
    assert torch.equal(ranks[0][1], ranks[0][0])
    assert torch.equal(ranks[0][3], ranks[0][2])
    assert not ranks[1][1].any()
    assert not ranks[1][3].any()


@pytest.mark.parametrize(
    ("label", "degree"),
    [(Split(1), 2), (Split(0, 2), 2), (Tiled(((2, Split(0)), (2, Split(2)))), 4)],
)
@pytest.mark.parametrize("strided", [False, True])
def test_dropout_keeps_its_part_of_the_mask_of_one_process(
    label, degree: int, strided: bool
) -> None:
    """Also for a tensor that lies transposed in memory, where torch draws in another order."""
    shape = (4, 6, 8)
    value = numbers(0, 6, 4, 8).transpose(0, 1) if strided else numbers(0, *shape)
    torch.manual_seed(9)
    expected = F.dropout(value, 0.4)
    order = (1, 0, 2) if strided else (0, 1, 2)
    torch.manual_seed(9)
    parts = on_ranks(
        degree,
        lambda axis: autograd_collectives.dropout(
            cut_tensor(value, label, axis.rank, axis.size),
            axis,
            labels=(label,),
            probability=0.4,
            order=order,
        ),
    )
    assert torch.equal(join_parts(parts, label), expected)


def test_a_buffer_is_complete_after_every_rank_wrote_its_part() -> None:
    def work(axis):
        buffer = torch.zeros(6)
        own = buffer[3 * axis.rank : 3 * axis.rank + 3]
        own += axis.rank + 1
        autograd_collectives.gather_buffer(own, axis, buffer, Split(0))
        return buffer

    for buffer in on_ranks(SIZE, work):
        assert buffer.tolist() == [1, 1, 1, 2, 2, 2]


def test_whole_shapes() -> None:
    assert autograd_collectives.compute_whole_shape((3, 4), Split(1), 2) == [3, 8]
    assert autograd_collectives.compute_whole_shape((3, 4), WHOLE, 2) == [3, 4]
    tiled = Tiled(((2, Split(0)), (2, WHOLE)))
    assert autograd_collectives.compute_whole_shape((3, 4), tiled, 4) == [6, 4]
