"""Predicted costs of `dp` on N devices of one process: the first device's memory, step seconds.

With m micro-batches in a step, weights of W and gradients of G bytes on every device:

    rounds   ⌈m / N⌉ forward and backward passes on the busiest device
    host     one interpreter launches the forward passes of all replicas, in turn; torch has a
             backward thread for each device
    copies   (N − 1)·W from the first device, (N − 1)·G to it, through its one link, exposed
    update   on the first device alone, for all weights
    memory   the first device holds as much as in a run on one device; the others the same without
             the optimizer state

Not fitted: no measurement on a machine with several GPUs exists. Source:
parallel/data_parallel/device_replicas.py
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.estimates.cluster import Link
from shoal.base.estimates.estimate import MemoryEstimate, PlanningCase
from shoal.base.text.units import bytes_text
from shoal.forecast.memory.model_states import WIDTHS
from shoal.forecast.time.step_terms import HOST_BYTES_PER_S, StepTerms, step_terms

FORWARD_LAUNCHES = 1 / 3
"""Share of a pass's operations that the forward pass launches."""


def first_device_case(case: PlanningCase) -> PlanningCase:
    """Return the case of the first device: one process with one replica's micro-batches.

    >>> from shoal.base.estimates.cluster import Cluster, Device
    >>> from shoal.base.estimates.estimate import ModelFacts
    >>> from shoal.base.layouts.layout import Layout
    >>> from shoal.base.plans.plan import Plan
    >>> link = Link("wire", 1e-6, 1e11)
    >>> node = Cluster(Device("d", 80e9, {}, 1e12), 1, 4, link, link)
    >>> case = PlanningCase(ModelFacts("m", (), 0, 4, 0), node, Plan(Layout(threads=4), 20, 2))
    >>> case.accumulate, first_device_case(case).accumulate
    (10, 3)
    """
    rounds = -(-case.accumulate // case.layout.threads)
    alone = replace(case.layout, threads=1)
    return case.but(layout=alone, batch=rounds * case.micro_batch, accumulate=rounds)


def replica_terms(case: PlanningCase) -> StepTerms:
    """Return the terms of a step, from those of the first device."""
    terms = step_terms(first_device_case(case))
    others = case.layout.threads - 1
    launches = 1 + min(others, case.accumulate - 1) * FORWARD_LAUNCHES
    width = max(4, WIDTHS[case.plan.compute])
    weights = max(stage.parameters for stage in terms.stages) * width
    link = _select_replica_link(case)
    seconds = others * (link.latency_s + weights / link.bytes_per_s)
    return replace(
        terms,
        stages=tuple(replace(one, launch_s=one.launch_s * launches) for one in terms.stages),
        step={**terms.step, "parameters": seconds, "gradients": seconds},
        sent={link.name: 2 * others * weights},
    )


def _select_replica_link(case: PlanningCase) -> Link:
    """Return the link that gradients and weights of a process's devices use.

    Returns:
        the node's link between devices; a node with one device: copies through host memory.
    """
    cluster = case.cluster
    if cluster.per_node > 1:
        return cluster.inside
    return Link("through the host", 1e-5, cluster.host_bytes_per_s or HOST_BYTES_PER_S)


def first_device_estimate(case: PlanningCase, memory: MemoryEstimate) -> MemoryEstimate:
    """Add each other device's bytes, all but the optimizer state, to the first one's estimate."""
    states = case.optimizer_bytes * case.model.trainable * max(4, WIDTHS[case.plan.compute]) / 4
    optimizer = min(states, memory.parts.get("optimizer", 0.0))
    return replace(memory, others_bytes=memory.peak_bytes - optimizer)


def describe_replicas(case: PlanningCase, memory: MemoryEstimate, sent_bytes: float) -> str:
    """Describe in one line what only the first device holds."""
    others = case.layout.threads - 1
    each = f"each of the {others} others" if others > 1 else "the other"
    return (
        f"dp: the first device holds {bytes_text(memory.peak_bytes)} with the optimizer's state, "
        f"{each} {bytes_text(memory.others_bytes)}; {bytes_text(sent_bytes)} per step go through "
        f"its link, beside no pass; not fitted to any machine; try: layout.strategy=ddp"
    )
