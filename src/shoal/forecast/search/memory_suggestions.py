"""Settings that make a layout fit in memory: the cheapest one, or pair.

Each change lowers the peak of one rank, and may cost time. Changes that help are ranked by the
predicted step time. A narrower residual stream changes what a model's units save, so its facts come
from the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.base.estimates.estimate import ModelFacts, PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.policies import RECOMPUTE
from shoal.base.layouts.schedule_names import SPLIT_BACKWARD
from shoal.base.plans.plan import Plan
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.search.layout_search import LayoutCandidate, judge_candidate
from shoal.forecast.time.step_time import predict_time

Change = tuple[str, Callable[[PlanningCase], PlanningCase | None]]

CHANGES: tuple[Change, ...] = (
    ("memory.recompute=selective", lambda c: _change_recompute(c, "selective")),
    ("train.micro_batch={micro_batch}", lambda c: _change_micro_batch(c, 2)),
    ("train.micro_batch={micro_batch}", lambda c: _change_micro_batch(c, 8)),
    ("train.micro_batch={micro_batch}", lambda c: _change_micro_batch(c, c.micro_batch)),
    ("memory.recompute=full", lambda c: _change_recompute(c, "full")),
    ("{stage}", lambda c: _change_zero_stage(c, 1)),
    ("{stage}", lambda c: _change_zero_stage(c, 2)),
    ("{stage}", lambda c: _change_zero_stage(c, 3)),
    ("memory.offload=optimizer", lambda c: _change_offload(c, "optimizer")),
    ("memory.offload=parameters", lambda c: _change_offload(c, "parameters")),
)
"""Settings that lower the peak, tried one at a time."""


NARROW = "precision.compute=bf16 precision.residual=bf16"
"""Settings with the facts `narrow` of `suggest_settings`; `compute=auto` refuses the second."""


def smaller_settings_text(plan: Plan, size: int) -> str:
    """Return the settings that would hold fewer bytes than a plan does, as a user types them.

    Args:
        size: a smaller micro-batch; 0: there is none.

    >>> smaller_settings_text(Plan(Layout(), recompute="full", compute="bf16"), 0)
    "precision.compute=bf16 precision.residual=bf16 (blocks' activations in bf16)"
    >>> smaller_settings_text(Plan(Layout(), recompute="full", compute="fp32"), 0)
    'a layout that splits more, by shoal plan'
    """
    found = [f"train.micro_batch={size} (the same batch in more passes)"] if size else []
    if plan.recompute != "full":
        found.append("memory.recompute=full")
    if plan.compute == "bf16" and plan.residual != "bf16":
        found.append("precision.compute=bf16 precision.residual=bf16 (blocks' activations in bf16)")
    return ", or ".join(found or ["a layout that splits more, by shoal plan"])


def suggest_settings(
    case: PlanningCase, narrow: ModelFacts | None = None
) -> list[tuple[str, LayoutCandidate]]:
    """Return settings with which a case's steps fit; pairs if no single one suffices.

    Only the steps count, not the start of a run. `case` does not change; the function does not
    check that it does not fit.

    Args:
        narrow: the model's facts with a bf16 residual stream; None: it cannot have one, or has one.

    Returns:
        (settings as a user types them, prediction with them): those that fit first, then the tight
        ones, each by step time; [] if no setting helps.
    """
    changes = (*CHANGES, (NARROW, lambda c: _change_residual(c, narrow)))
    found = _fitting_settings([(name, made) for name, change in changes if (made := change(case))])
    if not any(candidate.verdict.after == "fits" for _, candidate in found):
        pairs = []
        for place, (first, change) in enumerate(changes):
            made = change(case)
            for second, other in changes[place + 1 :]:
                if made and first != second and (both := other(made)):
                    pairs.append((f"{first} {second}", both))
        both_fit = _fitting_settings(pairs)
        # A tight pair is no better than a tight single setting.
        found += [one for one in both_fit if not found or one[1].verdict.after == "fits"]
    return sorted(found, key=lambda one: (one[1].verdict.after != "fits", one[1].time.step_s))


def _fitting_settings(tried: list[tuple[str, PlanningCase]]) -> list[tuple[str, LayoutCandidate]]:
    found: dict[str, LayoutCandidate] = {}
    for name, case in tried:
        memory = predict_run(case)
        word = judge_candidate(case, memory)
        if word.after != "no":  # the steps alone: no setting changes the start
            text = name.format(micro_batch=case.micro_batch, stage=_stage_text(case.layout))
            found[text] = LayoutCandidate(case, memory, predict_time(case), word)
    return list(found.items())


def _stage_text(layout: Layout) -> str:
    """Return the layout's stage as settings: a strategy, or degrees if other axes are split too.

    >>> _stage_text(Layout(dp_shard=8, zero=3)), _stage_text(Layout(tp=2, dp_shard=4, zero=1))
    ('layout.strategy=fsdp', 'layout.dp_shard=4 layout.zero=1')
    """
    if layout.processes == layout.data_degree and layout.ep == 1:
        return f"layout.strategy={layout.strategy}"
    return f"layout.dp_shard={layout.dp_shard} layout.zero={layout.zero}"


def _change_recompute(case: PlanningCase, policy: str) -> PlanningCase | None:
    if case.plan.compile != "none" and policy == "selective":
        return None
    if case.layout.pp > 1 and case.schedule in SPLIT_BACKWARD:
        return None
    order = RECOMPUTE.index
    return case.but(recompute=policy) if order(policy) > order(case.plan.recompute) else None


def _change_micro_batch(case: PlanningCase, times: int) -> PlanningCase | None:
    size, rest = divmod(case.micro_batch, times)
    return None if rest or size in (0, case.micro_batch) else case.but(micro_batch=size)


def _change_zero_stage(case: PlanningCase, stage: int) -> PlanningCase | None:
    layout = case.layout
    if layout.data_degree == 1 or layout.zero >= stage or layout.dp_shard > 1 < layout.dp_replicate:
        return None
    if layout.pp > 1 and stage > 1:
        return None
    ranks = layout.dp_replicate * layout.dp_shard
    split = replace(
        layout, dp_replicate=1, dp_shard=ranks, zero=stage, servers=0, updates="", serves=""
    )
    return case.but(layout=split)


def _change_residual(case: PlanningCase, narrow: ModelFacts | None) -> PlanningCase | None:
    if narrow is None or case.plan.compute != "bf16" or case.plan.residual == "bf16":
        return None
    return replace(case.but(residual="bf16"), model=narrow)


def _change_offload(case: PlanningCase, what: str) -> PlanningCase | None:
    on_gpu = case.cluster.device.kind == "gpu"
    if what == "parameters" and case.layout.processes > 1 and case.layout.zero < 3:
        return None
    if case.layout.servers:  # their states lie on the servers
        return None
    return case.but(offload=what) if on_gpu and case.plan.offload == "none" else None
