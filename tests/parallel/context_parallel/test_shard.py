"""Tokens dealt to ranks, between layers: what is done on the parts, and whose gradients add up."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from context_threads import in_a_ring
from torch import nn

from shoal.models.loss import Unprojected, token_loss
from shoal.parallel.context_parallel.sharded_forward import ContextEmbedding
from shoal.parallel.context_parallel.token_shard import ContextShard, wrap_tokens
from shoal.parallel.spmd.autograd_collectives import count_gradient_once
from shoal.parallel.spmd.sequence_shards import ShardSpec, cut_whole, gather_if_shard

TOKENS, DIM = 6, 4


def hidden() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, TOKENS, DIM, generator=generator, dtype=torch.float64)


def own(axis, whole: torch.Tensor) -> torch.Tensor:
    deal = ShardSpec.split_evenly(axis, 1, whole.shape[1], summands=True)
    return deal.part(whole).clone().requires_grad_()


BIAS = torch.linspace(-1, 1, DIM, dtype=torch.float64)
PLACES = torch.linspace(0, 1, TOKENS * DIM, dtype=torch.float64).view(TOKENS, DIM)
ON_PARTS = {
    "add a number": lambda h: h + 2,
    "subtract from a number": lambda h: 2 - h,
    "add a vector": lambda h: h + BIAS,
    "add a table of positions": lambda h: h + PLACES,
    "add a table first": lambda h: PLACES + h,
    "itself": lambda h: h * h + h,
    "activation": lambda h: F.gelu(h).tanh(),
    "format": lambda h: h.float().to(torch.float64).contiguous(),
    "other dims": lambda h: h[:, :, 1:3],
    "all tokens": lambda h: h[:, slice(0, None)],
    "no dropout": lambda h: F.dropout(h, 0.5, training=False),
    "dropout": lambda h: F.dropout(h, 0.5),
}
ON_THE_WHOLE = {
    "some tokens": lambda h: h[:, :3],
    "a token": lambda h: h[:, 0],
    "mean": lambda h: h.mean(1),
    "product": lambda h: h.transpose(1, 2) @ h,
    "in place": lambda h: (h * 1).add_(1),
}


def passed(work, value) -> tuple[torch.Tensor, float]:
    torch.manual_seed(4)
    out = work(value)
    whole = gather_if_shard(out)
    return out, (whole * torch.linspace(1, 2, whole.numel()).view(whole.shape)).sum()


@pytest.mark.parametrize("name", [*ON_PARTS, *ON_THE_WHOLE])
def test_it_means_what_it_means_on_the_whole(name: str) -> None:
    work = {**ON_PARTS, **ON_THE_WHOLE}[name]
    whole = hidden().requires_grad_()
    _, total = passed(work, whole)
    total.backward()

    def rank(axis):
        local = own(axis, hidden())
        out, total = passed(work, wrap_tokens(local, axis, 1, TOKENS))
        (total * (axis.rank == 0)).backward()
        gathered = axis.counts["all_gather"] - (name in ON_PARTS)  # `gather_if_shard` of the result
        return isinstance(out, ContextShard), float(total), local.grad, gathered

    told = in_a_ring(2, rank)
    for is_shard, seen, _, gathered in told:
        assert seen == pytest.approx(float(total), rel=1e-14)
        if name in ON_PARTS:
            assert is_shard
            assert gathered == 0
    gradient = torch.cat([one[2] for one in told], 1)
    assert torch.allclose(gradient, whole.grad, rtol=1e-13, atol=1e-15)


def test_a_weight_used_everywhere_has_summands_of_its_gradient() -> None:
    """In the lookup, on parts, on the whole, and by the loss: the ranks' gradients add up."""
    ids = torch.tensor([[1, 3, 0, 2, 4, 1]])
    targets = torch.tensor([[3, 0, -100, 4, 1, 1]])
    start = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def total(table: nn.Embedding, once_more) -> torch.Tensor:
        h = table(ids) * table.weight.mean(0)
        seen = h[:, 0] @ table.weight.T
        loss, count = token_loss(Unprojected(h, table.weight), targets)
        assert int(count) == 5
        return loss + seen.sum() + once_more(table.weight).square().sum()

    def table() -> nn.Embedding:
        made = nn.Embedding(5, DIM, dtype=torch.float64)
        made.weight.data.copy_(start)
        return made

    alone = table()
    right = total(alone, lambda w: w)
    right.backward()

    def rank(axis):
        mine = table()
        ContextEmbedding("table", mine, axis)
        loss = total(mine, lambda w: w)
        (loss * (axis.rank == 0)).backward()
        return float(loss), mine.weight.grad

    told = in_a_ring(3, rank)
    assert [seen for seen, _ in told] == pytest.approx([float(right)] * 3, rel=1e-14)
    assert torch.allclose(sum(g for _, g in told), alone.weight.grad, rtol=1e-13)


def test_once_makes_a_whole_gradient_a_summand() -> None:
    def rank(axis):
        value = torch.ones(3, requires_grad=True)
        (count_gradient_once(value, axis) * 2).sum().backward()
        return value.grad.tolist()

    assert in_a_ring(2, rank) == [[2.0] * 3, [0.0] * 3]


def test_a_cut_whole_gets_zeros_around_its_part() -> None:
    def rank(axis):
        whole = torch.ones(1, 5, 1, requires_grad=True)
        cut_whole(whole, ShardSpec.split_evenly(axis, 1, 5, summands=True)).sum().backward()
        return whole.grad.flatten().tolist()

    assert in_a_ring(2, rank) == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]


def test_a_wrong_target_is_an_error_on_every_rank() -> None:
    def rank(axis):
        shard = wrap_tokens(own(axis, hidden()), axis, 1, TOKENS)
        targets = torch.zeros(2, TOKENS, dtype=torch.long)
        targets[0, 0] = 99
        try:
            token_loss(shard, targets)
        except Exception as error:
            return str(error)
        return ""

    assert all("targets hold 99" in text for text in in_a_ring(2, rank))
