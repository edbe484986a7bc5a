"""A program: the user's module plus everything a layout added to it, ready to run one step.

Techniques take a program and return one with their part filled in; `compose.py` has their order.
The trainer asks a program to prepare a batch, to enter a micro-batch, and to reduce gradients, and
never needs to know the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shoal.base.errors import BugError
from shoal.base.plans.placement import DATA_AXES, DimCut, Placement
from shoal.base.plans.plan import Bucket, Plan
from shoal.base.plans.tensor_shards import Shard
from shoal.fabric import World
from shoal.fabric.axis_worlds import axis_world, label_axes, list_axis_groups, partition_world
from shoal.trace.find.blocks import detect_blocks, is_single_layer

if TYPE_CHECKING:
    from shoal.base.plans.comm_volume import CommVolume
    from shoal.parallel.unit_log import UnitLog


class Reducer(Protocol):
    """Protocol of gradient reduction: sums gradients over all ranks into `local.parameter.grad`.

    Call order of one step, on every rank: `start_step` · for each micro-batch `prepare_backward`,
    its backward pass, `end_backward` · `finish` · the optimizer's step · `publish`. A rank may have
    fewer micro-batches than another, or none.
    """

    def start_step(self, rounds: int) -> None:
        """Zero all gradients; the busiest rank runs `rounds` micro-batches in this step."""

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        """Prepare for a backward pass; after the step's last one, gradients may be sent at once.

        Args:
            last: this is the step's last backward pass on this rank.
            once: False: several backward passes may come before `end_backward`, and add up.
        """

    def end_backward(self, counted: bool) -> None:
        """End a backward pass; `counted` is False if it only joined collectives of other ranks."""

    def finish(self) -> None:
        """Wait until this rank's part of the sum over ranks is complete."""

    def used_parameters(self) -> list[bool]:
        """Return per parameter, in the program's order, whether this rank computed its gradient."""

    def local_norms(self) -> list[torch.Tensor]:
        """Return norms of this rank's gradients before the sum, to blame a rank for NaN."""

    def sums(self) -> list[torch.Tensor]:
        """Return the tensors that hold this rank's part of the sum, for scaling and norms."""

    def summed_names(self) -> list[str]:
        """Return for each of `sums()` one parameter in it; all its parameters are sharded alike."""

    def publish(self) -> None:
        """Make all new weights visible on every rank after the optimizer's step."""


class IdleReducer(Reducer):
    """Base of reducers for which some calls of a step have nothing to do."""

    def start_step(self, rounds: int) -> None:
        """Do nothing at the start of a step."""

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        """Do nothing before a backward pass."""

    def end_backward(self, counted: bool) -> None:
        """Do nothing after a backward pass."""

    def finish(self) -> None:
        """Do nothing: no sum is under way."""

    def publish(self) -> None:
        """Do nothing: the optimizer stepped the module's own parameters."""


class HookedReducer(IdleReducer):
    """Base of reducers whose hooks mark the parameters that get a gradient on this rank.

    Attributes:
        plan: buckets of the program's plan.
        seen: names of the marked parameters of this step.
    """

    parameters: Mapping[str, nn.Parameter]
    plan: Sequence[Bucket]
    seen: set[str]

    def used_parameters(self) -> list[bool]:
        """Return per parameter whether it got a gradient on this rank."""
        return [name in self.seen for name in self.parameters]

    def summed_names(self) -> list[str]:
        """Return the first parameter of every bucket."""
        return [bucket.names[0] for bucket in self.plan]


