"""Pipelines in a real world: equal to one process, as much alive as planned, as fast as planned."""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shoal.base.errors import ShoalError
from shoal.base.plans.pipeline_actions import PipelineSchedule
from shoal.fabric import World
from shoal.fabric.exchanges import point_to_point
from shoal.fabric.exchanges.point_to_point import PointToPoint
from shoal.models import catalog
from shoal.models.loss import token_loss
from shoal.parallel.pipeline import free_other_stages
from shoal.parallel.pipeline.cut_model import cut_stages
from shoal.parallel.pipeline.runtime import PipeRuntime
from shoal.parallel.pipeline.stage import PipelineStages
from shoal.parallel.pipeline.stage_messages import StageMessage, StageMessenger, derive_route
from shoal.planning.pipeline_schedules import make_schedule
from shoal.planning.schedule_checks import CLOSES, check_schedule
from shoal.trace.flow.forward_record import ForwardRecord

WIDTH = 6


class _Alive(torch.autograd.Function):
    """Identity; counts the graphs that are alive."""

    @staticmethod
    def forward(ctx, x, alive):
        ctx.token = Token()
        alive.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Token:
    """Lives as long as the graph that it is in."""


class Piece(nn.Module):
    """A block with what makes messages hard: see `begin` for the values that it hands on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        wide = {"dtype": torch.float64}
        self.first, self.second = nn.Linear(WIDTH, 9, **wide), nn.Linear(9, WIDTH, **wide)
        self.norm = nn.LayerNorm(WIDTH, **wide)
        self.scale = nn.Parameter(torch.randn(WIDTH, **wide))
        self.table = nn.Parameter(torch.randn(4, WIDTH, **wide))
        self.in_place = number % 2 == 0
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()

    def forward(self, turned, skip, unused, empty, ids, mask):
        if torch.is_grad_enabled():
            turned = _Alive.apply(turned, self.alive)
        elif self.in_place:
            turned = turned.clone()
        # the arrival itself, changed in place, where this piece is the first of its stage
        skip = skip.add_(0.25) if self.in_place else skip
        x = turned.transpose(0, 1)
        x = self.norm(x) * self.scale + self.table[ids]
        x = x + self.second(F.gelu(self.first(x))) * self.scale
        x = torch.where(mask.unsqueeze(1), x, x + 0.1 * skip)
        return x.transpose(0, 1), skip, unused, empty, ids, mask


def begin(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A value that is not contiguous, one that skips stages, one that nobody needs, one without
    elements, integers, booleans."""
    x, weight = inputs["x"], inputs["weight"]
    skip = (x * weight).sin()
    return (x * weight).transpose(0, 1), skip, skip * 2, skip[:0], inputs["ids"], inputs["ids"] > 1


class Pieces(nn.Module):
    """Consecutive blocks of the model; the first ones start from the inputs."""

    def __init__(self, numbers: range, *, is_first: bool, is_last: bool, total: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Piece(number) for number in numbers)
        self.is_first, self.is_last = is_first, is_last
        self.arrivals: tuple[torch.Tensor, ...] = ()
        if is_first:
            self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH, dtype=torch.float64))

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        state = self.arrivals
        if self.is_first:
            state = begin({**inputs, "weight": self.weight})
        self.arrivals = ()
        for block in self.blocks:
            state = block(*state)
        return state[0] + state[1].T if self.is_last else state


@dataclass
class Cut:
    """A stage, as the runtime wants it."""

    module: Pieces

    def check_forwards(self) -> None:
        """It replaces none."""

    def run(self, call: Callable[[Any], Any], arrivals: tuple[Any, ...]) -> Any:
        self.module.arrivals = arrivals
        return call(self.module)


