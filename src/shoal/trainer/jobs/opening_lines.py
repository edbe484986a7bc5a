"""Start of a run: plan.json, and the lines that a user sees before the first step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import cache_folder, write_atomically
from shoal.base.runlog.damaged_lines import is_number, read_object
from shoal.base.text.units import count_text, flops_text
from shoal.data.loading.step_samples import StepBatch
from shoal.data.sources import Source
from shoal.machine.matmul import invalidate_rate, matmul_flops_per_s
from shoal.parallel.program import dtype_of
from shoal.trace.costs.flops import count_training_flops
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import batch_length, split_into_micro_batches
from shoal.trainer.run import Run
from shoal.trainer.step.call_contract import call_model, split_batch, sum_and_count
from shoal.trainer.step.micro_batch import prepare_batch


def write_opening(
    run: Run,
    plan: Plan,
    source: Source,
    total_steps: int,
    folder: Path,
    told: dict[str, Any],
    *,
    validates: bool = False,
) -> None:
    """Write plan.json and the lines that a user sees before the first step.

    Args:
        plan: of all ranks; `run` may hold some of them.
        total_steps: of this group of processes; 0: not known yet.
        told: further keys of plan.json: whether Shoal chose the layout, and the forecast.
        validates: a validation before the first step follows, whose line needs room.
    """
    rate = matmul_flops_per_s(run.world, run.plan.compute, cache_folder())
    run.recorder.machine_flops_per_s = rate
    run.recorder.passed = partial(invalidate_rate, run.world, run.plan.compute, cache_folder())
    if not run.world.writes_files:
        return
    known = _read_known_flops(folder)
    details = {"machine_flops_per_s": rate, "flops_per_sample": known}
    details |= {"steps": total_steps} if total_steps else {}
    unit = "tokens" if source.kind == "tokens" else "samples"
    about = {"unit": unit, "device": run.world.device.type}
    _write_plan(folder, plan, {**details, **about, **told})
    run.recorder.flops_per_sample = known
    formats = _collect_formats(run)
    stream = ", residual stream bf16" if run.plan.residual == "bf16" else ""
    length = f"; {total_steps} step{'s' * (total_steps != 1)}" if total_steps else ""
    emit = run.recorder.events.emit
    if run.step_count == 0:
        short = plan.why.partition("; ")[0]
        emit("notice", text=f"data: {source.description}", opening=2)
        emit("notice", text=plan.why, short=short, opening=3)
        emit(
            "notice",
            opening=1,
            text=f"model: {told['model']}, {count_text(run.plan.parameters)} parameters; "
            f"{plan.arithmetic()}{length}",
        )
        emit(
            "notice",
            opening=9,
            text=f"formats: products {run.plan.compute}{stream}, "
            f"weights read as {formats['read']} and stepped as {formats['stepped']}, "
            f"gradients summed in {formats['summed']}",
        )
    emit(
        "compute_started",
        step=run.step_count,
        parameters=run.plan.parameters,
        dtypes=formats,
        compute=run.plan.compute,
        threads=torch.get_num_threads(),
        device=str(run.world.device),
        matmul=flops_text(rate),
        validates=validates,
    )


def _collect_formats(run: Run) -> dict[str, str]:
    """Return the number formats in use, as text."""

    def names(tensors: Iterable[torch.Tensor]) -> str:
        return " and ".join(sorted({dtype_of(tensor) for tensor in tensors}))

    stepped = names(one.parameter for one in run.program.local.values())
    stepped = stepped or " and ".join(sorted({one.dtype for one in run.plan.buckets}))  # by others
    reduced = {"fp32": "float32", "bf16": "bfloat16"}.get(run.plan.sums, stepped)
    return {"read": names(run.model.parameters()), "stepped": stepped, "summed": reduced}


def _write_plan(folder: Path, plan: Plan, beside: Mapping[str, Any]) -> None:
    """Write plan.json; on a full disk the run continues without it."""
    with contextlib.suppress(OSError):
        write_atomically(folder / "plan.json", plan.to_json(beside))


def record_total_steps(folder: Path, steps: int) -> None:
    """Add the length of a run to plan.json, if it is not known before the data of owners are.

    On a full disk the run continues without it.
    """
    plan = read_object(folder / "plan.json")
    with contextlib.suppress(OSError):
        write_atomically(folder / "plan.json", json.dumps({**plan, "steps": steps}, indent=1))


def _read_known_flops(folder: Path) -> float | None:
    known = read_object(folder / "plan.json").get("flops_per_sample")
    return known if is_number(known) else None


def count_flops(run: Run, batch: StepBatch) -> None:
    """Count the FLOP per sample on two samples, once per run, and add it to plan.json.

    Only ranks that own a disk count.
    """
    folder = run.recorder.folder
    if not run.world.writes_files or run.recorder.flops_per_sample or not len(batch) or not folder:
        return
    program, value = run.program, batch.micro_batches[0].value
    try:
        few = next(split_into_micro_batches(value, 2))
    except ConfigError:  # a collate function's own form, which is whole in each pass
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
            raise
        return
    few = prepare_batch(program, few)

    def loss_sum(module: nn.Module, value: Any) -> torch.Tensor:
        inputs, targets = split_batch(value)
        with program.autocast():
            outputs = call_model(module, inputs, run.plan.call)
            return sum_and_count(run.loss(outputs, targets), targets)[0]

    flops = count_training_flops(program.twin or run.model, few, loss_sum)
    if flops:
        run.recorder.flops_per_sample = flops / batch_length(few)
        told = {"flops_per_sample": run.recorder.flops_per_sample}
        _write_plan(folder, run.plan, {**read_object(folder / "plan.json"), **told})
