"""Search space: the fields of a plan that [layout] leaves open on given machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import PlanError, check_choice
from shoal.base.estimates.cluster import Cluster
from shoal.base.layouts.degrees import layout_for_planning
from shoal.base.layouts.layout import PIPELINES, STAGES, Layout
from shoal.base.layouts.schedule_names import canonical_schedule, resolve_schedule
from shoal.base.layouts.strategies import expand_strategy
from shoal.config.sections import LayoutSection, keys


@dataclass(frozen=True)
class SearchSpace:
    """Fields of a plan that a search may choose; it keeps all others.

    Attributes:
        layout: the only layout to try; None: layouts are searched.
        degrees: (axis, degree) pairs that are fixed; other axes are searched.
        zero: the fixed ZeRO stage of dp_shard; None: searched.
        micro_batch: samples per forward pass, 0: searched.
        accumulate: micro-batches per rank, 0: searched.
        given: keys of policies that the user set; recompute is searched if it is not among them.
        schedule, chunks: of a pipeline, if `degrees` has one; "" searched.
        built: search data-parallel axes first, and tp, pp, cp only if no layout of those fits, as
            `auto` does for a run; False: all at once.
    """

    layout: Layout | None = None
    degrees: tuple[tuple[str, int], ...] = ()
    zero: int | None = None
    micro_batch: int = 0
    accumulate: int = 0
    given: frozenset[str] = frozenset()
    schedule: str = ""
    chunks: int = 1
    built: bool = False


def layout_section(words: Mapping[str, Any]) -> LayoutSection:
    """Build a `LayoutSection` from keys of [layout]; missing keys keep their defaults.

    Raises:
        ConfigError: a key that [layout] lacks, with the nearest key; values are not checked.

    >>> layout_section({"tp": 2}).degrees()
    {'tp': 2}
    """
    known = [key.name for key in keys(LayoutSection)]
    for name in words:
        check_choice("layout", name, known)
    return LayoutSection(**words)


def search_space(section: LayoutSection, cluster: Cluster, **further: Any) -> SearchSpace:
    """Return the fields that a [layout] section leaves open on the devices of a cluster.

    A strategy's name fixes the layout, and so do degrees whose product is all devices. Fewer
    degrees leave the other axes to the search; `auto` alone leaves all.

    Args:
        further: other fields of `SearchSpace`: micro_batch, accumulate, given, built.

    Raises:
        PlanError: a name, a schedule or degrees that contradict the devices.
    """
    degrees = section.degrees()
    schedule, chunks = _fixed_schedule(section, degrees.get("pp", 1))
    return SearchSpace(
        layout=_fixed_layout(section, cluster),
        degrees=tuple(degrees.items()),
        zero=_fixed_zero(section),
        schedule=schedule,
        chunks=chunks,
        **further,
    )


def _fixed_schedule(section: LayoutSection, pp: int) -> tuple[str, int]:
    """Return the schedule that the user fixed beside degrees, and its chunks; "" if open."""
    named = section.strategy if section.degrees() and section.strategy in PIPELINES[1:] else ""
    schedule = section.schedule or named
    if (section.strategy != "auto" and not named) or not (schedule or section.chunks):
        return "", 1
    name = canonical_schedule(schedule or "interleaved")
    return resolve_schedule(name, section.chunks, pp)


def _fixed_zero(section: LayoutSection) -> int | None:
    """Return the user's ZeRO stage of dp_shard: from its key, or from a name beside degrees.

    Raises:
        PlanError: a name that sets no stage beside degrees.
    """
    if section.zero >= 0:
        return section.zero
    if not section.degrees() or section.strategy in ("auto", "3d", *PIPELINES):
        return None
    stages = {**STAGES, "ddp": 0}
    if section.strategy not in stages:
        raise PlanError(
            f"layout.strategy = {section.strategy}: is a whole layout, and so are degrees beside "
            f"it; try: leave layout.strategy out"
        )
    return stages[section.strategy]


def _fixed_layout(section: LayoutSection, cluster: Cluster) -> Layout | None:
    """Return the layout that the user fixed, as in a run; None if the planner has a choice.

    Raises:
        PlanError: a name or degrees that contradict the devices.
    """
    zero = _fixed_zero(section)
    if degrees := section.degrees():
        layout_for_planning(
            degrees, cluster.devices, None
        )  # raises if degrees do not divide devices
        if Layout.of(degrees).processes < cluster.devices:
            return None
        return layout_for_planning(degrees, cluster.devices, zero)
    strategy = "dp" if section.strategy == "auto" and section.threads else section.strategy
    if strategy == "auto":
        return None
    processes, threads = cluster.devices, section.threads
    if strategy == "dp" and cluster.device.kind != "cpu" and cluster.devices > 1:
        processes, threads = cluster.nodes, threads or cluster.per_node
        if threads > cluster.per_node:
            raise PlanError(
                f"layout.threads = {threads}: dp has a replica on each of so many devices, and a "
                f"node has {cluster.per_node}; try: layout.threads={cluster.per_node}"
            )
    return expand_strategy(
        strategy,
        processes,
        threads=threads,
        zero=zero,
        schedule=section.schedule,
        chunks=section.chunks,
        servers=section.servers,
        updates=section.updates,
        staleness=section.staleness,
        serves=section.serves,
    )
