"""Partition a model into pipeline stages: the stage of each call, crossing tensors, weights.

The calls of the trunk's blocks are assigned to the stages in runs, so that the largest stage cost
is minimal, and among such cuts the sum of squared costs. A call outside of the blocks joins a
block: the one before it if it depends on any block (last norm, head), else the one after it
(embedding, the decoder's embedding of an encoder-decoder model). Calls that change the same buffer
(a BatchNorm that runs twice in a pass) stay on one stage, with the calls between them: another
stage would change its own copy.

    cost       share of the model's FLOP + share of its parameters, unless given
    crossing   tensors that enter stage s: those of calls before s that calls on s or after it need;
               a skip over a stage passes through it
    kept       of a stage: parameters and buffers of its units, and those that code between units
               reads on the way to them. A parameter on several stages is a tie; its gradients
               are summed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.planning.chain_partition import join_places, partition
from shoal.trace._torch import pytree
from shoal.trace.flow.liveness import Flow, Leaf, UnitCall, has_same_values
from shoal.trace.isolation.meta_inputs import map_tensors, tensors_of
from shoal.trace.isolation.module_copies import copy_to_meta


@dataclass(frozen=True)
class CallPlan:
    """One call of a unit, as every stage knows it.

    Attributes:
        inputs: the sample's (args, kwargs), on the meta device, or their `shape_givers`.
        outputs: its result, on the meta device.
        devices: devices of the returned tensors.
        written: those that are written into later.
    """

    name: str
    stage: int
    block: bool
    inputs: Any
    outputs: Any
    devices: tuple[torch.device, ...]
    written: frozenset[int]


@dataclass(frozen=True)
class StageCut:
    """A model cut into stages; the same on every rank.

    Attributes:
        calls: of units, in the order in which the forward pass makes them.
        crossings: per stage: the tensors that enter it, in the order in which they are sent; none
            for the first.
        keep: per stage: names of the parameters and buffers that it needs.
        ties: parameters that several stages need → these stages.
        between: parameters that code between units reads; on stages that do not need them their
            values do not matter, but their shapes do.
        twin: the model on the meta device, for shapes.
    """

    calls: tuple[CallPlan, ...]
    crossings: tuple[tuple[Leaf, ...], ...]
    keep: tuple[frozenset[str], ...]
    ties: dict[str, tuple[int, ...]]
    between: frozenset[str]
    twin: nn.Module

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.keep)

    def to_json(self) -> Any:
        """Return the cut as JSON values for another rank; None if an output is no plain value.

        Plain are tensors, numbers and strings in tuples, lists and dicts. Other objects can only be
        made by their own classes.
        """
        try:
            calls = [
                [
                    *(call.name, call.stage, call.block),
                    [_encode_tree(one) for one in shape_givers(call.inputs)],
                    _encode_tree(call.outputs),
                    [device.type for device in call.devices],
                    sorted(call.written),
                ]
                for call in self.calls
            ]
        except TypeError:
            return None
        keep, between = [sorted(names) for names in self.keep], sorted(self.between)
        return [calls, self.crossings, keep, self.ties, between]

    @staticmethod
    def from_json(told: Any, module: nn.Module, device: torch.device) -> StageCut:
        """Read the result of another rank's `to_json` for the same `module`.

        Args:
            device: of this rank; it replaces the other rank's device of the same type.
        """
        calls, crossings, keep, ties, between = told
        return StageCut(
            tuple(
                CallPlan(
                    *(name, stage, block),
                    [_decode_tree(one) for one in inputs],
                    _decode_tree(outputs),
                    tuple(device if kind == device.type else torch.device(kind) for kind in where),
                    frozenset(written),
                )
                for name, stage, block, inputs, outputs, where, written in calls
            ),
            tuple(tuple((call, leaf) for call, leaf in stage) for stage in crossings),
            tuple(map(frozenset, keep)),
            {name: tuple(where) for name, where in ties.items()},
            frozenset(between),
            copy_to_meta(module),
        )

    def blocks(self, stage: int) -> list[str]:
        """Return the names of the trunk's blocks that a stage calls, in order."""
        return list(dict.fromkeys(c.name for c in self.calls if c.block and c.stage == stage))


def shape_givers(tree: Any) -> list[torch.Tensor | int]:
    """Return the inputs that may determine a result's shape, in order: tensors and integers.

    >>> shape_givers(((torch.Size([2, 8]), None), {"width": 3, "causal": True}))
    [2, 8, 3]
    """
    found: list[torch.Tensor | int] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Size):
            found += leaf
        else:
            found += [leaf] if type(leaf) is int else tensors_of(leaf)
    return found


