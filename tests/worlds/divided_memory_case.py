"""Measures what a rank of a divided model holds and sends, beside what was foreseen and stated."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.base.estimates.estimate import ModelFacts, PlanningCase
from shoal.fabric import World
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.model_states import predict_state_bytes as assigned_bytes
from shoal.forecast.memory.transient_memory import sum_rank_elements, wide_elements
from shoal.forecast.time.model_traffic import predict_rank_traffic
from shoal.machine.states import count_state_bytes, measure_peak_bytes
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.planning.pipeline_stages import stage_units
from shoal.trace.costs.traced_facts import trace_facts
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run
from shoal.trainer.step.step_vector import NUMBERS

SEQUENCE, VOCABULARY, ROWS = 64, 512, 2
ARGUMENTS = {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 4}
STATES = ("weights", "gradients", "optimizer")
LINK = Link("wire", 1e-6, 1e9)


def model(tied: bool) -> nn.Module:
    """A Llama of four blocks."""
    given = {**ARGUMENTS, "tied": tied}
    return build("llama", given, vocabulary=VOCABULARY, sequence=SEQUENCE)


@functools.cache
def facts(width: int, tied: bool) -> ModelFacts:
    """As a run's prediction has them."""
    tokens = torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    return trace_facts(
        lambda: model(tied),
        (tokens,),
        element_bytes=width,
        autocast=width == 2,
        loss=token_loss,
        targets=tokens,
    )


def measure(world: World, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer of this rank for every {layout, precision, tied, micro_batches, peak}."""
    return [one(world, **row) for row in wanted]


def one(
    world: World,
    layout: dict[str, Any],
    *,
    precision: str = "fp32",
    tied: bool = False,
    micro_batches: int = 4,
    peak: bool = False,
) -> dict[str, Any]:
    """States of this rank, what a step holds beyond them, what a step sends."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (micro_batches * ROWS, SEQUENCE))
    data = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    run = parallelize(
        model(tied),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        layout=layout,
        batch=micro_batches * ROWS * data,
        micro_batch=ROWS,
        precision=precision,
        sample=(tokens, tokens),
        world=world,
    )
    torch.manual_seed(run.program.data.rank)  # each data rank its own samples
    tokens = torch.randint_like(tokens, VOCABULARY)
    batch = (tokens, tokens)
    run.step(batch)  # after it Adam has its moments, and forms of messages are known
    calls = _sent(run, batch)
    run.forward_backward(batch)
    held = count_state_bytes(run)
    run.update()
    extra = measure_peak_bytes(lambda: run.step(batch), world.device, 3) if peak else 0
    answer = {**_foreseen(run, tied), "held": asdict(held), "extra": extra, "calls": calls}
    with torch._C.DisableTorchFunctionSubclass():  # user code is told the whole's
        answer["elements"] = sum(p.numel() for p in run.program.parameters.values())
    for undo in run.program.on_close:
        undo()
    return answer


def _sent(run: Run, batch: Any) -> list[tuple[str, int, int]]:
    """Every collective and message of one step: (kind, payload bytes, degree)."""
    calls: list[tuple[str, int, int]] = []
    world = run.program.world
    count = world.traffic.count

    def counting(kind: str, payload_bytes: int, degree: int, *axis: str) -> None:
        if degree > 1:
            calls.append((kind, payload_bytes, degree))
        count(kind, payload_bytes, degree, *axis)

    world.traffic.count = counting
    run.step(batch)
    del world.traffic.count
    sums = sum(map(len, run.guards.sums(run.step_count).values()))
    # loss, count, norm², flags, broken, micro-batches · unreadable samples · unlike · used
    sums += 12 + 1 + NUMBERS + len(run.program.names)
    calls.remove(("all_reduce", 8 * sums, world.size))  # the step's own numbers
    return calls


def _foreseen(run: Run, tied: bool) -> dict[str, Any]:
    """The same as the planner has it."""
    plan, rank = run.plan, run.program.pipe.rank
    device = Device("cpu", 1e12, {}, 1e10, kind="cpu")
    cluster = Cluster(device, 1, plan.layout.processes, LINK, LINK)
    case = PlanningCase(facts(2 if plan.compute == "bf16" else 4, tied), cluster, plan)
    stage = stage_units(case, rank)
    elements = sum_rank_elements(case, stage.units, stage.tied)
    peak = predict_memory(case, rank)
    travel = run.program.travel() if run.program.travel else None
    return {
        "assigned": assigned_bytes(case, elements, wide_elements(case, stage))._asdict(),
        "foreseen": peak.allocated_bytes - sum(peak.parts.get(kind, 0.0) for kind in STATES),
        "blocks": sum(count for unit, count in stage.blocks),
        "stated": asdict(predict_rank_traffic(case, travel, rank)) if travel else {},
        "exchanges": [[asdict(each) for each in stage] for stage in travel.exchanges],
        "parameters": plan.parameters,
    }
