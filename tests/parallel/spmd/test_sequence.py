"""Parts of a sequence that look whole: right whatever is done with them, free where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from threads import ThreadAxis, on_ranks
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shoal.base.errors import PlanError
from shoal.models.norm import RMSNorm
from shoal.parallel.spmd.sequence_shards import (
    SequenceShard,
    ShardSpec,
    compute_even_cuts,
    wrap_shard,
)

SEQ, DIM = 7, 4  # 7 divides by nothing


def norm(h: Tensor) -> Tensor:
    """Our norm is an autograd function of its own: it meets the wrapper itself."""
    made: Tensor = RMSNorm(DIM, 1e-5).double()(h)
    return made


def changed_in_place(h: Tensor) -> Tensor:
    h = h.clone() if not isinstance(h, SequenceShard) else h
    h.mul_(1.5)
    return norm(h)


def changed_through_a_view(h: Tensor) -> Tensor:
    h = h.clone() if not isinstance(h, SequenceShard) else h
    first = h[:, 0]
    first.zero_()
    return norm(h + 1)


def added_to(h: Tensor) -> Tensor:
    h = h * 1 if not isinstance(h, SequenceShard) else h
    h += 1
    return h.tanh()


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda h: 2 * h + h * h,
    "own autograd function": norm,
    "in place": changed_in_place,
    "through a view": changed_through_a_view,
    "augmented assignment": added_to,
    "list of tensors": lambda h: torch.cat([h, h.flip(1)], 2)[..., :DIM].tanh(),
    "recomputed": lambda h: checkpoint(norm, h, use_reentrant=False),
    "nothing dropped": lambda h: F.dropout(h, 0.0, True).sin(),
    "another dim": lambda h: h.transpose(1, 2).softmax(-1).transpose(1, 2),
}


def loss(h: Tensor) -> Tensor:
    return (h * torch.arange(h.numel(), dtype=h.dtype).view(h.shape)).cos().sum()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("use", USES)
def test_numbers_and_gradients_are_those_of_the_whole(use: str, size: int) -> None:
    start = torch.randn(2, SEQ, DIM, dtype=torch.float64)
    whole = start.clone().requires_grad_()
    expected = loss(USES[use](whole.tanh()))
    expected.backward()

    def work(axis: ThreadAxis) -> tuple[float, float]:
        deal = ShardSpec.split_evenly(axis, 1, SEQ)
        part = deal.part(start).requires_grad_()
        got = loss(USES[use](wrap_shard(part.tanh(), deal)))
        got.backward()
        return float((got - expected).detach().abs()), float(
            (part.grad - deal.part(whole.grad)).abs().max()
        )

    for number, gradient in on_ranks(size, work):
        assert number <= 1e-12
        assert gradient <= 1e-12


def test_what_needs_no_numbers_is_free() -> None:
    def work(axis: ThreadAxis) -> Any:
        h = wrap_shard(
            torch.ones(2, 4, DIM, requires_grad=True) * 1, ShardSpec.split_evenly(axis, 1, 8)
        )
        seen = []
        h.register_hook(seen.append)
        told = [h.shape, h.size(1), h.dim(), len(h), h.dtype, h.device, h.requires_grad, repr(h)]
        again = pytree.tree_map(lambda t: t * 2, {"h": h})["h"]  # as recompute and FSDP look at it
        again.local.sum().backward()
        assert isinstance(again, SequenceShard)
        assert again.shape == h.shape
        assert seen[0].shape == (2, 4, DIM)
        assert F.dropout(h, 0.5, False) is h
        assert not axis.counts, "something was gathered"
        return told

    for rank, told in enumerate(on_ranks(2, work)):
        assert told[:4] == [(2, 8, DIM), 8, 3, 2]
        assert told[6]
        assert told[7] == f"SequenceShard([2, 8, 4], here {4 * rank} … {4 * rank + 3} of dim 1)"


def test_the_whole_is_gathered_once() -> None:
    def work(axis: ThreadAxis) -> int:
        h = wrap_shard(torch.ones(2, 4, DIM), ShardSpec.split_evenly(axis, 1, 8))
        (h + 1).sum()
        (h * 2).sum()
        return axis.counts["all_gather"]

    assert on_ranks(2, work) == [1, 1]


def test_a_change_through_a_view_that_autograd_cannot_see_is_refused() -> None:
    def work(axis: ThreadAxis) -> None:
        h = wrap_shard(
            torch.ones(2, 4, DIM, requires_grad=True) * 1, ShardSpec.split_evenly(axis, 1, 8)
        )
        h[:, 0].zero_()
        with torch.no_grad():
            h.sum()

    with pytest.raises(PlanError, match=r"changed through a view .* write h = h.clone\(\) before"):
        on_ranks(2, work)


def test_cuts_are_as_equal_as_it_goes() -> None:
    assert compute_even_cuts(7, 4) == (0, 2, 4, 6, 7)
    assert compute_even_cuts(8, 2) == (0, 4, 8)
