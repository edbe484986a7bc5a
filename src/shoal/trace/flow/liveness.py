"""Dependencies between the values of a forward pass: the inputs that a pipeline stage needs.

A forward pass is seen as calls of units: the blocks of the trunk, and beside them the outermost
modules that hold parameters (embedding, last norm, head). Code between the units (additions, masks,
positions) runs on every stage, so only the values that flow through it matter. One pass on a sample
is followed operator by operator (`tensor_origins`); each call then knows

    needs    the tensors of earlier calls that its result depends on
    reads    the parameters and buffers, its own and those that code before it used
    aside    earlier calls inside of which something was made that it reads without their outputs

A mark may be superfluous (a value then travels for nothing). It is missing only if values leave
torch unseen (numpy, tolist); for that case `verify` compares every stage's inputs with the
sample's. Following values sees what poisoning with NaN cannot: what torch.where or nan_to_num hide.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.base.errors import BugError
from shoal.trace.find.trunk import Trunk
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.flow.tensor_origins import OriginTracker, TensorOrigin
from shoal.trace.isolation.meta_inputs import map_tensors, tensors_of
from shoal.trace.isolation.preserve_state import preserve_state
from shoal.trace.isolation.replaced_forward import ReplacedForward, restore_all


class Snapshots:
    """Copier of tensor trees; a tensor seen twice unchanged is copied once."""

    def __init__(self) -> None:
        self.taken: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tree: Any) -> Any:
        """Return the same tree with detached copies."""
        return map_tensors(self._copy, tree)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (id(tensor), tensor._version)
        if key not in self.taken:  # keep the tensor too, or its id would be reused
            # A weight that a model passes on is not copied: no forward pass writes into it.
            is_weight = isinstance(tensor, nn.Parameter)
            self.taken[key] = (tensor, tensor if is_weight else tensor.detach().clone())
        return self.taken[key][1]


Leaf = tuple[int, int]
"""Tensor that a call returned: (number of the call, position among the returned tensors)."""


@dataclass(frozen=True)
class UnitCall:
    """Call of a unit; the last one of a flow is the model's outputs, with an empty name.

    Attributes:
        block: the unit is a block of the trunk.
        needs: tensors of earlier calls that its result depends on.
        reads: names of parameters and buffers that its result depends on.
        aside: earlier calls inside of which something was made that this one reads.
        inputs, outputs: copies of the sample's (args, kwargs) and result.
        written: positions of returned tensors that are written into later.
        flops: FLOP of its forward pass on the sample.
        moved: the unit's buffers that the call changes, by name, as it leaves them.
    """

    name: str
    block: bool
    needs: frozenset[Leaf]
    reads: frozenset[str]
    aside: frozenset[int]
    inputs: Any
    outputs: Any
    written: frozenset[int] = frozenset()
    flops: int = 0
    moved: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Flow:
    """Forward pass as calls of units, in order; the last entry is the model's outputs.

    Attributes:
        between: parameters that code between the units reads.
    """

    calls: tuple[UnitCall, ...]
    between: frozenset[str]


def list_units(module: nn.Module, trunk: Trunk) -> dict[str, nn.Module]:
    """Return the trunk's blocks and the outermost other called modules with state, by name."""
    blocks = set(trunk.blocks)
    ends = {name: [place for place, letter in enumerate(name) if letter == "."] for name in blocks}
    holders = {name[:end] for name in blocks for end in ends[name]} | {""}
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(name: str, part: nn.Module) -> None:
        if id(part) in seen:
            return
        seen.add(id(part))
        if name in blocks or (name not in holders and name in trunk.called and _has_state(part)):
            found[name] = part
            return
        for child_name, child in part.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", module)
    return found


def _has_state(part: nn.Module) -> bool:
    """Return whether a module has parameters, or running statistics that must move only once."""
    tracked = any("num_batches_tracked" in name for name, _ in part.named_buffers())
    return tracked or next(part.parameters(), None) is not None


def trace_flow(record: ForwardRecord) -> Flow:
    """Follow values through one forward pass, without gradients, in the module's current mode."""
    module, trunk = record.module, record.trunk
    with torch.no_grad(), preserve_state(module, attributes=False):
        followed = _FlowTrace(module, set(trunk.blocks))
        found = list_units(module, trunk)
        watched = [_UnitForward(name, part, followed) for name, part in found.items()]
        root = _RootForward("", module, followed)
        try:
            with followed.marking:
                outputs = record.run("flow", module)
        finally:
            restore_all([root, *watched])
    return followed.make_flow(outputs)


class _FollowedForward(ReplacedForward):
    """Replaced forward that knows the calls of the watched pass."""

    def __init__(self, name: str, block: nn.Module, followed: _FlowTrace) -> None:
        self.followed = followed
        super().__init__(name, block)


class _RootForward(_FollowedForward):
    """Replaced forward of the model itself, which marks the model's inputs."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Mark the inputs and run the model's own forward."""
        marking = self.followed.marking
        for tensor in tensors_of((inputs, named)):
            marking.set_origins(tensor, marking.of(tensor) | {TensorOrigin("input")})
        return self.forward(*inputs, **named)


