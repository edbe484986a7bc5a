"""Bytes of the states of one rank: weights, gradients, optimizer state, weight average.

    bytes per element and rank        ddp    zero1       zero2       zero3, n shards
    fp32                              16     8 + 8/n     4 + 12/n    16/n
    bf16 with fp32 masters            18     6 + 12/n    2 + 16/n    16/n (fp32 weights, cast when
                                                                     gathered)

with AdamW's two moments (8 bytes). `average` adds an fp32 copy, split like the optimizer state.
`defer_sync` keeps whole gradients (zero3: until the last micro-batch; so does torchtitan in a
pipeline). Weights that no product reads (embeddings, and heads tied to them) have no narrow copy:
16 bytes, not 18. Experts are split over fewer ranks: their n is the number of ranks that hold the
same expert. Megatron's distributed optimizer is zero1.

Source: Rajbhandari et al. 2020 (ZeRO, 1910.02054) §3; Shoal's own tensors, counted in
tests/worlds/resumes/test_states.py and memory/test_divided_memory.py; Megatron:
theoretical_memory_usage.py (6 + 12/d).
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.base.estimates.estimate import PlanningCase, UnitFacts
from shoal.base.layouts.layout import Layout

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes per element of the weights in compute."""


STATE_BYTES = {
    **{"adamw": 8, "adam": 8, "lamb": 8, "lion": 4, "sgd": 4, "muon": 4},
    **{"adagrad": 4, "rmsprop": 4, "asgd": 4, "adafactor": 0},
}
"""Optimizer state per fp32 element, by optimizer.name; others: as Adam."""


class ModelStateBytes(NamedTuple):
    """Bytes of a stage's states on one rank."""

    weights: float
    gradients: float
    optimizer: float


class ParameterElements(NamedTuple):
    """Parameter elements of a unit, a block or a stage on one rank.

    After tensor and expert parallelism, before the data-parallel split.

    Attributes:
        dense: all but the experts'.
        experts: those of mixture-of-experts layers.
    """

    dense: float
    experts: float


def rank_elements(unit: UnitFacts, layout: Layout, ep: int, expert_tp: int) -> ParameterElements:
    """Return a rank's elements of ONE unit, after tensor and expert parallelism.

    >>> unit = UnitFacts("block", parameters=100, plain_parameters=10, expert_parameters=40)
    >>> rank_elements(unit, Layout(tp=2), ep=4, expert_tp=1)
    ParameterElements(dense=35.0, experts=10.0)
    """
    split = unit.parameters - unit.plain_parameters - unit.expert_parameters
    dense = split / layout.tp + unit.plain_parameters
    return ParameterElements(dense, unit.expert_parameters / (ep * expert_tp))


def shard_counts(case: PlanningCase) -> tuple[int, float]:
    """Return the number of ranks that share the states of dense weights, and of experts.

    Context-parallel ranks hold the same weights, so they take part in the split. Only
    tp · ranks / (ep · expert_tp) ranks hold an expert.
    """
    layout = case.layout
    if not layout.zero:
        return 1, 1.0
    dense = (layout.servers or layout.dp_shard) * layout.cp
    return dense, max(1.0, dense * layout.tp / (case.expert_degree))


def gathers_once_per_step(case: PlanningCase) -> bool:
    """Return whether zero 3 gathers once a step, as other frameworks do in a pipeline."""
    return case.layout.zero == 3 and case.layout.pp > 1 and case.framework != "shoal"


def predict_state_bytes(
    case: PlanningCase, elements: ParameterElements, wide: float = 0.0
) -> ModelStateBytes:
    """Predict bytes of weights, gradients and optimizer state of a pipeline stage on one rank.

    An average of the weights counts as optimizer state. Under offload = parameters all three are 0,
    under offload = optimizer the moments are; on a CPU only if they go to files
    (`offloaded_bytes.py`).

    Args:
        elements: of the stage before the data-parallel split, which this function makes.
        wide: the dense elements without a narrow copy.

    >>> from shoal.base.estimates.cluster import Cluster, Device, Link
    >>> from shoal.base.estimates.estimate import ModelFacts
    >>> from shoal.base.plans.plan import Plan
    >>> link = Link("wire", 0, 1)
    >>> one = Cluster(Device("d", 1, {}, 1), 1, 4, link, link)
    >>> plan = Plan(Layout(dp_shard=4, zero=1), 4, 1, compute="bf16")
    >>> case = PlanningCase(ModelFacts("m", (), 1, 2, 0), one, plan)
    >>> sum(predict_state_bytes(case, ParameterElements(100.0, 0.0)))  # 6 + 12/4 bytes
    900.0
    """
    dense, experts = shard_counts(case)
    width = WIDTHS[case.plan.compute]
    held = (
        (elements.dense - wide, _bytes_per_element(case, float(dense), width)),
        (wide, _bytes_per_element(case, float(dense), max(4, width))),
        (elements.experts, _bytes_per_element(case, experts, width)),
    )
    return ModelStateBytes(*(sum(count * one[kind] for count, one in held) for kind in range(3)))


def _bytes_per_element(case: PlanningCase, n: float, width: int) -> ModelStateBytes:
    """Return bytes per element with optimizer state split over `n`, `width` bytes in compute."""
    zero = case.layout.zero
    wide = max(4, width)
    narrow = width < 4
    moments = case.optimizer_bytes * wide / 4
    if zero == 3:
        weights, gradients, optimizer = wide / n, wide / n, moments / n
    else:
        weights, gradients = float(width), float(wide)
        optimizer = moments + (wide if narrow else 0)
        if zero:
            optimizer /= n
        if zero == 2:
            gradients /= n
    if case.plan.defer_sync and zero == 2:
        gradients = wide  # as under zero1
    if zero == 3 and case.accumulate > 1 and (case.plan.defer_sync or gathers_once_per_step(case)):
        gradients = wide + wide / n
    if case.plan.average:
        optimizer += wide / n if zero else wide
    if case.cluster.device.kind == "cpu" and not case.plan.states_in_files:
        return ModelStateBytes(weights, gradients, optimizer)
    if case.plan.offloads_parameters:
        return ModelStateBytes(0.0, 0.0, 0.0)
    if case.plan.offload == "optimizer":  # fp32 masters are parameters, and stay on the device
        optimizer -= moments / n if zero else moments
    return ModelStateBytes(weights, gradients, optimizer)
