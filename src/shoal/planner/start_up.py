"""What a device holds while a run starts: all weights, before the layout divides them.

    every rank builds the whole model on its host, and moves the whole module to its device; then
    the layout takes its part of each tensor. The whole tensors are let go at the end, when the
    optimizer has been given the parts in their place

    weights at the start = elements · width + the part that is kept + what zero3 gathers
    width   4 bytes, 8 under fp64: narrow copies are made later, bucket by bucket
    part    zero3: a shard of everything · tp, pp: the rank's own elements · else none: the whole
            tensors are what is kept
    zero3   gathers every unit once, to see its parameters: flat, and as parameters

On a CPU tp and pp build in mapped files (parallel/mmap_init.py), which are no memory of the
process; other layouts hold the whole there too. So a model whose weights alone exceed a device does
not start on it, whatever the layout, until ranks build no more than their part.

Source: shoal.trainer.parallelize (`module.to`), shoal.parallel.compose; torch: FSDPParam
(_init_sharded_param keeps what it was given until fully_shard returns); tests/worlds/test_peak.py
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
    311
    """
    if case.framework != "shoal":
        return 0.0
    layout = case.layout
    width = max(4, WIDTHS[case.plan.compute])
    divided = layout.tp * layout.pp > 1
    mapped = divided and case.cluster.device.kind == "cpu"
    whole = 0.0 if mapped else width * whole_elements(case)
    if not (divided or layout.zero == 3):
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
            gathered = max(gathered, 2 * narrow, 2 * width * root)
    return whole + width * kept + gathered


def whole_elements(case: Case) -> float:
    """Returns elements of the whole model, frozen ones included."""
    return float(sum(u.count * (u.parameters + u.frozen_parameters) for u in case.model.units))
