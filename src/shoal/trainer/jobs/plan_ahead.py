"""`shoal.plan`: choice of the fastest layout for a model on given machines, before a run starts.

The result is a `Plan` for `shoal.parallelize(…, plan=…)`. It needs no other machine: the model runs
on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import PlanningCase
from shoal.base.estimates.facts import read_machine_facts
from shoal.base.layouts.policies import POLICIES
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import cache_folder
from shoal.base.text.units import bytes_text, seconds_text
from shoal.config.resolve import count_processes
from shoal.fabric.device import accelerator_type
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.memory.model_states import WIDTHS
from shoal.forecast.search.case_settings import choose_format
from shoal.forecast.search.layout_reasons import explain_start
from shoal.forecast.search.layout_search import LayoutCandidate, search_layouts
from shoal.forecast.search.memory_suggestions import suggest_settings
from shoal.forecast.search.search_space import layout_section, search_space
from shoal.planning.settle import (
    Words,
    check_plan_policies,
    policies_compatible,
    settle_batch,
    split_policies,
)
from shoal.trainer.argument_checks import (
    DEFAULT_BATCH,
    check_integer,
    check_layout,
    plan_from_arguments,
    refuse_unknown,
)
from shoal.trainer.autotune.rank_layouts import (
    filter_startable,
    model_location,
    trace_facts_from_sample,
)
from shoal.trainer.jobs.run_forecast import describe_local_cluster
from shoal.trainer.step.call_contract import Loss


def plan(
    model: nn.Module | Callable[[], nn.Module],
    sample: Any,
    loss: Loss | None = None,
    layout: Words = "auto",
    *,
    on: str = "",
    batch: int = DEFAULT_BATCH,
    micro_batch: int = 0,
    precision: str = "auto",
    optimizer_bytes: int = 8,
    **policies: Any,
) -> Plan:
    """Rank the layouts on which a model can train, and return the plan of the fastest that fits.

    Args:
        model: a function without arguments that builds an nn.Module, which is then built
            without its weights' values; or an nn.Module, which counts as whole on every rank.
        sample: a batch of a few samples, as `run.step` takes it; only its shapes matter.
        loss: as for `shoal.parallelize`; without one its share of memory and time is left out.
        layout: the fixed part: "auto" for none, a strategy, or some degrees, say {"tp": 2}.
        on: machines, as `shoal plan --on` names them: "8xH100-80GB"; "": this one.
        batch: samples per optimizer step.
        micro_batch: samples per forward pass; 0: the fastest.
        precision: `compute` of [precision].
        optimizer_bytes: state per fp32 element: 8 for Adam.
        policies: further keys of a `shoal.Plan`; recompute is searched unless it is given.

    Returns:
        A settled `Plan`, whose `why` has the forecast step time and peak memory.

    Raises:
        PlanError: no layout is legal, no step fits in memory, or another instant of the run does
            not (`instants.predict_run`); the message names a change that would fit.
        ConfigError: an argument is wrong.

    References:
        docs/how-it-works/plan.md: the figures' derivation, and their errors.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> best = plan(net, (torch.zeros(2, 64), torch.zeros(2, 64)), on="8xH100-80GB", batch=64)
    >>> best.layout.processes, best.batch, best.accumulate * best.micro_batch
    (8, 64, 8)
    """
    refuse_unknown(plan, policies.keys() - POLICIES.keys(), {})
    check_layout(layout)
    for name, value, least in (("batch", batch, 1), ("micro_batch", micro_batch, 0)):
        check_integer(name, value, least, DEFAULT_BATCH)
    check_integer("optimizer_bytes", optimizer_bytes, 0, 8)
    asked, words = split_policies(plan_from_arguments(precision, policies), layout)
    section = layout_section(words)
    here = read_machine_facts()
    ranks = count_processes(section, here)
    device = torch.device(accelerator_type() or "cpu")
    cluster = (
        parse_machines(on, here, cache_folder()) if on else describe_local_cluster(ranks, device)
    )
    compute = choose_format(asked, cluster, [])
    case = PlanningCase(
        trace_facts_from_sample(
            model,
            sample,
            loss,
            asked.call,
            kernels=cluster.device.kind,
            element_bytes=WIDTHS[compute],
            blocks=asked,
            residual=asked.residual,
        ),
        cluster,
        replace(asked, compute=compute, batch=batch, micro_batch=micro_batch),
        loss="full",
        optimizer_bytes=optimizer_bytes,
        handed=model_location(model),
    )
    given = frozenset(policies)
    space = search_space(section, cluster, micro_batch=micro_batch, given=given, built=not on)
    found = search_layouts(case, space)
    candidates = filter_startable(found)
    if not candidates:
        raise PlanError(_format_no_layout(found))
    best = candidates[0]
    parameters = case.model.trainable
    return settle_batch(
        replace(best.case.plan, why=_format_reason(best, len(found)), parameters=parameters)
    )


def _format_reason(best: LayoutCandidate, searched: int) -> str:
    """Return the plan's reason: machine, step time, peak memory."""
    cluster = best.case.cluster
    name = cluster.name or f"{cluster.devices} × {cluster.device.name}"
    return (
        f"shoal.plan: {best.case.layout.text()} on {name}: {seconds_text(best.time.step_s)} per "
        f"step and {bytes_text(best.memory.peak_bytes)} per rank foreseen, best of {searched}"
    )


def _format_no_layout(found: list[LayoutCandidate]) -> str:
    """Return the message for a model that no layout can train; `found[0]` is the nearest layout."""
    best = found[0]
    if best.runs and policies_compatible(best.case.plan):
        return f"{best.case.layout.text()}: its steps would fit, but {explain_start(best)}"
    if best.runs:
        check_plan_policies(best.case.plan)  # raises, with the nearest
    near = suggest_settings(best.case)
    nearest = near[0][0] if near else "more devices, or larger ones"
    return (
        f"{best.case.layout.text()}: lacks {bytes_text(-best.verdict.margin_bytes)} of memory on "
        f"{best.case.cluster.device.name}, and nothing else fits; try: {nearest}"
    )
