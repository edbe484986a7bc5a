"""Measures what one step of a run holds at its peak, beside what the planner foresees of it."""

from __future__ import annotations

import functools
import gc
import logging
import logging.handlers
import queue
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.base.estimates.estimate import ModelFacts, PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.fabric.collectives.uneven_collectives import TransferBuffer
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.fit.peak_memory import predict_memory, validation_micro_batch
from shoal.forecast.memory.transient_memory import gathered_elements
from shoal.machine.states import count_state_bytes, measure_peak_bytes
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.planning.gradient_buckets import plan_buckets
from shoal.planning.pipeline_stages import stage_units
from shoal.trace.costs.traced_facts import trace_facts
from shoal.trainer import parallelize as module
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

SEQUENCE, VOCABULARY = 64, 512
MICRO_BATCH = {"llama": 2, "layers": 8, "listed": 8, "attributes": 8, "often": 8}
LINK = Link("wire", 1e-6, 1e9)

Samples = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two layers and what is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Four blocks between two layers: in a list, as plain attributes, or one called four times."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 8)
        if how == "listed":
            self.blocks = nn.ModuleList(Block() for _ in range(4))
        elif how == "often":
            self.block = Block()
        else:
            self.block0, self.block1, self.block2, self.block3 = (Block() for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for n in range(4):
            each = {"listed": f"blocks.{n}", "often": "block"}.get(self.how, f"block{n}")
            x = self.get_submodule(each)(x)
        return self.last(x)


def model(name: str) -> nn.Module:
    """Blocks with attention, `BlockIndex`, bare layers, which fsdp leaves in the root."""
    if name in ("listed", "attributes", "often"):
        return Blocks(name)
    if name == "llama":
        arguments = {"dim": 256, "layers": 3, "heads": 4}
        return build("llama", arguments, vocabulary=VOCABULARY, sequence=SEQUENCE)
    return nn.Sequential(nn.Linear(64, 768), nn.GELU(), nn.Linear(768, 768), nn.Linear(768, 8))


def samples(name: str, count: int, rank: int = 0) -> Samples:
    """Inputs and targets, each rank its own."""
    torch.manual_seed(1 + rank)
    if name == "llama":
        tokens = torch.randint(0, VOCABULARY, (count, SEQUENCE))
        return tokens, tokens
    return torch.randn(count, 64), torch.randn(count, 8)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss per element."""
    return (outputs - targets) ** 2


@functools.cache
def facts(name: str) -> ModelFacts:
    """As a run's prediction has them."""
    inputs, targets = samples(name, 2)
    loss = token_loss if name == "llama" else squares
    return trace_facts(lambda: model(name), (inputs,), kernels="cpu", loss=loss, targets=targets)


def held_and_foreseen(
    world: World, name: str, layouts: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Peak bytes of this rank, and as foreseen, for every layout; `rounds` micro-batches each."""
    known = facts(name)
    return [one(world, name, layout, rounds, known) for layout in layouts]


def gathered(world: World, name: str, starts: int) -> dict[str, Any]:
    """What fsdp gathers at once in a step, in elements, beside the plan's; lines at the start.

    And the most that a start holds, of so many that are looked at, beside what is foreseen of it.
    """
    known, samples_ = facts(name), samples(name, 2, world.rank)

    def begin() -> Run:
        return parallelize(
            lambda: model(name),
            lambda p: torch.optim.AdamW(p, lr=1e-3),
            squares,
            layout="fsdp",
            batch=2 * world.size,
            micro_batch=2,
            sample=samples_,
            world=world,
        )

    def begin_and_end() -> None:
        for undo in begin().program.on_close:
            undo()
        gc.collect()  # else the next one may begin with this one's shards: modules are cycles

    start_bytes = measure_peak_bytes(begin_and_end, world.device, times=starts) if starts else 0
    told = logging.handlers.QueueHandler(queue.SimpleQueue())  # rank 0's lines go through logging
    logging.getLogger("shoal").addHandler(told)
    run = begin()
    logging.getLogger("shoal").removeHandler(told)
    notices = [told.queue.get().getMessage() for _ in range(told.queue.qsize())]
    sizes: set[int] = set()
    count = world.traffic.count

    def counting(kind: str, payload_bytes: int, degree: int, *axis: str) -> None:
        if kind == "all_gather" and payload_bytes > 4096:  # less is what ranks agree on in words
            sizes.add(payload_bytes // 4)
        count(kind, payload_bytes, degree, *axis)

    world.traffic.count = counting
    run.step(samples_)
    del world.traffic.count
    for undo in run.program.on_close:
        undo()
    case = case_of(known, run.plan.layout, world.size, run.plan.batch, 2)
    blocks, root = gathered_elements(case, stage_units(case, 0))
    return {
        "sizes": sorted(sizes),
        "foreseen": sorted({*map(round, blocks), round(root)}),
        "notices": notices,
        "start_bytes": start_bytes,
        "start_foreseen": next(
            one.device_bytes for one in predict_run(case).instants if one.name == "building"
        ),
    }


def case_of(
    known: ModelFacts,
    layout: Layout,
    ranks: int,
    batch: int,
    rows: int,
    loss: str = "full",
    reshard: str = "yes",
) -> PlanningCase:
    """The run as the planner sees it."""
    machine = Cluster(Device("cpu", 1e12, {}, 1e10, kind="cpu"), 1, ranks, LINK, LINK)
    plan = Plan(layout, batch, rows, compute="fp32", reshard=reshard)
    return PlanningCase(known, machine, plan, loss=loss)


def one(world: World, name: str, layout: str, rounds: int, known: ModelFacts) -> dict[str, Any]:
    """One layout; after a space what fsdp does with blocks between their passes."""
    layout, _, reshard = layout.partition(" ")
    reshard = reshard or "yes"
    gc.collect()  # else a step may begin with the shards of the run before: modules are cycles
    torch.manual_seed(0)
    rows = MICRO_BATCH[name]
    run = parallelize(
        model(name),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        token_loss if name == "llama" else squares,
        layout=layout,
        batch=rounds * rows * world.size,
        micro_batch=rows,
        sample=samples(name, rows),
        world=world,
        reshard=reshard,
    )
    batch = samples(name, rounds * rows, world.rank)
    run.step(batch)
    states = count_state_bytes(run)
    # On busy cores gloo lets go late in one run of six, and "layers" is one buffer: of more, the middle.
    times = 9 if name == "layers" else 5
    extra_bytes = measure_peak_bytes(lambda: run.step(batch), world.device, times=times)
    loss = "chunked" if name == "llama" else "full"
    case = case_of(known, run.plan.layout, world.size, run.plan.batch, rows, loss, reshard)
    foreseen = predict_memory(case)
    at_once = validation_micro_batch(case, foreseen)
    held_out = [samples(name, at_once, world.rank)]
    sizes: list[int] = []
    watch = run.model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    validating = measure_peak_bytes(lambda: run.evaluate(held_out), world.device, times=times)
    watch.remove()
    for undo in run.program.on_close:
        undo()
    return {
        "step_bytes": extra_bytes,
        "validation": {"at_once": at_once, "sizes": sorted(set(sizes)), "bytes": validating},
        "held": states.total + kept_bytes(run.program.reducer) + extra_bytes,
        "foreseen": foreseen.allocated_bytes,
        "parts": foreseen.parts,
        "states": states.total,
    }


def kept_bytes(reducer: Any) -> int:
    """Memory of transfers that stays from step to step."""
    held = [*vars(reducer).values(), *vars(getattr(reducer, "weights", object)).values()]
    each = [one for many in held for one in (many if isinstance(many, list | tuple) else [many])]
    buffers = {id(one): one for one in each if isinstance(one, TransferBuffer)}
    return sum(one.held_bytes for one in buffers.values())


WIDTH, LAYERS = 256, 6


def large_blocks(world: World, layouts: list[str]) -> dict[str, Any]:
    """By layout the blocks that a step allocates anew, from half a weight on, in KiB.

    Each weight is a bucket, so half of one is this rank's part. And whether the gradients of a step
    are still there after its update, which sends weights in the memory of transfers.
    """
    found = {}
    for layout in layouts:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        each = functools.partial(plan_buckets, bucket_bytes=1)
        with mock.patch.object(module, "plan_buckets", each):
            run = parallelize(
                nn.Sequential(*layers),
                lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
                squares,
                layout=layout,
                batch=8 * world.size,
                micro_batch=4,
                world=world,
                prove="off",
            )
        torch.manual_seed(1 + world.rank)
        batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        for _ in range(3):
            run.step(batch)
        blocks = allocated_blocks(functools.partial(run.step, batch), WIDTH * WIDTH * 4 // 2)
        run.forward_backward(batch)
        gradients = [one.parameter.grad for one in run.program.local.values()]
        before = [one.clone() for one in gradients]
        run.update()
        for undo in run.program.on_close:
            undo()
        stay = all(map(torch.equal, gradients, before))
        found[layout] = {"blocks": [size // 1024 for size in blocks], "gradients_stay": stay}
    return found


def allocated_blocks(work: Callable[[], object], least_bytes: int) -> list[int]:
    """Sizes of the blocks that this thread allocates during a call, from `least_bytes` on."""
    with profile(use_kineto=True, profile_memory=True) as recorded:
        work()
    waiting, found = list(recorded.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation" and event.extra_fields.alloc_size >= least_bytes:
            found.append(event.extra_fields.alloc_size)
    return sorted(found)
