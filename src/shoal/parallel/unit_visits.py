"""Let ranks skip units of `fully_shard`: each rank joins the collectives of what it skips.

`fully_shard` gathers a unit when a rank runs it, and the k-th gather of a rank meets the k-th of
the others. Ranks that run different units (a head per task, LayerDrop, images on some ranks, early
exit) would pair wrong gathers. Here all ranks follow one list of unit visits:

    rank 0 runs    trunk.0  trunk.1           heads.a
    rank 1 runs    trunk.0           trunk.2           heads.b
    the list       trunk.0  trunk.1  trunk.2  heads.a  heads.b
                   each rank joins the visits that it skips before the next unit that it runs, and
                   the rest when the model's forward pass ends

A joined visit gathers and reshards the unit, and computes nothing. Its backward pass is a node of
autograd on a side chain that ends in the model's outputs. Autograd runs nodes in the reverse order
of their creation, so the node runs exactly where the unit's backward pass runs on another rank: it
gathers there, prefetches as torch does, and reduces zeros. No parameter is part of that node, so a
joined unit does not count as used.

    the first step      ranks learn the list, in two passes at least. It starts as the order of the
                        record, then of registration. At its end all ranks send the unit that they
                        still want, in one small message, until none wants more
    later steps         no message. A unit that goes back in the list is refused before its gather
    an unused unit      a rank may run a unit that its loss does not use. So nodes begin and end the
                        backward pass of units that ran, too, wherever torch's hooks did not
    inputs without a    torch then reduces a unit's gradients at the end of the backward pass, not
    gradient            in its place. Ranks agree on one of both for each visit
    recomputation       a unit that runs inside of a backward pass is no visit

From then on ranks that skip nothing make the calls of `fully_shard`, and no other.

Limits: units do not nest (ep), no pipeline (a stage refuses skipped blocks). Reentrant checkpoints
        and `torch.autograd.grad` by inputs over skipped units are not supported; `unit_log.py`
        finds both.
Source: pytorch#75373 and #152964, which leave this to users
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.fabric import World
from shoal.fabric.axis_worlds import axis_world
from shoal.parallel._torch import (
    end_unit_backward,
    join_unit_forward,
    keep_version,
    pytree,
    start_unit_backward,
)
from shoal.parallel.program import Program
from shoal.parallel.unit_log import NO_UNIT, UnitSequence


@dataclass
class PlannedVisit:
    """An entry of the list that all ranks follow.

    Attributes:
        unit: number of the unit.
        grad_in, grad_out: whether its inputs and its outputs carry gradients on some rank; None: no
            rank has run it in a pass with gradients.
        ran: some rank has run it; else all ranks joined.
    """

    unit: int
    grad_in: bool | None = None
    grad_out: bool | None = None
    ran: bool = False


@dataclass
class Visit:
    """A unit in one pass of this rank.

    Attributes:
        planned: its entry of the list.
        shard: the unit.
        ran: this rank runs the unit; False: it joins.
        grad_in, grad_out: whether its inputs and outputs carry gradients on this rank.
    """

    planned: PlannedVisit
    shard: Any
    ran: bool = False
    grad_in: bool = False
    grad_out: bool = False

    def start_backward(self, gradient: torch.Tensor) -> None:
        """Gather the unit for its backward pass, unless torch's hook does it on no rank."""
        if self.planned.grad_out is not False:
            start_unit_backward(self.shard, gradient)

    def end_backward(self) -> bool:
        """Reduce the unit's gradients, unless torch's hook has done so, or does it nowhere.

        Returns:
            Whether it was due here, so that this rank's backward pass did without the unit.
        """
        return self.planned.grad_in is not False and end_unit_backward(self.shard)


