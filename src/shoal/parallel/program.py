"""A program: the user's module plus everything a layout added to it, ready to run one step.

Techniques take a program and give one back with their part filled in; `compose.py` says in which
order. The trainer asks a program to place a batch, to enter a micro-batch, and to reduce gradients,
and never needs to know which layout it is.
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
from shoal.base.plans.placement import DATA_AXES, Cut, Placement
from shoal.base.plans.plan import Plan
from shoal.base.plans.tensor_shards import Shard
from shoal.fabric import World
from shoal.fabric.axis_worlds import along, among, members
from shoal.trace.find.blocks import find_blocks

if TYPE_CHECKING:
    from shoal.base.plans.comm_volume import Travel
    from shoal.parallel.unit_log import UnitLog


class Reducer(Protocol):
    """Turns every rank's gradients into their sum over all ranks, in `local.parameter.grad`.

    Call order of one step, on every rank: `begin` · for each micro-batch `arm`, its backward pass,
    `passed` · `finish` · the optimizer's step · `publish`. A rank may have fewer micro-batches than
    another, or none.
    """

    def begin(self, rounds: int) -> None:
        """All gradients are zero from here on; the busiest rank runs `rounds` micro-batches."""

    def arm(self, last: bool, once: bool = True) -> None:
        """A backward pass comes; after the step's last one gradients may travel at once.

        Args:
            once: False: several may come, whose gradients add up until `passed`.
        """

    def passed(self, counted: bool) -> None:
        """That backward pass is over; it does not count if it only joined the others'."""

    def finish(self) -> None:
        """Returns when this rank's part of the sum over ranks is there."""

    def used(self) -> list[bool]:
        """Per parameter, in the program's order: did this rank compute a gradient for it?"""

    def local_norms(self) -> list[torch.Tensor]:
        """Norms of this rank's gradients before the sum: they tell whose numbers broke."""

    def sums(self) -> list[torch.Tensor]:
        """The tensors that hold this rank's part of the sum, for scaling and norms."""

    def summed(self) -> list[str]:
        """For each of `sums()` one parameter that lies in it: all there are held alike."""

    def publish(self) -> None:
        """The optimizer stepped this rank's part: now every rank sees all new weights."""


class Pass(Protocol):
    """One micro-batch, ready to run forward and backward, at once or in pieces.

    Attributes:
        index: its number in the step; negative: it only joins the others' collectives.
        signature: what its inputs' shapes are; equal for micro-batches that a graph serves alike.
        sums: [loss sum, count of targets] of the step, which it adds its own to.
    """

    sums: torch.Tensor

    def on(self, program: Program, sums: torch.Tensor) -> Pass:
        """The same micro-batch on a replica of the program; it adds to sums of the replica's."""

    @property
    def index(self) -> int:
        """Which micro-batch."""

    @property
    def signature(self) -> Hashable:
        """The shapes and formats of its inputs."""

    def __call__(self, module: nn.Module, *, alone: bool = True) -> None:
        """Run it on the module; alone: no other pass runs at the same time."""

    def entered(self) -> AbstractContextManager[None]:
        """Around any piece of its work, forward or backward; may be entered again and again."""

    def outputs(self, module: nn.Module) -> Any:
        """The forward pass: what the module gives for its inputs."""

    def total(self, outputs: Any) -> torch.Tensor:
        """The sum of losses to call backward on; loss and count of targets are noted here."""


def in_turn(program: Program, passes: Sequence[Pass], reducer: Reducer) -> None:
    """Run the passes of a step one after another."""
    for place, one in enumerate(passes):
        reducer.arm(place == len(passes) - 1)
        one(program.module)
        reducer.passed(one.index >= 0)


@dataclass(frozen=True)
class Local:
    """The part of one trainable parameter that this rank's optimizer steps.

    Attributes:
        parameter: the module's own parameter, or a view of a part of it.
        shard: where that part lies in the whole tensor.
    """

    parameter: nn.Parameter
    shard: Shard


Part = tuple[torch.Tensor, Shard]
"""A local tensor and where its elements belong; no slices where a rank holds nothing."""