class _UnitForward(_FollowedForward):
    """Replaced forward of a unit, which numbers its call and marks its outputs."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the unit's own forward as one call, or as a part of the unit around it."""
        if self.followed.marking.inside is not None:
            return self.forward(*inputs, **named)
        return self.followed.call(self, inputs, named)


class _FlowTrace:
    """Calls of one watched pass so far."""

    def __init__(self, module: nn.Module, blocks: set[str]) -> None:
        self.blocks = blocks
        self.marking = OriginTracker(module)
        self.calls: list[UnitCall] = []
        self.returned: list[list[tuple[torch.Tensor, int]]] = []  # (tensor, version) of each call
        self.copied = Snapshots()

    def copy_paused(self, tree: Any) -> Any:
        self.marking.paused = True
        try:
            return self.copied(tree)
        finally:
            self.marking.paused = False

    def copy_buffers(self, unit: _UnitForward) -> dict[str, tuple[torch.Tensor, int]]:
        """Return copies of a unit's buffers, with their version counters, by their whole names."""
        self.marking.paused = True
        try:
            return {
                f"{unit.name}.{name}": (buffer.detach().clone(), buffer._version)
                for name, buffer in unit.block.named_buffers()
            }
        finally:
            self.marking.paused = False

    def find_moved(
        self, unit: _UnitForward, before: dict[str, tuple[torch.Tensor, int]]
    ) -> dict[str, torch.Tensor]:
        """Return copies of the buffers that a call of a unit changed.

        Values count: F.batch_norm moves running statistics without their version counters. The
        meta device has versions only.
        """
        after = self.copy_buffers(unit)
        self.marking.paused = True
        try:
            return {
                name: value
                for name, (value, version) in after.items()
                if name not in before
                or not has_same_values(value, before[name][0])
                or (value.is_meta and version != before[name][1])
            }
        finally:
            self.marking.paused = False

    def call(self, unit: _UnitForward, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        number, before = len(self.calls), self.copy_paused((inputs, named))
        buffers = self.copy_buffers(unit)
        self.marking.begin_call(number, (inputs, named))
        outputs = self.marking.end(unit.forward(*inputs, **named))
        call = self.make_unit_call(unit.name, before, self.copy_paused(outputs))
        self.calls.append(replace(call, moved=self.find_moved(unit, buffers)))
        self.marking.flops = 0
        leaves = tensors_of(outputs)
        for place, tensor in enumerate(leaves):
            self.marking.set_origins(tensor, frozenset({TensorOrigin("output", number, place)}))
        self.returned.append([(tensor, tensor._version) for tensor in leaves])
        if unit.name in self.blocks:
            torch.manual_seed(number)  # as in training: what a block drew does not matter after it
        return outputs

    def make_unit_call(self, name: str, inputs: Any, outputs: Any) -> UnitCall:
        read = self.marking.read
        return UnitCall(
            name,
            name in self.blocks,
            frozenset((m.call, m.leaf) for m in read if m.kind == "output"),
            frozenset(m.name for m in read if m.kind in ("parameter", "buffer")),
            frozenset(m.call for m in read if m.kind == "aside" and m.call != len(self.calls)),
            inputs,
            outputs,
            flops=self.marking.flops,
        )

    def make_flow(self, outputs: Any) -> Flow:
        marking = self.marking
        marking.read = set(marking.of(outputs) | marking.on_host)
        last = self.make_unit_call("", None, self.copied(outputs))
        calls = []
        for call, kept in zip(self.calls, self.returned, strict=True):
            written = (place for place, (t, version) in enumerate(kept) if t._version != version)
            calls.append(replace(call, written=frozenset(written)))
        between = marking.between | {m.name for m in marking.read if m.kind == "parameter"}
        return Flow((*calls, last), frozenset(between))


def has_same_values(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have one shape and the same values, or no values (meta)."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.is_meta or two.is_meta:
        return one.is_meta and two.is_meta
    return bool(((one == two) | ((one != one) & (two != two))).all())


def have_same_calls(one: Flow, two: Flow) -> bool:
    """Return whether two flows call the same units in order, with as many tensors returned."""
    counts = [[(c.name, len(tensors_of(c.outputs))) for c in f.calls[:-1]] for f in (one, two)]
    return counts[0] == counts[1]


def merge_flows(one: Flow, two: Flow) -> Flow:
    """Merge two flows of the same calls: needs of both; inputs, outputs, FLOP of the first."""
    if not have_same_calls(one, two):
        raise BugError("flows of different calls cannot be merged")
    calls = [
        replace(
            a,
            needs=a.needs | b.needs,
            reads=a.reads | b.reads,
            aside=a.aside | b.aside,
            written=a.written | b.written,
            moved=b.moved | a.moved,
        )
        for a, b in zip(one.calls, two.calls, strict=True)
    ]
    return Flow(tuple(calls), one.between | two.between)
