"""Experts that are a list of modules: the model calls each with its rows, on whichever rank it is.

The code around the list is the user's own. It chooses rows, calls the experts in the order of their
list (all, or those that received rows), and adds up the results. A call is one exchange for one
expert: every rank's rows go to the rank that holds the expert, and its results go back.

Protocol  per expert: how many rows come from each rank · rows · results
          a rank that does not call an expert joins with no rows: before its next call of a later
          one, and after the layer's last. So ranks need not call the same experts
          a rank without a micro-batch of its own runs another's with weight 0: its rows travel, and
          an expert without other rows gets no gradient, as in one process without such a call
Backward  autograd is free to choose an order where none follows from values, and ranks must not
          differ: an empty tensor runs through all exchanges of a call, from each to the next, and
          into the layer's result. Backward they run from the last to the first
Cost      three exchanges per expert, where experts in a stack need three per layer
          (`token_routing.py`)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.base.errors import PlanError
from shoal.fabric import World
from shoal.fabric.exchanges.all_to_all import all_to_all_rows
from shoal.parallel._torch import pytree
from shoal.parallel.expert_parallel.expert_load import ExpertLoads
from shoal.parallel.expert_parallel.token_routing import EXPERT_AXIS
from shoal.trace.find.listed_experts import ListedExperts
from shoal.trace.isolation.replaced_forward import ReplacedForward, restore_all

NOT_CALLED = -1
"""Sent instead of a number of rows: the rank only joins the exchange."""

WEIGHTLESS = -2
"""WEIGHTLESS - n stands for n rows of a pass with weight 0."""


def encode_rows(rows: int, *, called: bool, weighs: bool) -> int:
    """Return the number that a rank sends to the others for its call of an expert.

    Args:
        rows: the number of rows it sends.
        called: whether the model's code called the expert; if not, the rank only joins.
        weighs: whether the pass counts.

    >>> [encode_rows(3, called=True, weighs=weighs) for weighs in (True, False)]
    [3, -5]
    >>> [decode_rows(number) for number in (3, -5, NOT_CALLED)]
    [3, 3, 0]
    """
    if not called:
        return NOT_CALLED
    return rows if weighs else WEIGHTLESS - rows


def decode_rows(number: int) -> int:
    """Return the number of rows that follow a number of `encode_rows`."""
    return number if number >= 0 else max(WEIGHTLESS - number, 0)


class ListedForward(ReplacedForward):
    """Replaced forward of a layer with listed experts: opens and closes a call's exchanges."""

    calls_experts = True

    def __init__(self, layer: ListedExperts, axis: World, loads: ExpertLoads) -> None:
        self.axis, self.loads = axis, loads
        self.each, self.width = layer.experts // axis.size, layer.sample.shape[1]
        super().__init__(layer.name, layer.part)
        self.entries = [
            _ListedExpert(name, entry, place, self)
            for place, (name, entry) in enumerate(zip(layer.names, layer.entries, strict=True))
        ]
        self.now: _CallExchanges | None = None

    # A graph break of a compiled block: the exchanged sizes depend on the data.
    @torch.compiler.disable
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the results of the layer's own forward, with all experts."""
        leaves = pytree.tree_leaves((inputs, named))
        like = next(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())
        before, self.now = self.now, _CallExchanges(self, like)
        try:
            outputs = self.forward(*inputs, **named)
            last, counts = self.now.close()
        finally:
            self.now = before
        self.loads.add_counts(self.name, torch.tensor([*counts, 0], device=like.device))
        flat, structure = pytree.tree_flatten(outputs)
        places = [k for k, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad]
        if places and last.requires_grad:
            flat[places[0]] = _ChainEnd.apply(flat[places[0]], last)
        return pytree.tree_unflatten(flat, structure)

    def restore(self) -> None:
        """Restore the original forwards of the layer and its experts."""
        restore_all(self.entries)
        super().restore()