@dataclass
class One:
    """A micro-batch, as the runtime wants it."""

    index: int
    inputs: dict[str, torch.Tensor]
    losses: list[torch.Tensor]
    scale: float = 1.0
    inside: int = 0

    @property
    def signature(self) -> Any:
        return tuple((k, tuple(v.shape)) for k, v in self.inputs.items())

    @contextmanager
    def keyed_context(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    def outputs(self, module: nn.Module) -> Any:
        assert self.inside == 1
        return module(self.inputs)

    def compute_loss(self, outputs: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(1, WIDTH + 1, device=outputs.device).unsqueeze(1)
        loss = (outputs * rows).square().sum()
        self.losses.append(loss.detach())
        return loss * self.scale


def micro_batch(
    index: int,
    losses: list[torch.Tensor],
    scale: float = 1.0,
    device: torch.device | None = None,
) -> One:
    """Sizes differ, and come again."""
    generator = torch.Generator().manual_seed(100 + index)
    size = (3, 1, 4, 3, 2)[index % 5]
    x = torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)
    ids = torch.randint(4, (size,), generator=generator)
    return One(index, {"x": x.to(device), "ids": ids.to(device)}, losses, scale)


@dataclass
class Told:
    """A reducer that writes down what it is told."""

    armed: list[bool] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        self.armed.append(last)

    def end_backward(self, counted: bool) -> None:
        self.counted.append(counted)


BLOCKS = 8


def pieces(stage: int, stages: int) -> Pieces:
    """The blocks of one stage."""
    cuts = [BLOCKS * s // stages for s in range(stages + 1)]
    return Pieces(
        range(cuts[stage], cuts[stage + 1]),
        is_first=stage == 0,
        is_last=stage == stages - 1,
        total=stages,
    )


def build(world: World, schedule: str, chunks: int, swap: tuple[int, ...] = ()) -> PipeRuntime:
    """This rank's runtime; swap: stages that are held in each other's place."""
    make = functools.partial(make_schedule, schedule, world.size, chunks=chunks)
    lists = make(2 * world.size)
    held = {s: s % lists.stages_per_copy for s in range(lists.stages)}
    if swap:
        held |= {swap[0]: swap[1], swap[1]: swap[0]}
    stages = {
        s: Cut(pieces(held[s], lists.stages_per_copy).to(world.device))
        for s, rank in enumerate(lists.stage_rank)
        if rank == world.rank
    }
    return PipeRuntime(stages, lists.stage_rank, world, make, copies=lists.copies)


def whole_gradients(
    device: torch.device, stages: int, micro_batches: int, frozen: int = 0
) -> tuple[list[Pieces], float, list[torch.Tensor]]:
    """One process: every stage's blocks with gradients, the loss, outputs of each micro-batch."""
    parts = [pieces(s, stages).to(device) for s in range(stages)]
    freeze(parts, frozen)
    losses: list[torch.Tensor] = []
    outputs = []
    for index in range(micro_batches):
        one = micro_batch(index, losses, device=device)
        state: Any = None
        for part in parts:
            part.arrivals = state
            state = part(one.inputs)
        outputs.append(state.detach())
        with one.keyed_context():
            one.compute_loss(state).backward()
    return parts, float(sum(losses)), outputs


def freeze(parts: list[Pieces], stages: int) -> None:
    for part in parts[:stages]:
        part.requires_grad_(False)


def equality(
    world: World,
    schedule: str,
    micro_batches: int,
    chunks: int = 1,
    frozen: int = 0,
    planted: str = "",
) -> dict[str, Any]:
    """A step twice, then evaluation, against one process."""
    runtime = build(world, schedule, chunks, (1, 2) if planted == "stage order" else ())
    stages = runtime.pieces
    freeze([runtime.stages[s].module for s in sorted(runtime.stages) if s < frozen], stages)
    parts, loss, outputs = whole_gradients(world.device, stages, micro_batches, frozen)
    if planted == "dropped micro-batch":
        runtime.schedules[micro_batches] = without(runtime.schedule(micro_batches), 1)
    modules = {s: stage.module for s, stage in runtime.stages.items()}
    scale = 1 / micro_batches if planted == "running average" else 1.0
    sent, timed, losses, reducer = [], [], [], Told()
    most: Counter[int] = Counter()
    watch(runtime, most)
    for turn in range(2):
        losses, reducer = [], Told()
        if turn:
            runtime.times.request_step()
        for module in modules.values():
            module.zero_grad()
        world.traffic.pop_counts()
        passes = [micro_batch(k, losses, scale, world.device) for k in range(micro_batches)]
        runtime.run(None, passes, reducer)
        sent.append(world.traffic.pop_counts()[0].get("send", 0))
        timed.append(runtime.times.pop_step())
    given = runtime.schedules[micro_batches]
    left = sum(alive(module) for module in modules.values()) + len(runtime.kept)
    apart = [
        far(gradients, [p.grad for p in parts[piece].parameters()])
        for piece, gradients in both_copies(world, runtime, parts)
    ]
    total = torch.tensor(float(sum(losses)), dtype=torch.float64, device=world.device)
    world.all_reduce(total)
    shown = [
        runtime.forward_only(micro_batch(index, [], device=world.device))
        for index in range(micro_batches)
    ]
    runtime.wait_for_sends()
    told = {
        "far": max(apart),
        "loss": abs(float(total) - loss) / loss,
        "eval": max(far([a], [b]) for a, b in zip(shown, outputs, strict=True))
        if any(one is not None for one in shown)
        else None,
        "most": {str(s): most[s] for s in modules},
        "left": left,
        "sent": sent,
        "armed": reducer.armed,
        "closes": sum(act.kind in "BW" for act in given.ranks[world.rank]),
        "counted": reducer.counted.count(True),
        "timed": timed,
        "acts": [act.text() for act in given.ranks[world.rank]],
    }
    if not planted:
        told["planned"] = {str(s): most_in_flight(given, s) for s in modules}
        told["payload"] = payload_bytes(world, runtime, given, frozen)
    return told


def most_in_flight(given: PipelineSchedule, stage: int) -> int:
    """Most micro-batches of a stage that are open at once: from F until B or W."""
    acts = [act for act in given.ranks[given.stage_rank[stage]] if act.stage == stage]
    changes = ((act.kind == "F") - (act.kind in CLOSES) for act in acts)
    return max(accumulate(changes))


def both_copies(
    world: World, runtime: PipeRuntime, parts: list[Pieces]
) -> Iterator[tuple[int, list[torch.Tensor | None]]]:
    """Gradients of each piece of this rank; where there are two copies, of all, summed over them."""
    own = {s % runtime.pieces: stage.module for s, stage in runtime.stages.items()}
    if runtime.pieces == len(runtime.stage_rank):
        for piece, module in own.items():
            yield piece, [p.grad for p in module.parameters()]
        return
    for piece, part in enumerate(parts):
        summed = [torch.zeros_like(parameter) for parameter in part.parameters()]
        here = own[piece].parameters() if piece in own else ()
        for total, parameter in zip(summed, here, strict=False):
            if parameter.grad is not None:  # a copy without micro-batches has none
                total += parameter.grad
        for total in summed:
            world.all_reduce(total)
        yield piece, summed


def watch(runtime: PipeRuntime, most: Counter[int]) -> None:
    """Count the graphs that are alive after every forward of a stage."""

    def watched(stage: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            made = run(*given)
            if torch.is_grad_enabled():
                most[stage] = max(most[stage], alive(runtime.stages[stage].module))
            return made

        return call

    for number, stage in runtime.stages.items():
        stage.run = watched(number, stage.run)


def alive(module: Pieces) -> int:
    """Micro-batches of which some graph is alive."""
    return max(len(block.alive) for block in module.blocks)


def payload_bytes(
    world: World, runtime: PipeRuntime, schedule: PipelineSchedule, frozen: int
) -> int:
    """What a step's messages weigh that leave this rank, headers apart."""
    total, place = 0, runtime.stage_rank
    for stage in runtime.stages:
        piece = stage % schedule.stages_per_copy
        for index in schedule.runs(stage):
            size = micro_batch(index, []).inputs["x"].shape[0]
            wide = size * WIDTH * 8
            if piece + 1 < schedule.stages_per_copy and place[stage + 1] != world.rank:
                total += 3 * wide + size * 8 + size  # three wide values, integers, booleans
            if piece > 0 and place[stage - 1] != world.rank:
                # after frozen stages only what later blocks made needs a gradient
                total += (wide if frozen else 3 * wide) if piece > frozen else 0
    return total


def far(ones: list[torch.Tensor | None], others: list[torch.Tensor | None]) -> float:
    """Distance as a share of the others' norm; None equals None only."""
    assert [a is None for a in ones] == [b is None for b in others]
    pairs = [(a, b) for a, b in zip(ones, others, strict=True) if a is not None]
    if not pairs:
        return 0.0
    one = torch.cat([a.flatten() for a, _ in pairs])
    other = torch.cat([b.flatten() for _, b in pairs])
    return float((one - other).norm() / other.norm())


def without(schedule: PipelineSchedule, micro_batch: int) -> PipelineSchedule:
    """The bug of forgetting one micro-batch."""
    lists = tuple(
        tuple(act for act in acts if act.micro_batch != micro_batch) for acts in schedule.ranks
    )
    return PipelineSchedule(schedule.name, lists, schedule.stage_rank, schedule.micro_batches)


def derived(world: World, schedule: str, chunks: int = 1) -> dict[str, float]:
    """Stages derived from our own Llama, with tied embedding and head, over real messages."""
    sizes = {"vocabulary": 31, "dim": 16, "layers": 8, "heads": 4, "kv_heads": 2, "hidden": 24}
    torch.manual_seed(0)
    whole = catalog.build("llama", {**sizes, "sequence": 8}).double().to(world.device)
    module = copy.deepcopy(whole)

    def tokens(index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randint(31, (1 + index % 3, 8), generator=generator)
        return {"x": x.to(world.device)}

    def sample(one: nn.Module) -> Any:
        return one(tokens(2)["x"])

    make = functools.partial(make_schedule, schedule, world.size, chunks=chunks)
    lists = make(2 * world.size)
    placed = lists.stage_rank
    cut = cut_stages(ForwardRecord(module, sample), lists.stages_per_copy)
    own = {s: s % lists.stages_per_copy for s, rank in enumerate(placed) if rank == world.rank}
    free_other_stages(module, set().union(*(cut.keep[piece] for piece in own.values())))
    held = PipelineStages(module, cut, own.values(), world.device)
    stages = {stage: held.stages[piece] for stage, piece in own.items()}
    runtime = PipeRuntime(stages, placed, world, make, copies=lists.copies)
    losses: list[torch.Tensor] = []
    passes = [Tokens(index, tokens(index), losses) for index in range(6)]
    runtime.run(None, passes, Told())
    held.restore_forwards()
    expected: list[torch.Tensor] = []
    for index in range(6):
        one = Tokens(index, tokens(index), expected)
        with one.keyed_context():
            one.compute_loss(one.outputs(whole)).backward()
    grads = []
    for name, parameter in whole.named_parameters():
        here = dict(module.named_parameters())[name]
        mine = torch.zeros_like(parameter) if here.is_meta else here.grad
        world.all_reduce(mine)  # a tied weight gets its gradient on two stages
        grads.append((mine, parameter.grad))
    total = torch.tensor(float(sum(losses)), dtype=torch.float64, device=world.device)
    world.all_reduce(total)
    return {
        "far": far([a for a, _ in grads], [b for _, b in grads]),
        "loss": abs(float(total - sum(expected))) / float(sum(expected)),
    }


class Tokens(One):
    """A micro-batch of a language model."""

    def outputs(self, module: nn.Module) -> Any:
        return module(self.inputs["x"])

    def compute_loss(self, outputs: Any) -> torch.Tensor:
        loss, _ = token_loss(outputs, self.inputs["x"].roll(-1, 1))
        self.losses.append(loss.detach())
        return loss


def formats(world: World) -> list[bool]:
    """Every dtype, shapes with no dims or no elements, and strides, between neighbours in a ring;
    many in flight both ways."""
    wire = PointToPoint(world)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    kinds = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16,
             torch.float32, torch.float64, torch.complex64]  # fmt: skip

    def drawn(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        made = [(torch.randn(3, 5) * 9).to(kind) for kind in kinds]
        made += [torch.tensor(2.5 + rank), torch.empty(0, 4), torch.randn(4, 6).T[1:, ::2]]
        made += [torch.randn(3, 1).expand(3, 4), torch.randn(300_000)]
        return [one.to(world.device) for one in made]

    out = [wire.send(tensor, peer) for peer in (after, before) for tensor in drawn(world.rank)]
    right = []
    for peer in (before, after):
        expected = drawn(peer)
        coming = [wire.receive(tuple(t.shape), t.dtype, peer) for t in expected]
        right += [torch.equal(a.wait(), b) for a, b in zip(coming, expected, strict=True)]
    for sent in out:
        sent.wait()
    return right


def too_late(world: World) -> str:
    """Rank 0 never sends; the others' deadline is short."""
    soon = timedelta(seconds=1)
    group = dist.new_group(timeout=soon)
    pipe = World.__new__(World)
    pipe.__dict__ |= {**world.__dict__, "group": group}
    schedule = make_schedule("gpipe", world.size, 4)

    told = ""
    with mock.patch.object(point_to_point, "COLLECTIVE_TIMEOUT", soon):
        messages = StageMessenger(pipe)  # all ranks together
    if world.rank == 1:
        messages.start_step(derive_route(schedule, 1), schedule.stage_rank, lambda number: number)
        try:
            messages.receive(StageMessage("F", 1, 0))
        except ShoalError as error:
            told = f"{type(error).__name__}: {error}"
    world.barrier()
    return told


class _Work(torch.autograd.Function):
    """Takes its time, forward and backward."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """A stage of given durations."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.seconds = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.ones(256))
        self.arrivals: tuple[torch.Tensor, ...] = ()

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        forward_s, input_s, weight_s = self.seconds
        x = self.arrivals[0] if self.arrivals else inputs["x"]
        self.arrivals = ()
        x = _Work.apply(x, forward_s, input_s)
        return (x * _Work.apply(self.weight, 0.0, weight_s),)


class Slow(One):
    """A micro-batch for sleepers."""

    def compute_loss(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return outputs[0].sum()


def makespan(
    world: World, schedule: str, micro_batches: int, chunks: int, seconds: list[float]
) -> dict[str, float]:
    """When this rank began and ended a step's work, on the machine's clock, and what was planned.

    seconds   forward, input, weight: of one rank and micro-batch, all its chunks together
    """
    make = functools.partial(make_schedule, schedule, world.size, chunks=chunks)
    lists = make(micro_batches)
    each = [s * world.size / lists.stages_per_copy for s in seconds]
    runtime = PipeRuntime(
        {s: Cut(Sleeper(*each)) for s, rank in enumerate(lists.stage_rank) if rank == world.rank},
        lists.stage_rank,
        world,
        make,
        copies=lists.copies,
    )
    inputs = {"x": torch.ones(64, 256, requires_grad=True)}
    passes = [Slow(index, inputs, []) for index in range(micro_batches)]
    runtime.run(None, passes[:2], Told())  # forms are told, connections made
    world.barrier()
    began_s = time.perf_counter()
    runtime.run(None, passes, Told())
    ended_s = time.perf_counter()
    planned = check_schedule(lists, *seconds, blocks=False)
    return {"began": began_s, "ended": ended_s, "planned": planned.makespan_s}