@dataclass(frozen=True)
class Program:
    """A module on this rank, made ready to train: its part, its worlds, what runs around a step.

    Attributes:
        world: all processes.
        data: those that hold the same parts of the model as this one, and run other micro-batches;
            `tensor`: that split its layers; `pipe`: its stages; `context`: that share its
            sequences.
        parameters: trainable ones of this rank by name, tied ones once, in the module's order.
        sums: worlds over which the gradient of each is summed, in that order: data-parallel ranks
            with the same part at first.
        local: the part of each that this rank's optimizer steps; absent where it has none.
        parts: what is kept of parameters that no rank holds whole (or not in their own format).
        frozen: the others by name; they must stay frozen, since nothing sums their gradients.
        aliases: other names of tied tensors → the name under which they are kept.
        run: runs the passes of a step on the module, telling the reducer of each.
        forward: a pass for evaluation; gives None where the outputs are not on this rank.
        twin: the module without data, for counting, where it cannot be copied itself.
        passes: forward passes on the sample until now, by what for (`trace.record.Record`).
        mirrored: `data` and the ranks of a pipeline's second copy that hold the same, or those of
            `data` that do where servers hold tables; None: `data`.
        together: every rank must run as many passes as the busiest one (parameters are gathered).
        unit_log: which units this rank gathers, in order (`unit_log.UnitLog`), where it gathers
            any.
        prepare: functions on the inputs of a micro-batch (device, dtype).
        keyed: keys the generators to a micro-batch, by (step, number).
        around: its other rules.
        travel: tells what tp and pp make travel, where that is stated.
        autocast: around the forward pass only.
        moved, align: did a loose buffer change on this rank · make such buffers equal on all ranks
            (True: and as they were before a step that is skipped).
        owed: what codes of gradients left out: kept in checkpoints (`compress.Owed`).
        on_begin: called before the first micro-batch of every step.
        on_update: called once per committed step, after the reduction, with whether some ranks ran
            more micro-batches than others.
        on_evaluate, on_evaluated: called before an evaluation's first forward pass, after its last
            one.
        on_close: called at the end: takes away whatever was hung on the user's module.
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
    local: dict[str, Local] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    reducer: Reducer | None = None
    run: Callable[[Program, Sequence[Pass], Reducer], None] = in_turn
    forward: Callable[[Program, Pass], Any] = lambda program, one: one.outputs(program.module)
    mirrored: World | None = None
    together: bool = False
    unit_log: UnitLog | None = None
    twin: nn.Module | None = None
    passes: Mapping[str, int] = field(default_factory=dict)
    travel: Callable[[], Travel] | None = None
    prepare: tuple[Callable[[Any], Any], ...] = ()
    keyed: Callable[[int, int], AbstractContextManager[None]] | None = None
    around: tuple[Callable[[int, int], AbstractContextManager[None]], ...] = ()
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    moved: Callable[[], bool] = lambda: False
    align: Callable[[bool], None] = lambda skipped: None
    owed: Any = None
    on_begin: tuple[Callable[[], None], ...] = ()
    on_update: tuple[Callable[[bool], None], ...] = ()
    on_evaluate: tuple[Callable[[], None], ...] = ()
    on_evaluated: tuple[Callable[[], None], ...] = ()
    on_close: tuple[Callable[[], None], ...] = ()
    notices: list[str] = field(default_factory=list)

    def but(self, **changes: Any) -> Program:
        """The same program under a plan with some fields changed."""
        return replace(self, plan=replace(self.plan, **changes))

    @property
    def speaks(self) -> bool:
        """Whether this rank's loss counts: of those that compute the same, the first."""
        return self.tensor.rank == 0 == self.context.rank

    @property
    def differentiates(self) -> bool:
        """Whether this rank's loss is differentiated: ranks that share a sequence count it once."""
        return self.context.rank == 0

    @property
    def replicas(self) -> World:
        """All ranks that hold the same part of the model, whichever micro-batches they see."""
        return self.data if self.mirrored is None else self.mirrored

    @cached_property
    def rows(self) -> dict[str, Placement]:
        """The plan's placements by name: of all tensors of the model, the same on every rank."""
        return {row.name: row for row in self.plan.placements}

    @cached_property
    def at(self) -> dict[str, int]:
        """Where this rank is along every axis."""
        return self.plan.layout.at(self.world.rank)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Trainable parameters of the whole model, the same on every rank."""
        return tuple(row.name for row in self.plan.placements if row.trains)

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """Of parameters that tp or ep cuts inside, how."""
        return {name: row.cut for name, row in self.rows.items() if row.cut is not None}

    @cached_property
    def copies_of_sum(self) -> dict[str, int]:
        """How many ranks hold the same element of the summed gradient, by parameter."""
        return {name: self.rows[name].copies_of_sum(self.plan.layout) for name in self.names}

    @cached_property
    def shared(self) -> bool:
        """Whether a gradient of this rank is summed over others than data-parallel ranks."""
        return any(len(worlds) > 1 for worlds in self.sums.values())

    def place(self, name: str) -> Shard:
        """Where this rank's parameter or buffer `name` lies in the whole model's tensor."""
        if name not in self.rows:
            raise BugError(f"{name} is no tensor of the model")
        return self.rows[name].shard(self.at)

    def is_expert(self, name: str) -> bool:
        """Whether data-parallel ranks have dealt a parameter out."""
        return name in self.rows and self.rows[name].is_expert


def undivided(module: nn.Module, plan: Plan, world: World) -> Program:
    """A program of the whole module, which nothing has been added to."""
    degrees, workers = plan.layout.degrees, plan.layout.processes - plan.layout.servers
    return Program(
        module,
        world,
        plan,
        trainable(module),
        aliases(module),
        data=along(world, degrees, DATA_AXES),
        tensor=along(world, degrees, ["tp"]),
        pipe=along(world, degrees, ["pp"]),
        context=along(world, degrees, ["cp"]),
        mirrored=among(world, [tuple(range(workers))]) if plan.layout.serves else None,
        blocks=tuple(find_blocks(module, plan)),
        frozen=frozen(module),
    )


def bind(program: Program, rows: Iterable[Placement]) -> Program:
    """Give a program its placements, and make the process groups over which they are summed.

    Every rank calls it with equal rows: that is how groups are made.
    """
    program = program.but(placements=tuple(rows))
    layout, world = program.plan.layout, program.world
    beyond = {"tp": program.tensor, "cp": program.context}
    lines = members(layout.degrees, ["pp"])
    known: dict[tuple[Any, ...], tuple[World, ...]] = {}
    sums = {}
    for name in program.names:
        row = program.rows[name]
        key = row.travels_with(layout)
        if key not in known:
            grid = layout.expert_degrees if row.is_expert else layout.degrees
            together = layout.serves and not row.is_table  # servers hold nothing of it
            worlds = [program.replicas if together else along(world, grid, row.data_axes)]
            worlds += [beyond[axis] for axis in row.sum_over if axis in beyond]
            if "pp" in row.sum_over:  # also ranks that hold no part of it make the group
                sharers = [tuple(line[stage] for stage in row.stages) for line in lines]
                worlds.append(among(world, sharers))
            known[key] = tuple(worlds)
        if program.at["pp"] in row.stages:
            sums[name] = known[key]
    return replace(program, sums=sums)


def whole_locals(program: Program) -> dict[str, Local]:
    """Every parameter as this rank has it, as one process and `ddp` step them."""
    return {name: Local(p, program.place(name)) for name, p in program.parameters.items()}


def take(tensor: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """Copy the part of a whole tensor that rank `rank` of the cut's axis holds, row by row."""
    parts = [tensor.narrow(cut.dim, start, stop - start) for start, stop in cut.spans(rank)]
    if len(parts) > 1:
        return torch.cat(parts, cut.dim).contiguous()
    # A copy even where it is a view of rows, which would keep all of them.
    return parts[0].clone(memory_format=torch.contiguous_format)


def dtype_of(tensor: torch.Tensor) -> str:
    """Name a tensor's element type as torch does, without the prefix: float32, bfloat16, int64."""
    return str(tensor.dtype).removeprefix("torch.")


def laid_out_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` of a flat buffer, seen with the parameter's shape and order of elements in memory.

    torch's fused CPU kernels walk weight and gradient side by side in memory and ignore strides: a
    channels_last weight with a gradient in row order would get other elements' updates, silently.
    """
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return part.view_as(parameter)  # gaps or overlaps: autograd keeps row order for these too
    return part.as_strided(parameter.shape, parameter.stride())


def own_blocks(program: Program) -> Iterator[tuple[str, nn.Module]]:
    """The blocks whose parameters are on this rank, and not on another stage of a pipeline."""
    for name in program.blocks:
        block = program.module.get_submodule(name)
        if not any(p.is_meta for p in block.parameters()):
            yield name, block


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """List trainable parameters by first name, tied ones once; without those on the meta device."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad and not p.is_meta}


def frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that do not train, by their first name."""
    return {n: p for n, p in module.named_parameters() if not p.requires_grad and not p.is_meta}


def aliases(module: nn.Module) -> dict[str, str]:
    """Second names of tied parameters and buffers → first name.

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
