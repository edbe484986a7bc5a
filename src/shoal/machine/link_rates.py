"""Measured latency and rate of each collective, by mesh axis.

Formula   seconds = rounds·α + sent·β, fitted to several sizes by least relative errors
          all-reduce       rounds 2(n−1), sent 2(n−1)/n · M
          reduce-scatter, all-gather, all-to-all   rounds n−1, sent (n−1)/n · M
          broadcast        rounds ⌈log2 n⌉, sent M
Axes      inside: the ranks of one machine; across: one rank of each machine
Protocol  every rank runs the same calls; the time of a size is that of the slowest rank in its
          best round
Calls     `measure_links` times the calls of a run, with the memory that they allocate;
          `measure_groups` times bare collectives
Source    Hockney 1994 (α, β); ring collectives: Thakur et al. 2005
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.fabric import World
from shoal.fabric.axis_worlds import axis_world
from shoal.fabric.device import synchronize
from shoal.fabric.exchanges.timed_collectives import (
    EVERY,
    OF_PLANS,
    prepare_bare_collective,
    prepare_run_collective,
)
from shoal.forecast.time.collective_time import broadcast_rounds as doublings

REPEATS = 5


def measure_links(
    world: World, axes: dict[str, int], message_bytes: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Measure latency and rate of every collective on every axis of more than one rank.

    A collective: every rank calls it, and all get the same result.

    Args:
        axes: degrees whose product is the world's size, outermost first.
        message_bytes: whole messages M to try, at least two different ones.

    Returns:
        Axis → {"ranks", kind → {"latency_s", "bytes_per_s", "error", "points"}}.
    """
    found: dict[str, dict[str, Any]] = {}
    for axis, degree in axes.items():
        if degree == 1:
            continue
        group = world if degree == world.size else axis_world(world, axes, [axis])
        told: dict[str, Any] = {"ranks": degree}
        for kind in OF_PLANS:
            points = [
                (size, _best_collective_s(world, group, kind, size)) for size in message_bytes
            ]
            told[kind] = {**fit_line(points, degree, kind), "points": points}
        found[axis] = told
    return found


def merge_links(passes: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge several results of `measure_links`, by the shortest time of each message."""
    found: dict[str, dict[str, Any]] = {}
    for axis, first in passes[0].items():
        told: dict[str, Any] = {"ranks": first["ranks"]}
        for kind in OF_PLANS:
            tries = zip(*(passed[axis][kind]["points"] for passed in passes), strict=True)
            points = [min(same, key=lambda point: point[1]) for same in tries]
            told[kind] = {**fit_line(points, first["ranks"], kind), "points": points}
        found[axis] = told
    return found


def measure_groups(
    world: World, groups: dict[str, World], message_bytes: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Time every collective at each message size; groups of one name run at the same time.

    A collective with the same result on all ranks.

    Args:
        groups: name → the group of this rank.

    Returns:
        Per group its name, ranks, the number of groups that run at once, and by kind the `fit_line`
        of medians with points: bytes, median_s and best_s of the slowest rank, model_s,
        bus_bytes_per_s.
    """
    found = []
    for name, group in groups.items():
        links: dict[str, Any] = {}
        for kind in EVERY:
            times = {
                size: slowest_by_round(
                    time_calls(world, prepare_bare_collective(group, kind, size), repeats)
                )
                for size in message_bytes
            }
            medians = {size: statistics.median(taken) for size, taken in times.items()}
            line = fit_line(list(medians.items()), group.size, kind)
            rounds, share = _rounds_and_share(kind, group.size)
            points = [
                {
                    "bytes": size,
                    "median_s": medians[size],
                    "best_s": min(taken),
                    "model_s": rounds * line["latency_s"] + share * size / line["bytes_per_s"],
                    "bus_bytes_per_s": share * size / medians[size],
                }
                for size, taken in times.items()
            ]
            links[kind] = {**line, "points": points}
        at_once = world.size // group.size
        found.append({"name": name, "ranks": group.size, "at_once": at_once, "links": links})
    return found


def slowest_by_round(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return for each round the time of the slowest rank.

    >>> slowest_by_round([[1.0, 4.0], [2.0, 3.0]])
    [2.0, 4.0]
    """
    return [max(times) for times in zip(*by_rank, strict=True)]


def _best_collective_s(world: World, group: World, kind: str, size_bytes: int) -> float:
    """Return the shortest time of one collective on the slowest rank; same on all ranks."""
    call = prepare_run_collective(group, kind, size_bytes)
    return max(min(own) for own in time_calls(world, call, REPEATS))


def time_calls(world: World, call: Callable[[], object], repeats: int) -> list[list[float]]:
    """Return the seconds of repeated calls of a collective, by rank; the same on all ranks."""
    call()
    world.barrier()
    taken: list[float] = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        call()
        synchronize(world.device)
        taken.append(time.perf_counter() - began_s)
    return [list(map(float, own)) for own in world.gather_json(taken)]


def _rounds_and_share(kind: str, ranks: int) -> tuple[float, float]:
    """Return (rounds, share of the message that a rank sends)."""
    if kind == "broadcast":
        return float(doublings(ranks)), 1.0
    both = 2 if kind == "all_reduce" else 1
    return float(both * (ranks - 1)), both * (ranks - 1) / ranks


def fit_line(points: Sequence[tuple[float, float]], ranks: int, kind: str) -> dict[str, float]:
    """Fit α and β to (message bytes, seconds), by least relative errors.

    Returns:
        The keys latency_s (per round), bytes_per_s and error: the mean relative distance from the
        line. A latency that noise would make negative is 0. If time does not grow with size, the
        rate is the lower bound that the largest message reached.

    >>> told = fit_line([(1e3, 1e-4 + 1e-6), (1e6, 1e-4 + 1e-3)], 2, "all_gather")
    >>> round(told["latency_s"], 8), round(told["bytes_per_s"]), round(told["error"], 6)
    (0.0001, 500000000, 0.0)
    """
    rounds, share = _rounds_and_share(kind, ranks)
    rows = [(rounds / s, share * m / s) for m, s in points]
    aa = sum(a * a for a, _ in rows)
    bb = sum(b * b for _, b in rows)
    ab = sum(a * b for a, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    spread = aa * bb - ab * ab
    alpha = (a1 * bb - b1 * ab) / spread if spread > 0 else 0.0
    beta = (b1 * aa - a1 * ab) / spread if spread > 0 else b1 / bb
    if alpha < 0:
        alpha, beta = 0.0, b1 / bb
    elif beta <= 0:
        size, seconds = max(points)
        beta = seconds / (share * size)
        alpha = max(0.0, (a1 - beta * ab) / aa)
    error = sum(abs(alpha * a + beta * b - 1) for a, b in rows) / len(rows)
    return {"latency_s": alpha, "bytes_per_s": 1 / beta, "error": error}