def _encode_tree(tree: Any) -> Any:
    """Encode a structure of tensors as JSON values.

    Raises:
        TypeError: an object that `_decode_tree` cannot make.

    >>> _encode_tree((1, {"a": [None, torch.empty(2, device="meta")]}))
    ['tuple', 1, ['dict', 'a', ['list', None, ['tensor', [2], 'float32']]]]
    """
    if isinstance(tree, torch.Tensor):
        return ["tensor", list(tree.shape), str(tree.dtype).removeprefix("torch.")]
    if type(tree) in (tuple, list):
        return [type(tree).__name__, *map(_encode_tree, tree)]
    if type(tree) is dict and all(type(key) is str for key in tree):
        return ["dict", *(part for key, one in tree.items() for part in (key, _encode_tree(one)))]
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    raise TypeError(type(tree).__name__)


def _decode_tree(told: Any) -> Any:
    """Decode a structure that `_encode_tree` encoded, with its tensors on the meta device.

    >>> _decode_tree(_encode_tree((1, {"a": [None, "b"]})))
    (1, {'a': [None, 'b']})
    """
    if not isinstance(told, list):
        return told
    kind, *parts = told
    if kind == "tensor":
        return torch.empty(parts[0], dtype=getattr(torch, parts[1]), device="meta")
    if kind == "dict":
        return dict(zip(parts[::2], map(_decode_tree, parts[1::2]), strict=True))
    return (tuple if kind == "tuple" else list)(map(_decode_tree, parts))


def assign_stages(module: nn.Module, flow: Flow, stages: int) -> StageCut:
    """Cut a module into stages, by the data flow of its forward pass.

    Args:
        flow: of `module`'s forward pass.
        stages: number of stages.

    Raises:
        PlanError: more stages than block calls, or a block whose result is read later otherwise
            than through its return value.
    """
    blocks = [number for number, call in enumerate(flow.calls) if call.block]
    if stages > len(blocks):
        raise PlanError(
            f"layout.pp = {stages}: more stages than the {len(blocks)} blocks of "
            f"{type(module).__name__}; try: layout.pp={max(1, len(blocks))}"
        )
    goes_with = _attach_to_blocks(flow, blocks)
    changes = _calls_by_changed_buffer(module, flow)
    runs = join_places(len(blocks), goes_with, changes.values())
    if stages > runs[-1] + 1:
        raise _buffer_error(flow, stages, changes, runs[-1] + 1)
    each = _call_costs(module, flow)
    chain = [0.0] * (runs[-1] + 1)
    for number, place in enumerate(goes_with):
        chain[runs[place]] += each[number]
    starts = partition(chain, stages)
    of_block = [max(s for s in range(stages) if starts[s] <= run) for run in runs]
    stage_of: list[int] = []
    for number, call in enumerate(flow.calls[:-1]):
        earlier = [stage_of[needed] for needed, _ in call.needs]
        stage_of.append(max([of_block[goes_with[number]], *earlier]))
    stage_of.append(stages - 1)  # the model's outputs
    if any(len({stage_of[number] for number in calls}) > 1 for calls in changes.values()):
        raise _buffer_error(flow, stages, changes, 1)
    _check_side_reads(flow, stage_of, stages)
    keep = _tensors_of_stages(module, flow, stage_of, stages)
    ties = {}
    for name, _ in module.named_parameters():
        where = tuple(stage for stage in range(stages) if name in keep[stage])
        if len(where) > 1:
            ties[name] = where
    return StageCut(
        tuple(
            _make_call_plan(call, stage)
            for call, stage in zip(flow.calls[:-1], stage_of, strict=False)
        ),
        tuple(_crossing(flow, stage_of, stage) for stage in range(stages)),
        keep,
        ties,
        flow.between,
        copy_to_meta(module),
    )


def _attach_to_blocks(flow: Flow, blocks: list[int]) -> list[int]:
    """Return, for each call and the outputs, the index of the block call that it joins."""
    depends: list[bool] = []
    goes_with = []
    for number, call in enumerate(flow.calls):
        depends.append(call.block or any(depends[needed] for needed, _ in call.needs))
        before = sum(block <= number for block in blocks)
        place = before - 1 if call.block or depends[number] else before
        goes_with.append(min(place, len(blocks) - 1))
    goes_with[-1] = len(blocks) - 1
    return goes_with