class Pass(Protocol):
    """One micro-batch, ready to run forward and backward, at once or in pieces.

    Attributes:
        index: number in the step; negative: the pass only joins the collectives of other ranks.
        signature: the shapes of its inputs; equal for micro-batches that one graph can serve.
        sums: [loss sum, count of targets] of the step, to which the pass adds its own.
    """

    sums: torch.Tensor

    def on(self, program: Program, sums: torch.Tensor) -> Pass:
        """Return the micro-batch for a replica of the program; it adds to the replica's sums."""

    @property
    def index(self) -> int:
        """Return the number of the micro-batch in its step."""

    @property
    def signature(self) -> Hashable:
        """Return the shapes and dtypes of the inputs."""

    def __call__(self, module: nn.Module, *, alone: bool = True) -> None:
        """Run forward and backward on the module; alone: no other pass runs at the same time."""

    def keyed_context(self) -> AbstractContextManager[None]:
        """Return a re-enterable context for any part of the pass, forward or backward."""

    def outputs(self, module: nn.Module) -> Any:
        """Run the forward pass and return the module's outputs for the inputs."""

    def compute_loss(self, outputs: Any) -> torch.Tensor:
        """Return the summed loss to call backward on; note the loss and the count of targets."""


def run_sequentially(program: Program, passes: Sequence[Pass], reducer: Reducer) -> None:
    """Run the passes of a step one after another."""
    for place, one in enumerate(passes):
        reducer.prepare_backward(place == len(passes) - 1)
        one(program.module)
        reducer.end_backward(one.index >= 0)


@dataclass(frozen=True)
class LocalParameter:
    """The part of one trainable parameter that this rank's optimizer steps.

    Attributes:
        parameter: the module's own parameter, or a view of a part of it.
        shard: the position of that part in the whole tensor.
    """

    parameter: nn.Parameter
    shard: Shard


Part = tuple[torch.Tensor, Shard]
"""A local tensor and its position in the whole tensor; no slices if a rank holds nothing."""


