"""Measures what one step of a run holds at its peak, beside what the planner foresees of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.cluster import Cluster, Device, Link
from shoal.base.estimate import Case, ModelFacts
from shoal.fabric import World
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.planner.memory import predict_memory
from shoal.profile.states import peak_extra_bytes, state_bytes
from shoal.profile.trace import trace_facts
from shoal.trainer.parallelize import parallelize

SEQUENCE, VOCABULARY = 64, 512
MICRO_BATCH = {"llama": 2, "layers": 8}
LINK = Link("wire", 1e-6, 1e9)

Samples = tuple[Tensor, Tensor]


def model(name: str) -> nn.Module:
    """Blocks with attention, or bare layers, which fsdp leaves in the root."""
    if name == "llama":
        arguments = {"dim": 256, "layers": 3, "heads": 4}
        return build("llama", arguments, vocabulary=VOCABULARY, sequence=SEQUENCE)
    return nn.Sequential(nn.Linear(64, 768), nn.GELU(), nn.Linear(768, 768), nn.Linear(768, 8))


def samples(name: str, count: int) -> Samples:
    """Inputs and targets."""
    torch.manual_seed(1)
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


def one(world: World, name: str, layout: str, rounds: int, known: ModelFacts) -> dict[str, Any]:
    """One layout."""
    torch.manual_seed(0)
    rows = MICRO_BATCH[name]
    run = parallelize(
        model(name),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        token_loss if name == "llama" else squares,
        layout=layout,
        batch=rounds * rows * world.size,
        micro_batch=rows,
        world=world,
    )
    batch = samples(name, rounds * rows)
    run.step(batch)
    states = state_bytes(run)
    # On busy cores gloo lets go late in one run of six, and "layers" is one buffer: of more, the middle.
    times = 9 if name == "layers" else 5
    extra_bytes = peak_extra_bytes(lambda: run.step(batch), world.device, times=times)
    machine = Cluster(Device("cpu", 1e12, {}, 1e10, kind="cpu"), 1, world.size, LINK, LINK)
    case = Case(
        known,
        run.plan.layout,
        machine,
        run.plan.batch,
        rows,
        compute="fp32",
        loss="chunked" if name == "llama" else "full",
    )
    for undo in run.program.on_close:
        undo()
    foreseen = predict_memory(case)
    return {
        "held": states.total + extra_bytes,
        "foreseen": foreseen.allocated_bytes,
        "parts": foreseen.parts,
        "states": states.total,
    }