def _calls_by_changed_buffer(module: nn.Module, flow: Flow) -> dict[str, list[int]]:
    """Return the calls that change each buffer, for buffers that several calls change.

    A buffer that every call sets to the same value, or to another shape (a cache), is no state.
    """
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    every = dict(module.named_buffers(remove_duplicate=False))
    found: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in names.values()}
    for number, call in enumerate(flow.calls):
        for path, value in call.moved.items():
            if path in every:
                found[names[id(every[path])]].append((number, value))
    return {
        name: [number for number, _ in changes]
        for name, changes in found.items()
        if any(_is_changed(changes[0][1], value) for _, value in changes[1:])
    }


def _is_changed(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two values of a buffer of one shape differ, or may (on the meta device)."""
    return one.shape == two.shape and (one.is_meta or not has_same_values(one, two))


def _buffer_error(flow: Flow, stages: int, changes: dict[str, list[int]], most: int) -> PlanError:
    name, calls = next(iter(changes.items()))
    units = " and ".join(dict.fromkeys(flow.calls[number].name for number in calls))
    return PlanError(
        f"layout.pp = {stages}: {units} ran {len(calls)} times in a pass, and each call changed "
        f"the buffer {name}; these calls must lie on one stage, which leaves {most} "
        f"stage{'s' if most > 1 else ''}; try: layout.pp={most}"
    )


def _call_costs(module: nn.Module, flow: Flow) -> list[float]:
    """Return the cost of each call by FLOP and parameters, the outputs included."""
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    flops = max(1, sum(call.flops for call in flow.calls))
    elements = max(1, sum(sizes.values()))
    owned = _tensors_of_units(module, {call.name for call in flow.calls[:-1]})
    costs = []
    for call in flow.calls:
        names = owned.get(call.name, set()) | (call.reads & flow.between)
        costs.append(call.flops / flops + sum(sizes.get(name, 0) for name in names) / elements)
    return costs


def _tensors_of_units(module: nn.Module, units: set[str]) -> dict[str, set[str]]:
    """Return parameters and buffers of each unit, by their names in the whole module."""
    names = {id(tensor): name for name, tensor in _state(module)}
    return {
        unit: {names[id(tensor)] for _, tensor in _state(module.get_submodule(unit))}
        for unit in units
    }


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensors_of_stages(
    module: nn.Module, flow: Flow, stage_of: list[int], stages: int
) -> tuple[frozenset[str], ...]:
    owned = _tensors_of_units(module, {call.name for call in flow.calls[:-1]})
    in_units = set().union(*owned.values())
    keep: list[set[str]] = [set() for _ in range(stages)]
    for call, stage in zip(flow.calls, stage_of, strict=True):
        keep[stage] |= call.reads | owned.get(call.name, set())
    for name, _ in module.named_buffers():
        if name not in in_units:  # read between units, and small: positions, masks
            for stage in range(stages):
                keep[stage].add(name)
    homeless = {name for name, _ in _state(module)} - set().union(*keep)
    keep[-1] |= homeless  # never used; kept on the last stage so that checkpoints have them
    return tuple(frozenset(names) for names in keep)


def _crossing(flow: Flow, stage_of: list[int], stage: int) -> tuple[Leaf, ...]:
    needed: set[Leaf] = set()
    for call, at in zip(flow.calls, stage_of, strict=True):
        if at >= stage:
            needed |= {(number, leaf) for number, leaf in call.needs if stage_of[number] < stage}
    return tuple(sorted(needed))


def _check_side_reads(flow: Flow, stage_of: list[int], stages: int) -> None:
    for call, stage in zip(flow.calls, stage_of, strict=True):
        for maker in sorted(call.aside):
            if stage_of[maker] != stage:
                reader = call.name or "the model's outputs"
                raise PlanError(
                    f"layout.pp = {stages}: {flow.calls[maker].name} leaves a tensor aside (an "
                    f"attribute, a cache, a hook) that {reader} reads on another stage; a stage "
                    f"sends only what a block returns; return it from the block's forward; "
                    f"try: layout.pp=1"
                )


def _make_call_plan(call: UnitCall, stage: int) -> CallPlan:
    devices = tuple(tensor.device for tensor in tensors_of(call.outputs))
    inputs, outputs = map_tensors(_to_meta, call.inputs), map_tensors(_to_meta, call.outputs)
    return CallPlan(call.name, stage, call.block, inputs, outputs, devices, call.written)


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")