@dataclass(frozen=True)
class Program:
    """A module on this rank, ready to train: its part, its process groups, the hooks around a step.

    Attributes:
        world: all processes.
        data: ranks that hold the same part of the model as this one, and run other micro-batches;
            `tensor`: ranks that split its layers; `pipe`: its stages; `context`: ranks that share
            its sequences.
        parameters: trainable parameters of this rank by name, tied ones once, in module order.
        sums: worlds over which the gradient of each is summed, in that order: first the
            data-parallel ranks with the same part.
        local: the part of each that this rank's optimizer steps; absent if it steps none.
        parts: the kept tensors of parameters that no rank holds whole (or not in their own dtype).
        frozen: the other parameters by name; they must stay frozen, since no gradient of theirs is
            summed.
        aliases: other names of tied tensors → the name under which they are kept.
        run: runs the passes of a step on the module and calls the reducer around each.
        forward: a pass for evaluation; returns None if the outputs are not on this rank.
        twin: a copy of the module on the meta device, for counting, if it can no longer be copied.
        passes: forward passes on the sample so far, by purpose (`trace.record.Record`).
        recorded: names of modules in the order of their first calls on the sample, under zero 3.
        mirrored: `data` plus the ranks of a pipeline's second copy that hold the same part, or the
            ranks of `data` that hold it if servers hold tables; None: `data`.
        together: every rank must run as many passes as the busiest one (parameters are gathered).
        unit_log: log of the units that this rank gathers, in order (`unit_log.UnitLog`); None if it
            gathers none.
        prepare: functions on the inputs of a micro-batch (device, dtype).
        keyed: context that seeds the generators for a micro-batch, by (step, number).
        around: the other contexts around a micro-batch; None: nothing to enter.
        travel: returns the predicted traffic of tp and pp, if there is a prediction.
        autocast: context around the forward pass only.
        moved, align: whether an unmanaged buffer changed on this rank · make such buffers equal on
            all ranks (True: and restore them after a skipped step).
        owed: error feedback of gradient compression, kept in checkpoints (`compress.Owed`).
        action_times: times of a pipeline's actions (`ActionTimes`); None without a pipeline.
        on_begin: called before the first micro-batch of every step.
        on_update: called once per committed step, after the reduction, with whether some ranks ran
            more micro-batches than others.
        on_evaluate, on_evaluated: called before an evaluation's first forward pass, after its last
            one.
        on_close: called at the end: removes the hooks from the user's module.
    """

    module: nn.Module
    world: World
    plan: Plan
    parameters: dict[str, nn.Parameter]
    aliases: dict[str, str]
    data: World
    tensor: World
    pipe: World
    context: World
    blocks: tuple[str, ...] = ()
    sums: dict[str, tuple[World, ...]] = field(default_factory=dict)
    frozen: dict[str, nn.Parameter] = field(default_factory=dict)
    local: dict[str, LocalParameter] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    reducer: Reducer | None = None
    run: Callable[[Program, Sequence[Pass], Reducer], None] = run_sequentially
    forward: Callable[[Program, Pass], Any] = lambda program, one: one.outputs(program.module)
    mirrored: World | None = None
    together: bool = False
    unit_log: UnitLog | None = None
    twin: nn.Module | None = None
    passes: Mapping[str, int] = field(default_factory=dict)
    recorded: tuple[str, ...] = ()
    travel: Callable[[], CommVolume] | None = None
    prepare: tuple[Callable[[Any], Any], ...] = ()
    keyed: Callable[[int, int], AbstractContextManager[None]] | None = None
    around: tuple[Callable[[int, int], AbstractContextManager[None] | None], ...] = ()
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    moved: Callable[[], bool] = lambda: False
    align: Callable[[bool], None] = lambda skipped: None
    owed: Any = None
    action_times: Any = None
    on_begin: tuple[Callable[[], None], ...] = ()
    on_update: tuple[Callable[[bool], None], ...] = ()
    on_evaluate: tuple[Callable[[], None], ...] = ()
    on_evaluated: tuple[Callable[[], None], ...] = ()
    on_close: tuple[Callable[[], None], ...] = ()
    notices: list[str] = field(default_factory=list)

    def but(self, **changes: Any) -> Program:
        """Return the same program under a plan with some fields changed."""
        return replace(self, plan=replace(self.plan, **changes))

    @property
    def speaks(self) -> bool:
        """Return whether this rank's loss counts: the first of the ranks that compute the same."""
        return self.tensor.rank == 0 == self.context.rank

    @property
    def differentiates(self) -> bool:
        """Return whether this rank's loss is differentiated; cp ranks count it once."""
        return self.context.rank == 0

    @property
    def replicas(self) -> World:
        """Return all ranks that hold the same part of the model, for any micro-batches."""
        return self.data if self.mirrored is None else self.mirrored

    @cached_property
    def rows(self) -> dict[str, Placement]:
        """Return the placements of all tensors of the model by name, the same on every rank."""
        return {row.name: row for row in self.plan.placements}

    @cached_property
    def at(self) -> dict[str, int]:
        """Return this rank's index along every axis."""
        return self.plan.layout.at(self.world.rank)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the trainable parameters of the whole model, the same on every rank."""
        return tuple(row.name for row in self.plan.placements if row.trains)

    @cached_property
    def cuts(self) -> dict[str, DimCut]:
        """Return the cuts of the parameters that tp or ep cuts inside, by name."""
        return {name: row.cut for name, row in self.rows.items() if row.cut is not None}

    @cached_property
    def copies_of_sum(self) -> dict[str, int]:
        """Return how many ranks hold the same element of the summed gradient, by parameter."""
        return {name: self.rows[name].copies_of_sum(self.plan.layout) for name in self.names}

    @cached_property
    def has_shared_gradients(self) -> bool:
        """Return whether a gradient of this rank is summed over more than data-parallel ranks."""
        return any(len(worlds) > 1 for worlds in self.sums.values())

    def shard_of(self, name: str) -> Shard:
        """Return the position of this rank's part of tensor `name` in the whole model's tensor."""
        if name not in self.rows:
            raise BugError(f"{name} is no tensor of the model")
        return self.rows[name].shard(self.at)

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter belongs to an expert that ep distributes over ranks."""
        return name in self.rows and self.rows[name].is_expert


def make_undivided_program(module: nn.Module, plan: Plan, world: World) -> Program:
    """Return a program of the whole module, with no technique applied yet."""
    degrees, workers = plan.layout.degrees, plan.layout.processes - plan.layout.servers
    label_axes(world, degrees)
    return Program(
        module,
        world,
        plan,
        trainable_parameters(module),
        tied_aliases(module),
        data=axis_world(world, degrees, DATA_AXES),
        tensor=axis_world(world, degrees, ["tp"]),
        pipe=axis_world(world, degrees, ["pp"]),
        context=axis_world(world, degrees, ["cp"]),
        mirrored=partition_world(world, [tuple(range(workers))]) if plan.layout.serves else None,
        blocks=tuple(detect_blocks(module, plan)),
        frozen=frozen_parameters(module),
    )


