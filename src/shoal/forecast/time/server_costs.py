"""Predicted costs of a parameter server: messages per step, and the pace of async workers.

With W workers, S servers and G bytes of gradients (weights):

    push    every worker sends G, every server receives W·G/S: the busier of the two counts
    pull    every server sends W·G/S, and S − 1 other servers get its part too
    synchronous     a step waits for the slowest worker: compute + push + update + pull
    free running    workers take turns: W times as many steps as one worker makes, until the server
                    is always busy; a slow worker delays the others only through the bound

Servers may hold embedding tables alone. Then the rows that a worker's samples look up travel both
ways, each once a step (one per position, assumed distinct; bags of several count as one), and an
all-reduce between the workers sums the rest.

`simulate_pace` simulates the turns by the rule by which servers admit gradients
(base/layouts/parameter_servers.py). Source: Li et al. 2014; Ho et al. 2013
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import PlanningCase, TimeEstimate
from shoal.base.layouts.parameter_servers import (
    StalenessGate,
    count_workers,
    updates_asynchronously,
)
from shoal.forecast.time.collective_time import AxisGroup, CollectiveCost


def push_cost(case: PlanningCase, group: AxisGroup, size_bytes: float) -> CollectiveCost:
    """Return the cost of sending a worker's gradients, or any whole model, to the servers."""
    layout = case.layout
    workers = 1 if updates_asynchronously(layout) else count_workers(layout)
    return _sequential_cost(group, size_bytes, max(1.0, workers / layout.servers), size_bytes)


def pull_cost(case: PlanningCase, group: AxisGroup, size_bytes: float) -> CollectiveCost:
    """Return the cost of sending new weights from the servers to the workers.

    The bytes are those that a worker sends, which is 0: a run's report counts a worker.
    """
    layout = case.layout
    readers = 1 if updates_asynchronously(layout) else count_workers(layout) + layout.servers - 1
    return _sequential_cost(group, size_bytes, max(1.0, readers / layout.servers), 0.0)


def server_tables(case: PlanningCase) -> list[tuple[float, float]]:
    """Return (rows, width) of tables on servers: a placed plan's own, else the embedding's."""
    model, placed = case.model, [row for row in case.plan.placements if row.is_table]
    if placed:
        return [(float(row.shape[0]), float(row.shape[1])) for row in placed]
    tied = {unit.tied_to for unit in model.units}
    units = [u for u in model.units if u.name == "embedding" and u.name not in tied]
    width = float(model.hidden or 1)
    return [(unit.parameters / width, width) for unit in units]


def table_elements(case: PlanningCase) -> float:
    """Return the elements of all tables on servers; 0 unless servers hold only tables."""
    return sum(rows * width for rows, width in server_tables(case)) if case.layout.serves else 0.0


def lookup_cost(case: PlanningCase, group: AxisGroup, element_bytes: int) -> CollectiveCost:
    """Return the cost of sending looked-up rows to workers and their gradients back, per step.

    The bytes are a worker's, which sends gradients, and the row indices to every server.
    """
    layout = case.layout
    ids = case.accumulate * case.micro_batch * max(1, case.model.sequence)
    used = [(min(rows, float(ids)), width) for rows, width in server_tables(case)]
    one_way = sum(rows * width * element_bytes for rows, width in used)
    numbers = sum(rows * 4 * layout.servers for rows, _ in used)
    return _sequential_cost(
        group, 2 * one_way, max(1.0, count_workers(layout) / layout.servers), 0.0
    ) + _sequential_cost(group, 0.0, 1.0, one_way + numbers)


def _sequential_cost(
    group: AxisGroup, size_bytes: float, times: float, sent_bytes: float
) -> CollectiveCost:
    """Return the cost of `times` the bytes through one link, sequentially."""
    link = group.only_link or group.across
    seconds = link.latency_s + times * size_bytes / link.bytes_per_s
    inside = link is group.inside
    return CollectiveCost(seconds, sent_bytes if inside else 0.0, 0.0 if inside else sent_bytes)


