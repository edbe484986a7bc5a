"""Route tokens to the ranks that hold their experts, and route the results back.

    route       places (token, choice) sorted by expert, hence by rank; how many go to each rank and
                how many come, by one exchange of counts
    dispatch    rows travel to their experts   backward: gradients of rows travel back
    return      results travel home            backward: gradients of results travel to the experts
    combine     weighted and added up at home, where the weights and their gradients stay

A rank waits for its device once per call, to know how many rows come. Choices beyond the last
expert belong to no expert: they do not travel, and contribute 0.

Source: Lepikhin et al. 2020 (2006.16668), GShard; without capacities: Gale et al. 2022 (2211.15841)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.fabric import World
from shoal.fabric.exchanges.all_to_all import all_to_all_rows, exchange_counts

EXPERT_AXIS = "ep"
"""Axis under which the traffic of tokens is counted; its ranks differ along dp axes too."""


@dataclass(frozen=True)
class TokenRoute:
    """Route of one micro-batch's (token, choice) pairs to the ranks of their experts.

    Attributes:
        counts: [experts + 1], places of each expert, and of none, on the tokens' rank.
        order: [places that travel], indices of places by expert.
        sent, received: rows to and from every rank of the axis.
        whose: [rows received], index of each row's expert among this rank's own.
    """

    counts: Tensor
    order: Tensor
    sent: list[int]
    received: list[int]
    whose: Tensor


def plan_route(chosen: Tensor, experts: int, axis: World) -> TokenRoute:
    """Plan to which ranks the pairs of `chosen` [tokens, top_k] go, and which rows arrive."""
    places = chosen.flatten().long()
    counts = torch.zeros(experts + 1, dtype=torch.long, device=places.device)
    counts = counts.scatter_add(0, places, torch.ones_like(places))
    going = counts[:experts].view(axis.size, experts // axis.size)
    coming = exchange_counts(axis, going, EXPERT_AXIS)
    sent, received = torch.stack([going.sum(1), coming.sum(1)]).tolist()  # waits for the device
    own = torch.arange(coming.shape[1], device=places.device).repeat(axis.size)
    return TokenRoute(
        counts=counts,
        order=places.argsort(stable=True)[: sum(sent)],
        sent=sent,
        received=received,
        whose=own.repeat_interleave(coming.flatten(), output_size=sum(received)),
    )


def dispatch(tokens: Tensor, route: TokenRoute, top_k: int, axis: World) -> Tensor:
    """Send rows to their experts; return the rows of this rank's experts: [sum of received, d]."""
    rows = tokens.index_select(0, route.order // top_k)
    return exchange_rows(rows, axis, route.sent, route.received)


def combine(results: Tensor, weights: Tensor, route: TokenRoute, axis: World) -> Tensor:
    """Send results back to their tokens' ranks; weight and sum them there.

    Args:
        results: [sum of received, d'].
        weights: [tokens, top_k].

    Returns:
        [tokens, d'].
    """
    home = exchange_rows(results, axis, route.received, route.sent)
    placed = home.new_zeros(weights.numel(), home.shape[1]).index_copy(0, route.order, home)
    return (placed.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def exchange_rows(rows: Tensor, axis: World, sent: list[int], received: list[int]) -> Tensor:
    """Run `all_to_all_rows` differentiably; gradients travel back the same way."""
    return _Exchange.apply(rows, axis, sent, received)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, axis: World, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return all_to_all_rows(axis, rows, sent, received, EXPERT_AXIS)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return (
            all_to_all_rows(ctx.axis, gradient, ctx.received, ctx.sent, EXPERT_AXIS),
            None,
            None,
            None,
        )