def bind_placements(program: Program, rows: Iterable[Placement]) -> Program:
    """Add placements to a program, and make the process groups over which gradients are summed.

    Every rank calls it with equal placements: making groups is collective.
    """
    program = program.but(placements=tuple(rows))
    layout, world = program.plan.layout, program.world
    beyond = {"tp": program.tensor, "cp": program.context}
    lines = list_axis_groups(layout.degrees, ["pp"])
    known: dict[tuple[Any, ...], tuple[World, ...]] = {}
    sums = {}
    for name in program.names:
        row = program.rows[name]
        key = row.bucket_key(layout)
        if key not in known:
            grid = layout.expert_degrees if row.is_expert else layout.degrees
            together = layout.serves and not row.is_table  # servers hold tables only
            worlds = [program.replicas if together else axis_world(world, grid, row.data_axes)]
            worlds += [beyond[axis] for axis in row.sum_over if axis in beyond]
            if "pp" in row.sum_over:  # ranks without a part of it also join in making the group
                sharers = [tuple(line[stage] for stage in row.stages) for line in lines]
                worlds.append(partition_world(world, sharers))
            known[key] = tuple(worlds)
        if program.at["pp"] in row.stages:
            sums[name] = known[key]
    return replace(program, sums=sums)


def whole_local_parameters(program: Program) -> dict[str, LocalParameter]:
    """Return every parameter unsharded, as one process and `ddp` step them."""
    return {
        name: LocalParameter(p, program.shard_of(name)) for name, p in program.parameters.items()
    }


def copy_part(tensor: torch.Tensor, cut: DimCut, rank: int) -> torch.Tensor:
    """Copy the part of a whole tensor that rank `rank` of the cut's axis holds, in row order."""
    parts = [tensor.narrow(cut.dim, start, stop - start) for start, stop in cut.spans(rank)]
    if len(parts) > 1:
        return torch.cat(parts, cut.dim).contiguous()
    # A copy even if it is a view of rows: a view would keep the whole tensor alive.
    return parts[0].clone(memory_format=torch.contiguous_format)


def dtype_of(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype by torch's name without the prefix: float32, bfloat16, int64."""
    return str(tensor.dtype).removeprefix("torch.")


def empty_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor or parameter like this one, without memory."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def view_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return `part` of a flat buffer viewed with the parameter's shape and strides.

    torch's fused CPU kernels walk weight and gradient side by side in memory and ignore strides: a
    channels_last weight with a gradient in row order would get other elements' updates, silently.
    """
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return part.view_as(parameter)  # gaps or overlaps: autograd keeps row order for these too
    return part.as_strided(parameter.shape, parameter.stride())


def own_blocks(program: Program) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks whose parameters are on this rank, not on another pipeline stage."""
    for name in program.blocks:
        block = program.module.get_submodule(name)
        if not any(p.is_meta for p in block.parameters()):
            yield name, block


def layered_blocks(program: Program) -> list[tuple[str, nn.Module]]:
    """Return the blocks of several layers that are on this rank, each once, with a name."""
    found = {id(b): (n, b) for n, b in own_blocks(program) if not is_single_layer(b)}
    return list(found.values())


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return trainable parameters by first name, tied ones once, without meta tensors."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad and not p.is_meta}


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen parameters by first name, without those on the meta device."""
    return {n: p for n, p in module.named_parameters() if not p.requires_grad and not p.is_meta}


def tied_aliases(module: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters and buffers → first name.

    A tied tensor is one object under two names; views that merely share storage are not ties.
    """
    first: dict[int, str] = {}
    second: dict[str, str] = {}
    for name, tensor in _named_tensors(module):
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            second[name] = canonical
    return second


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