def async_step_time(case: PlanningCase, one: TimeEstimate) -> TimeEstimate:
    """Return the mean time between steps of async workers that each take `one` per step.

    For a synchronous server it is `one` itself.
    """
    if not updates_asynchronously(case.layout):
        return one
    workers = count_workers(case.layout)
    update_s = one.parts.get("optimizer", 0.0)
    step_s = max(one.step_s / workers, update_s)
    share = step_s / one.step_s if one.step_s else 1.0
    return replace(
        one,
        parts={name: seconds * share for name, seconds in one.parts.items()},
        step_s=step_s,
        low_s=one.low_s * share,
        high_s=one.high_s * share,
    )


@dataclass(frozen=True)
class ServerPace:
    """Simulated pace of a parameter server with workers of unequal speed, on average.

    Attributes:
        steps_per_s: updates of the weights per second.
        staleness, largest: mean and largest number of updates that an applied gradient lacked.
        held_share: share of the workers' time in which they wait for a turn.
    """

    steps_per_s: float
    staleness: float
    largest: int
    held_share: float


MOST_STEPS = 200_000
"""Most simulated steps: a second or two of computation."""


def simulate_pace(
    worker_s: Sequence[float],
    *,
    bound: int | None = None,
    synchronous: bool = False,
    apply_s: float = 0.0,
    steps: int = 2000,
) -> ServerPace:
    """Simulate workers that take `worker_s` each from reading weights to sending gradients.

    Args:
        worker_s: for the samples of a whole step, which one worker computes.
        bound: as layout.staleness; None: none.
        synchronous: a step's samples are divided evenly, and all workers wait for the slowest.
        apply_s: seconds in which a server applies one gradient and returns weights.

    Raises:
        PlanError: no worker, times ≤ 0, or a bound that cannot be kept.

    >>> (
    ...     simulate_pace([1, 1, 4]).steps_per_s > 2.2,
    ...     simulate_pace([1, 1, 4], synchronous=True).steps_per_s,
    ... )
    (True, 0.75)
    >>> round(simulate_pace([1, 1, 4], bound=4).steps_per_s, 2)
    1.25
    """
    if not worker_s or min(worker_s) <= 0:
        raise PlanError("worker_s: every worker takes more than 0 seconds; try: worker_s=1,1,4")
    if not 1 <= steps <= MOST_STEPS:
        raise PlanError(f"steps = {steps}: 1 to {MOST_STEPS} are played; try: steps=2000")
    count = len(worker_s)
    if synchronous:
        step_s = max(worker_s) / count + apply_s
        held = 1 - sum(worker_s) / count**2 / step_s
        return ServerPace(1 / step_s, 0.0, 0, held)
    if bound is not None and bound < count - 1:
        raise PlanError(
            f"staleness = {bound}: {count} workers need at least {count - 1}; try: "
            f"staleness={count - 1}"
        )
    turns, now_s, held_s = StalenessGate(bound), 0.0, 0.0
    arrive = [(seconds, worker) for worker, seconds in enumerate(worker_s)]
    heapq.heapify(arrive)
    came_s: dict[int, float] = {}
    for worker in range(count):
        turns.read(worker)
    while turns.step < steps:
        while arrive and (turns.next_worker() is None or arrive[0][0] <= now_s):
            at_s, worker = heapq.heappop(arrive)
            now_s = max(now_s, at_s)
            came_s[worker] = at_s
            turns.record_gradient(worker)
        worker = turns.next_worker()  # type: ignore[assignment]  # one worker may always go on
        now_s += apply_s
        held_s += now_s - apply_s - came_s[worker]
        turns.record_applied(worker)
        turns.read(worker)
        heapq.heappush(arrive, (now_s + worker_s[worker], worker))
    total = sum(turns.counts.values())
    mean = sum(late * often for late, often in turns.counts.items()) / total
    return ServerPace(steps / now_s, mean, max(turns.counts), held_s / (now_s * count))
