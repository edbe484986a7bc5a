"""A case in one call, for published runs and tests: words are keys of a plan or `PlanningCase`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import ModelFacts, PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan

OF_A_LAYOUT = ("schedule", "chunks", "ep")
KEYS = {key.name for key in fields(Plan)}


def case_of(
    model: ModelFacts,
    layout: Layout,
    cluster: Cluster,
    batch: int,
    micro_batch: int,
    *,
    compute: str = "bf16",
    **words: Any,
) -> PlanningCase:
    """A run of `model` on `cluster`; bf16 unless something else is said."""
    passes = {key: words.pop(key) for key in OF_A_LAYOUT if key in words}
    keys = {key: words.pop(key) for key in [*words] if key in KEYS}
    plan = Plan(replace(layout, **passes), batch, micro_batch, compute=compute, **keys)
    return PlanningCase(model, cluster, plan, **words)


def run_of(model: ModelFacts, cluster: Cluster, batch: int = 64, **words: Any) -> PlanningCase:
    """The same with its layout left to a search."""
    return case_of(model, Layout(), cluster, batch, 0, **words)
