"""What a device holds while a run starts, before its first step: whole weights, or its part only.

    zero3   the builder runs once per machine, in mapped files on the host; block by block goes to
            the device, and its rows stay there. Then every unit is gathered once, to see its
            parameters: flat, and as parameters
            = width · (the rank's shard + 2 of the largest unit)
    tp, pp  (with zero3 or without) move the whole module to a GPU first, since what they look at
            runs there, then keep their part; on a CPU it stays in the files
            = width · (all elements + the rank's own) on a GPU, width · own on a CPU
    else    whole tensors are what is kept
            = width · all elements
    width   4 bytes, 8 under fp64: narrow copies are made later, bucket by bucket

Files are no memory of a process: what all ranks of a machine map is in its page cache once. A
module that exists before the run, instead of a builder, is in the host's memory as the user made
it, which on a CPU is the device's.

Source: shoal.parallel.shared_build, shoal.trainer.parallelize (`module.to`); torch: FSDPParam
(_init_sharded_param); tests/worlds/test_peak.py, test_build.py
"""

from __future__ import annotations

from shoal.base.estimate import Case
from shoal.planner.model_states import WIDTHS, shard_counts
from shoal.planner.stage_cut import cut
from shoal.planner.transient_memory import gathered_elements, rank_sum


def start_bytes(case: Case) -> float:
    """Returns bytes of weights on the fullest device before a run's first step; 0 for peers.

    >>> from shoal.base.cluster import Cluster, Device, Link
    >>> from shoal.base.layout import Layout
    >>> from shoal.base.plan import Plan
    >>> from shoal.planner.published import published
    >>> from shoal.planner.transformer import model_facts
    >>> link = Link("wire", 1e-6, 1e11)
    >>> node = Cluster(Device("d", 80e9, {}, 1e12), 1, 8, link, link)
    >>> model = model_facts(published("llama-3-70b"), 8192, 2)
    >>> plan = Plan(Layout(dp_shard=8, zero=3), 8, 1, compute="bf16")
    >>> round(start_bytes(Case(model, node, plan)) / 2**30)
    49
    >>> plan = Plan(Layout(tp=8), 8, 1, compute="bf16")
    >>> round(start_bytes(Case(model, node, plan)) / 2**30)
    296
    """
    if case.framework != "shoal":
        return 0.0
    layout = case.layout
    width = max(4, WIDTHS[case.plan.compute])
    whole = width * whole_elements(case) if holds_whole(case) else 0.0
    if not (layout.tp * layout.pp > 1 or layout.zero == 3):
        return whole
    kept = gathered = 0.0
    for rank in {0, layout.pp - 1}:  # embedding and head make the ends the fullest
        stage = cut(case, rank)
        elements = rank_sum(case, stage.units, stage.tied)
        dense, experts = shard_counts(case) if layout.zero == 3 else (1, 1.0)
        kept = max(kept, elements.dense / dense + elements.experts / experts)
        if layout.zero == 3:
            sizes, root = gathered_elements(case, stage)
            narrow = WIDTHS[case.plan.compute] * max(sizes, default=0.0)
            moved = width * max(sizes, default=0.0)  # a unit whole, as it comes from the host
            gathered = max(gathered, 2 * narrow, moved, 2 * width * root)
    return whole + width * kept + gathered


def holds_whole(case: Case) -> bool:
    """Returns whether all weights are on a device at some moment of the start."""
    layout = case.layout
    on_host = layout.zero == 3 and not layout.is_derived
    if case.plan.parks_parameters and layout.processes == 1:
        return case.cluster.device.kind == "cpu" and not case.plan.states_in_files
    if case.cluster.device.kind == "cpu":
        return not (on_host or layout.zero == 3 or layout.tp * layout.pp > 1)
    return not on_host


def files_bytes(case: Case) -> float:
    """Returns bytes of the files in which each machine builds the model, in TMPDIR; 0 without.

    Page cache while there is memory for it; the system writes them out where there is not.
    """
    layout = case.layout
    divided = layout.tp * layout.pp > 1 or layout.zero == 3
    width = max(4, WIDTHS[case.plan.compute])
    return width * whole_elements(case) if case.framework == "shoal" and divided else 0.0


def whole_elements(case: Case) -> float:
    """Returns elements of the whole model, frozen ones included."""
    return float(sum(u.count * (u.parameters + u.frozen_parameters) for u in case.model.units))