class _ListedExpert(ReplacedForward):
    """Expert of the list, on this rank or another."""

    def __init__(self, name: str, block: Any, place: int, home: ListedForward) -> None:
        self.place, self.home = place, home
        super().__init__(name, block)

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows [n, d] to [n, d']."""
        if self.home.now is None:
            raise PlanError(
                f"layout.ep = {self.home.axis.size}: {self.name} is called outside of the forward "
                f"pass of {self.home.name}; try: layout.ep=1"
            )
        return self.home.now.call(self.place, rows)


class _CallExchanges:
    """Exchanges of one call of the layer.

    Args:
        like: the layer's input, which sets dtype and device of rows that a rank does not have.
    """

    def __init__(self, home: ListedForward, like: Tensor) -> None:
        self.home, self.axis, self.like = home, home.axis, like
        self.chain = like.new_zeros(0).requires_grad_(torch.is_grad_enabled())
        self.counts: list[int] = []
        self.none = like.new_zeros(0, home.width)

    def call(self, place: int, rows: Tensor) -> Tensor:
        """Return an expert's results for rows of this rank."""
        if place < len(self.counts):
            raise PlanError(
                f"layout.ep = {self.axis.size}: {self.home.name} calls expert {place} after expert "
                f"{len(self.counts) - 1}: ranks can only exchange rows in the order of the list; "
                f"try: a loop in that order, or layout.ep=1"
            )
        if rows.dim() != 2 or rows.shape[1] != self.home.width or rows.dtype != self.none.dtype:
            raise PlanError(
                f"layout.ep = {self.axis.size}: {self.home.entries[place].name} is called with "
                f"{list(rows.shape)} of {rows.dtype}, not with rows of {self.home.width} numbers "
                f"in the format of its layer's input ({self.none.dtype}); try: layout.ep=1"
            )
        self._skip_to(place)
        return self._exchange(place, rows)

    def close(self) -> tuple[Tensor, list[int]]:
        """Join the remaining exchanges; return the end of the chain, and rows by expert."""
        self._skip_to(len(self.home.entries))
        return self.chain, self.counts

    def _skip_to(self, place: int) -> None:
        while len(self.counts) < place:
            self._exchange(len(self.counts), self.none, called=False)

    def _exchange(self, place: int, rows: Tensor, *, called: bool = True) -> Tensor:
        self.counts.append(len(rows))
        axis, owner = self.axis, place // self.home.each
        number = encode_rows(len(rows), called=called, weighs=not self.home.loads.joining)
        told = axis.all_gather(torch.tensor([number], device=rows.device)).flatten().tolist()
        sent = [len(rows) * (rank == owner) for rank in range(axis.size)]
        received = [decode_rows(n) * (axis.rank == owner) for n in told]
        came, self.chain = _RowExchange.apply(rows, self.chain, axis, sent, received)
        if axis.rank == owner and any(n != NOT_CALLED for n in told):
            # An expert called without rows has a zero gradient; only weightless calls: none.
            with torch.set_grad_enabled(torch.is_grad_enabled() and max(told) > NOT_CALLED):
                results = self.home.entries[place].forward(came)
        else:  # no rows, with the width and dtype of the experts' results
            alike = self.home.entries[axis.rank * self.home.each].forward
            with torch.no_grad():
                results = alike(came[:0])
        home: Tensor
        home, self.chain = _RowExchange.apply(results, self.chain, axis, received, sent)
        return home


class _RowExchange(torch.autograd.Function):
    """Exchange of rows; backward: the reverse exchange, after those that follow in the chain."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, chain: Tensor, axis: World, sent: list[int], received: list[int]
    ) -> tuple[Tensor, Tensor]:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return all_to_all_rows(axis, rows, sent, received, EXPERT_AXIS), chain.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, chain: Tensor) -> tuple[Tensor | None, ...]:
        back = all_to_all_rows(ctx.axis, gradient.contiguous(), ctx.received, ctx.sent, EXPERT_AXIS)
        return back, chain, None, None, None


class _ChainEnd(torch.autograd.Function):
    """Result of the layer, tied to the end of the chain."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, chain: Tensor) -> Tensor:
        ctx.save_for_backward(chain)  # saved last, so that recomputation runs through to here
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        (chain,) = ctx.saved_tensors
        return upstream, torch.zeros_like(chain)
