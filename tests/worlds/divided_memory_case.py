"""Measures what a rank of a divided model holds and sends, beside what the planner foresees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.base.cluster import Cluster, Device, Link
from shoal.base.estimate import Case, ModelFacts
from shoal.fabric import World
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.planner.frameworks import framework
from shoal.planner.memory import predict_memory
from shoal.planner.stage_cut import cut
from shoal.planner.states import state_bytes as planned_states
from shoal.planner.transients import rank_sum, wide_elements
from shoal.profile.states import peak_extra_bytes, state_bytes
from shoal.profile.trace import trace_facts
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

SEQUENCE, VOCABULARY, ROWS = 16, 512, 2
LINK = Link("wire", 1e-6, 1e9)


def model(tied: bool = True) -> nn.Module:
    arguments = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 4, "tied": tied}
    return build("llama", arguments, vocabulary=VOCABULARY, sequence=SEQUENCE)


def facts(width: int, tied: bool) -> ModelFacts:
    tokens = torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    return trace_facts(
        lambda: model(tied),
        (tokens,),
        element_bytes=width,
        autocast=width == 2,
        loss=token_loss,
        targets=tokens,
    )


def case_of(run: Run, known: ModelFacts) -> Case:
    machine = Cluster(
        Device("cpu", 1e12, {}, 1e10, kind="cpu"), 1, run.plan.layout.processes, LINK, LINK
    )
    plan = run.plan
    return Case(
        known,
        plan.layout,
        machine,
        plan.batch,
        plan.micro_batch,
        compute=plan.precision,
        loss="chunked",
        schedule=plan.layout.schedule or "1f1b",
        chunks=plan.layout.chunks,
    )


def states(world: World, wanted: list[list[Any]]) -> list[dict[str, Any]]:
    return [_states(world, *one) for one in wanted]


def _states(
    world: World, layout: dict[str, Any], precision: str, tied: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (4 * ROWS, SEQUENCE))
    run = parallelize(
        model(tied),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        layout=layout,
        batch=4 * ROWS * layout.get("dp_shard", 1) * layout.get("dp_replicate", 1),
        micro_batch=ROWS,
        precision=precision,
        sample=(tokens, tokens),
        world=world,
    )
    run.step((tokens, tokens))
    run.forward_backward((tokens, tokens))
    counted = state_bytes(run)
    run.update()
    case = case_of(run, facts(2 if precision == "bf16" else 4, tied))
    stage = cut(case, run.program.pipe.rank)
    planned = planned_states(
        case, rank_sum(case, stage.units, stage.tied), wide_elements(case, stage)
    )
    elements = sum(p.numel() for p in run.program.parameters.values())
    for undo in run.program.on_close:
        undo()
    return {
        "counted": [counted.weights, counted.gradients, counted.optimizer],
        "planned": list(planned),
        "elements": elements,
        "stage": [(unit.name, count) for unit, count in stage.units],
        "total": run.plan.parameters,
    }


def travels(world: World, layout: dict[str, Any], rows: int) -> dict[str, Any]:
    """Every collective of one step on this rank, and what was stated of it before."""
    noted: dict[str, Any] = {}
    undo = _noting(noted)
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (3 * rows, SEQUENCE))
    run = parallelize(
        model(False),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        layout=layout,
        batch=3 * rows,
        micro_batch=rows,
        sample=(tokens, tokens),
        world=world,
    )
    undo()
    run.step((tokens, tokens))
    calls: list[tuple[str, int, int]] = []
    count = world.traffic.count

    def counting(kind: str, payload_bytes: int, degree: int) -> None:
        if degree > 1:
            calls.append((kind, payload_bytes, degree))
        count(kind, payload_bytes, degree)

    world.traffic.count = counting
    run.step((tokens, tokens))
    del world.traffic.count
    for close in run.program.on_close:
        close()
    return {"calls": calls, "names": len(run.program.names), **noted}


def _noting(noted: dict[str, Any]) -> Any:
    from shoal.parallel import pipeline, tensor_parallel

    inner = tensor_parallel.apply_split

    def apply_split(module: nn.Module, split: Any, axis: Any) -> Any:
        noted["exchanges"] = {
            name: [[e.kind, e.when, e.payload_bytes, e.after] for e in es]
            for name, es in split.exchanges.items()
        }
        done = inner(module, split, axis)
        noted["partial"] = {n: dict(module.named_parameters())[n].numel() for n in done.partial}
        return done

    tensor_parallel.apply_split = apply_split
    plan = pipeline.plan

    def planned(*args: Any, **kwargs: Any) -> Any:
        cut = plan(*args, **kwargs)
        if cut is not None:
            noted["stages"] = {c.name: c.stage for c in cut.calls}
        return cut

    pipeline.plan = planned

    def undo() -> None:
        tensor_parallel.apply_split = inner
        pipeline.plan = plan

    return undo


WIDE = {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 4, "tied": False}
LONG = 64


def peaks(world: World, wanted: list[list[Any]]) -> list[dict[str, Any]]:
    tokens = torch.zeros(ROWS, LONG, dtype=torch.long)
    known = trace_facts(
        lambda: build("llama", WIDE, vocabulary=VOCABULARY, sequence=LONG),
        (tokens,),
        loss=token_loss,
        targets=tokens,
    )
    return [_peak(world, known, *one) for one in wanted]


def _peak(
    world: World, known: ModelFacts, layout: dict[str, Any], micro_batches: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (micro_batches * ROWS, LONG))
    run = parallelize(
        build("llama", WIDE, vocabulary=VOCABULARY, sequence=LONG),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        layout=layout,
        batch=micro_batches * ROWS,
        micro_batch=ROWS,
        sample=(tokens, tokens),
        world=world,
    )
    run.step((tokens, tokens))
    held = state_bytes(run).total
    extra = peak_extra_bytes(lambda: run.step((tokens, tokens)), world.device, 3)
    case = replace(
        case_of(run, known), sequence_parallel=layout.get("sequence_parallel") != "off"
    )
    found = predict_memory(case, run.program.pipe.rank)
    states = sum(found.parts.get(k, 0.0) for k in ("weights", "gradients", "optimizer"))
    for undo in run.program.on_close:
        undo()
    return {
        "states": held,
        "extra": extra,
        "planned_states": states,
        "planned_extra": found.allocated_bytes - states,
        "parts": found.parts,
        "when": found.when,
    }
