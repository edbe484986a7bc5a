"""Advice for uneven clusters: mixed devices, and islands on slow links.

mixed     every step waits for the slowest part. With samples in proportion to each device's speed
          the step would take Σ devices / Σ (devices · speed), as far as samples divide
islands   the plan is for one island; between islands the advice compares summing gradients in
          every step with averaging weights every H steps (the smallest H for 95 % compute)
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.estimates.cluster import Cluster
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.text.units import bytes_text, seconds_text
from shoal.forecast.search.island_choice import smallest_period
from shoal.forecast.search.layout_search import LayoutCandidate
from shoal.forecast.time.collective_time import ring_all_reduce_s
from shoal.forecast.time.island_costs import IslandsFacts, islands_cost
from shoal.forecast.time.step_time import predict_time

UTILISATION = 0.95
GRADIENT_BYTES = 4.0


def homogeneous_parts(cluster: Cluster) -> list[Cluster]:
    """Return the homogeneous parts of a cluster, the first one first.

    >>> from shoal.forecast.machines.cluster_syntax import parse_machines
    >>> [
    ...     part.device.name
    ...     for part in homogeneous_parts(parse_machines("8xV100-32GB + 8xA100-40GB"))
    ... ]
    ['V100-32GB', 'A100-40GB']
    """
    return [replace(cluster, groups=()), *cluster.groups]


def advise_on_cluster(best: LayoutCandidate) -> list[tuple[str, str]]:
    """Return (label, sentence) for each kind of unevenness of the cluster; [] for an even one."""
    cluster = best.case.cluster
    found = []
    if cluster.groups:
        found.append(("mixed", _mixed(best)))
    if cluster.islands > 1:
        found.append(("islands", _islands(best)))
    return found


def _mixed(best: LayoutCandidate) -> str:
    cluster = best.case.cluster
    times = {
        part.device.name: (part.devices, predict_time(replace(best.case, cluster=part)).step_s)
        for part in homogeneous_parts(cluster)
    }
    slowest = max(times, key=lambda name: times[name][1])
    even_s = times[slowest][1]
    devices = sum(count for count, _ in times.values())
    balanced_s = devices / sum(count / step_s for count, step_s in times.values())
    smallest = min(homogeneous_parts(cluster), key=lambda part: part.device.memory_bytes).device
    shares = ", ".join(
        f"{name} {count * balanced_s / step_s / devices:.0%}"
        for name, (count, step_s) in times.items()
    )
    return (
        f"every step waits for {slowest}, and {smallest.name} has the least memory; samples in "
        f"proportion to speed ({shares}) would make a step of {seconds_text(balanced_s)} instead "
        f"of {seconds_text(even_s)}; this version gives every device as many"
    )


def _islands(best: LayoutCandidate) -> str:
    cluster, model = best.case.cluster, best.case.model
    between = cluster.between
    if between is None:
        return ""
    step_s, parameters = best.time.step_s, float(model.trainable)
    every_s = ring_all_reduce_s(cluster.islands, parameters * GRADIENT_BYTES, between)
    policy = IslandsPolicy("diloco", count=cluster.islands)
    facts = IslandsFacts(
        parameters=parameters,
        step_s=step_s,
        bytes_per_s=between.bytes_per_s,
        latency_s=between.latency_s,
        ranks=cluster.devices,
    )
    sent = islands_cost(policy, facts).sent_bytes
    period = smallest_period(policy, facts, UTILISATION)
    if period is None:
        return f"over {between.name} no period keeps {UTILISATION:.0%} of the time in compute"
    return (
        f"{cluster.islands} of these: over {between.name} gradients of every step would take "
        f"{seconds_text(every_s)} beside {seconds_text(step_s)} of compute; averaging weights "
        f"every {period} steps (DiLoCo) keeps {UTILISATION:.0%} of the time in compute, "
        f"{bytes_text(sent)} per island and round"
    )
