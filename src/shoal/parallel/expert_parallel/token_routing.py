"""Sends tokens to the ranks that hold their experts, and what these make of them back home.

    route       places (token, choice) sorted by expert, hence by rank; how many go to each rank and
                how many come, by one exchange of counts
    dispatch    rows travel to their experts   backward: gradients of rows travel back
    return      results travel home            backward: gradients of results travel to the experts
    combine     weighted and added up at home, where the weights and their gradients stay

A rank waits for its device once per call, to know how many rows come. Choices beyond the last
expert are nobody's: they do not travel, and give nothing.

Source: Lepikhin et al. 2020 (2006.16668), GShard; without capacities: Gale et al. 2022 (2211.15841)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.fabric import World
from shoal.fabric.exchanges.all_to_all import counts_for, to_each


@dataclass(frozen=True)
class Route:
    """The way of one micro-batch's places.

    Attributes:
        counts: [experts + 1], places of each expert, and of none, at home.
        order: [places that travel], numbers of places by expert.
        sent, received: rows to and from every rank of the axis.
        whose: [rows received], which of this rank's own experts each is for.
    """

    counts: Tensor
    order: Tensor
    sent: list[int]
    received: list[int]
    whose: Tensor


def find_route(chosen: Tensor, experts: int, axis: World) -> Route:
    """Where the places of `chosen` [tokens, top_k] go, and what comes here."""
    places = chosen.flatten().long()
    counts = torch.zeros(experts + 1, dtype=torch.long, device=places.device)
    counts = counts.scatter_add(0, places, torch.ones_like(places))
    going = counts[:experts].view(axis.size, experts // axis.size)
    coming = counts_for(axis, going)
    sent, received = torch.stack([going.sum(1), coming.sum(1)]).tolist()  # waits for the device
    own = torch.arange(coming.shape[1], device=places.device).repeat(axis.size)
    return Route(
        counts=counts,
        order=places.argsort(stable=True)[: sum(sent)],
        sent=sent,
        received=received,
        whose=own.repeat_interleave(coming.flatten(), output_size=sum(received)),
    )


def dispatch(tokens: Tensor, route: Route, top_k: int, axis: World) -> Tensor:
    """The rows that this rank's experts get: [sum of received, d]."""
    rows = tokens.index_select(0, route.order // top_k)
    return exchange(rows, axis, route.sent, route.received)


def combine(results: Tensor, weights: Tensor, route: Route, axis: World) -> Tensor:
    """Results of this rank's experts to their tokens' homes, weighted and added up there.

    Args:
        results: [sum of received, d'].
        weights: [tokens, top_k] · gives [tokens, d'].
    """
    home = exchange(results, axis, route.received, route.sent)
    placed = home.new_zeros(weights.numel(), home.shape[1]).index_copy(0, route.order, home)
    return (placed.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def exchange(rows: Tensor, axis: World, sent: list[int], received: list[int]) -> Tensor:
    """`to_each`, whose gradients travel back the same way."""
    out: Tensor = _Exchange.apply(rows, axis, sent, received)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, axis: World, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return to_each(axis, rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return to_each(ctx.axis, gradient, ctx.received, ctx.sent), None, None, None