class UnitVisits(UnitSequence):
    """The list of unit visits of a model, which all ranks follow.

    Attributes:
        order: the list.
        learning: the first step is not over, so the list may grow.
        varied: ranks differ in the units that they run or whose outputs their loss uses.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        recorded: Sequence[str],
        group: World,
        shard_group: World,
        strategy: str,
    ) -> None:
        """Start with the recorded order; units that the record lacks follow their predecessor.

        Args:
            units: by name, in the order of registration; none lies inside of another one.
            recorded: names of modules by their first call in a recorded forward pass; () without.
            group: ranks that sum gradients of these units.
            shard_group: ranks of it that gather from each other.
            strategy: of the layout, for messages.
        """
        self.names, self.shards = list(units), list(units.values())
        self.group, self.shard_group, self.strategy = group, shard_group, strategy
        self.order = [PlannedVisit(unit) for unit in _first_order(self.names, recorded)]
        self.learning, self.varied, self.passes = True, False, 0
        super().__init__()
        self.current: list[PlannedVisit] = []
        self.position = 0
        self.visits: list[Visit] = []
        self.token: torch.Tensor | None = None

    def finish_step(self) -> None:
        """End the learning of the list after a step, if two passes with gradients are over."""
        if self.learning and self.passes > 1:
            self.learning = False
            if not self.varied:
                self.expected = [*(planned.unit for planned in self.order), NO_UNIT]

    # ---- hooks of a pass off the fast path

    def start_pass(self) -> None:
        """Start at the begin of the list."""
        self.current, self.position, self.visits, self.token = list(self.order), 0, [], None

    def _disable_fast_path(self) -> None:
        """Follow the list one by one from here on, for the rest of the run."""
        if self.expected[0] != NO_UNIT:
            self.start_pass()
            self.position, self.varied = self.at, True
            self.expected, self.at = [NO_UNIT], 0

    def enter_unit(self, unit: int, inputs: Any) -> None:
        """Join the visits before this unit's, then note that this rank runs it."""
        self._disable_fast_path()
        while (found := self._find_next(unit)) is None:
            if self.learning:
                self._negotiate(unit)
            elif self.has_gradients:
                raise PlanError(self._refusal(unit))
            else:  # without gradients nothing follows the pass, so it may start again
                self._join_until(len(self.current))
                self.position = 0
        self._join_until(found)
        planned = self.current[found]
        visit = Visit(planned, self.shards[unit], True, _carries_gradients(inputs))
        self.position = found + 1
        self.visits.append(visit)
        if self.has_gradients:
            self._add_node(_EndBackward, visit)

    def exit_unit(self, outputs: Any) -> None:
        """Note whether the unit's outputs carry gradients."""
        if self.visits:
            self.visits[-1].grad_out = _carries_gradients(outputs)
            if self.has_gradients:
                self._add_node(_StartBackward, self.visits[-1])

    def end_pass(self, outputs: Any) -> Any:
        """Join what this rank skipped at the end; return outputs that lead back to the chain."""
        self._disable_fast_path()
        while self.position < len(self.current) or (self.learning and self._negotiate(NO_UNIT)):
            self._join_until(len(self.current))
        chain, self.token = self.token, None
        self.visits = []
        return outputs if chain is None else self._lead_back(outputs, chain)

    def _find_next(self, unit: int) -> int | None:
        ahead = range(self.position, len(self.current))
        return next((one for one in ahead if self.current[one].unit == unit), None)

    def _join_until(self, end: int) -> None:
        """Join the collectives of all visits of the list from here to `end`."""
        for planned in self.current[self.position : end]:
            visit = Visit(planned, self.shards[planned.unit])
            join_unit_forward(visit.shard)
            self.visits.append(visit)
            if self.has_gradients:
                self._add_node(_EndBackward, visit)
                self._add_node(_StartBackward, visit)
        self.position = max(self.position, end)

    def _add_node(self, node: type[torch.autograd.Function], visit: Visit) -> None:
        """Append the end or the begin of a visit's backward pass to the chain."""
        with torch.enable_grad():
            if self.token is None:
                self.token = torch.zeros((), device=self.group.device, requires_grad=True)
            self.token = node.apply(self.token, visit, self)

    def _lead_back(self, outputs: Any, chain: torch.Tensor) -> Any:
        """Return the outputs, whose backward pass runs the chain too; leaves and views are copied.

        Raises:
            PlanError: no output can carry a gradient.
        """
        leaves, form = pytree.tree_flatten(outputs)
        numbers = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
        followed = [index for index in numbers if leaves[index].requires_grad] or numbers
        if not followed:
            raise PlanError(
                f"layout.strategy = {self.strategy}: this rank skips blocks, and the model returns "
                f"no tensor of real numbers from which its part of the backward pass could start; "
                f"try: layout.strategy=zero2"
            )
        for index in followed:
            leaf = leaves[index]
            if leaf.is_leaf or leaf._is_view():
                leaves[index] = leaf.clone()
        _follow_chain(chain, [leaves[index] for index in followed])
        return pytree.tree_unflatten(leaves, form)

    # ---- learning

    def _negotiate(self, unit: int) -> bool:
        """Send the unit that this rank wants next, and append what the ranks want to the list.

        Args:
            unit: NO_UNIT at the end of this rank's pass.

        Returns:
            Whether a rank wants one. If none does, the pass is over; the list is learnt from it.
        """
        self._join_until(len(self.current))
        group = self.group if self.has_gradients else self.shard_group
        visits = [[one.ran, one.grad_in, one.grad_out] for one in self.visits]
        messages = group.gather_json([unit, self.varied, visits])
        self.varied = any(varied for _, varied, _ in messages)
        wanted = {want for want, *_ in messages} - {NO_UNIT}
        if not wanted:
            self._learn([by_rank for *_, by_rank in messages])
            return False
        self.current += [PlannedVisit(one) for one in sorted(wanted)]
        return True

    def _learn(self, messages: Sequence[Sequence[Sequence[bool]]]) -> None:
        """Learn the list from a pass: what ran, with which gradients, without needless visits.

        Args:
            messages: by rank and visit: whether it ran, whether inputs and outputs carry gradients.
        """
        if not self.has_gradients and self.shard_group.size < self.group.size:
            return  # replicas may evaluate otherwise
        self.passes += self.has_gradients
        by_visit = list(zip(*messages, strict=True))
        for planned, by_rank in zip(self.current, by_visit, strict=True):
            ran = [one for one in by_rank if one[0]]
            planned.ran |= bool(ran)
            if ran and self.has_gradients:
                planned.grad_in = bool(planned.grad_in) | any(grad_in for _, grad_in, _ in ran)
                planned.grad_out = bool(planned.grad_out) | any(grad_out for *_, grad_out in ran)
        later = {planned.unit for planned in self.current if planned.ran}
        kept = []
        for planned, by_rank in zip(self.current, by_visit, strict=True):
            if planned.ran or planned.unit not in later:
                kept.append(planned)
                self.varied |= not by_rank[0][0] or any(one != by_rank[0] for one in by_rank)
            else:  # joined by all, and run later in the pass: nothing follows in the backward pass
                planned.grad_in = planned.grad_out = False
        self.order = kept

    def _refusal(self, unit: int) -> str:
        before = self.names[self.current[self.position - 1].unit]
        return (
            f"layout.strategy = {self.strategy}: {self.names[unit]} runs after {before}, where no "
            f"pass of the first step ran it, and ranks gather blocks in the order of that step; "
            f"try: parallelize(sample=…) with a batch that runs both, or "
            f"layout.strategy=zero2"
        )


def make_unit_visits(program: Program, units: Mapping[str, nn.Module]) -> UnitVisits | None:
    """Return the visits of a program's units; None where ranks cannot or may not skip any.

    Every rank calls it: it may make process groups.
    """
    layout = program.plan.layout
    shard_group = axis_world(program.world, layout.degrees, ["dp_shard"])
    if not units or program.data.size == 1 or layout.pp > 1 or layout.ep > 1:
        return None
    for name in units:
        while name := name.rpartition(".")[0]:
            # By this mark models of transformers run the layers that LayerDrop drops. On the model
            # itself it stays: there it lets ranks generate texts of different lengths.
            around = program.module.get_submodule(name)
            around.__dict__.pop("_is_fsdp_managed_module", None)
    return UnitVisits(units, program.recorded, program.data, shard_group, layout.strategy)


def _first_order(names: Sequence[str], recorded: Sequence[str]) -> list[int]:
    """Return unit numbers in the recorded order, each unit without a record after its predecessor.

    >>> _first_order(["a", "b", "c", "d"], ["", "c", "a", "other"])
    [2, 3, 0, 1]
    >>> _first_order(["a", "b"], [])
    [0, 1]
    """
    numbers = {name: number for number, name in enumerate(names)}
    order = [numbers[name] for name in dict.fromkeys(recorded) if name in numbers]
    for number in range(len(names)):
        if number not in order:
            order.insert(order.index(number - 1) + 1 if number else 0, number)
    return order


def _carries_gradients(values: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(values))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))


class _StartBackward(torch.autograd.Function):
    """A link of the chain that begins the backward pass of one visit."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, visit: Visit, _visits: UnitVisits) -> torch.Tensor:
        ctx.visit = visit
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.visit.start_backward(gradients[0])
        return gradients[0], None, None


class _EndBackward(torch.autograd.Function):
    """A link of the chain that ends the backward pass of one visit."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, visit: Visit, visits: UnitVisits) -> torch.Tensor:
        ctx.visit, ctx.visits = visit, visits
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.visit.end_backward() and ctx.visit.grad_in:
            ctx.visits.varied = True  # the unit ran, and the loss does not depend on it
        return gradients[0], None, None


class _FollowChain(torch.autograd.Function):
    """A node behind a tensor that passes its gradient on, and a zero to the chain."""

    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        ctx.device = chain.device
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.zeros((), device=ctx.device), gradients[0]


def _follow_chain(chain: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Let the backward pass of tensors run the chain's, in place and without a copy.

    Users may write into the tensors afterwards, which autograd forbids for views that a Function
    returns. Nothing is written here, so what autograd saved of the tensors stays valid. Each tensor
    has a node of its own: one node would run behind the tensors that the loss does not use, too.

    Args:
        tensors: no leaves and no views.
    """
    for tensor in tensors:
        with keep_version(tensor):
            _FollowChain.apply(chain, tensor)
