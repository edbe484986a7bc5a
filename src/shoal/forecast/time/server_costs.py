"""What a parameter server costs: its messages in a step, and the pace of workers that do not wait.

With W workers, S servers and G bytes of gradients (weights):

    push    every worker sends G, every server receives W·G/S: the busier of the two counts
    pull    every server sends W·G/S, and S − 1 other servers get its part too
    synchronous     a step waits for the slowest worker: compute + push + update + pull
    free running    workers take turns: steps come W times as often as one worker makes them, until
                    the server is busy all the time; a slow worker holds the others only by a bound

Where servers hold embedding tables alone, the rows that a worker's samples look up travel both
ways, each once a step (one per position, taken to be different ones; bags of several count as one),
and the rest is an all-reduce between the workers.

`pace` plays the turns through by the very rule by which servers admit gradients
(base/layouts/parameter_servers.py). Source: Li et al. 2014; Ho et al. 2013
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import Case, TimeEstimate
from shoal.base.layouts.parameter_servers import Admission, free_running, workers_of
from shoal.forecast.time.collective_time import Cost, Group


def pushed(case: Case, group: Group, size_bytes: float) -> Cost:
    """What it takes to bring a worker's gradients, or any tensor of all weights, to the servers."""
    layout = case.layout
    workers = 1 if free_running(layout) else workers_of(layout)
    return _sent(group, size_bytes, max(1.0, workers / layout.servers), size_bytes)


def pulled(case: Case, group: Group, size_bytes: float) -> Cost:
    """What it takes to bring new weights from the servers to those that compute.

    Bytes are a worker's, which sends none then: whose a run's own rows are.
    """
    layout = case.layout
    readers = 1 if free_running(layout) else workers_of(layout) + layout.servers - 1
    return _sent(group, size_bytes, max(1.0, readers / layout.servers), 0.0)


def tables_of(case: Case) -> list[tuple[float, float]]:
    """(rows, width) of the tables on servers: of a placed plan its own, else the embedding's."""
    model, placed = case.model, [row for row in case.plan.placements if row.is_table]
    if placed:
        return [(float(row.shape[0]), float(row.shape[1])) for row in placed]
    tied = {unit.tied_to for unit in model.units}
    units = [u for u in model.units if u.name == "embedding" and u.name not in tied]
    width = float(model.hidden or 1)
    return [(unit.parameters / width, width) for unit in units]


def table_elements(case: Case) -> float:
    """Elements of all tables on servers; 0 where servers hold none alone."""
    return sum(rows * width for rows, width in tables_of(case)) if case.layout.serves else 0.0


def looked_up(case: Case, group: Group, element_bytes: int) -> Cost:
    """What it takes to bring rows to the workers, and their gradients back, in a step.

    Bytes are a worker's, which sends gradients, and the rows' numbers to every server.
    """
    layout = case.layout
    ids = case.accumulate * case.micro_batch * max(1, case.model.sequence)
    used = [(min(rows, float(ids)), width) for rows, width in tables_of(case)]
    one_way = sum(rows * width * element_bytes for rows, width in used)
    numbers = sum(rows * 4 * layout.servers for rows, _ in used)
    return _sent(group, 2 * one_way, max(1.0, workers_of(layout) / layout.servers), 0.0) + _sent(
        group, 0.0, 1.0, one_way + numbers
    )


def _sent(group: Group, size_bytes: float, times: float, sent_bytes: float) -> Cost:
    """`times` the bytes through one link, one after another."""
    link = group.one_link or group.across
    seconds = link.latency_s + times * size_bytes / link.bytes_per_s
    inside = link is group.inside
    return Cost(seconds, sent_bytes if inside else 0.0, 0.0 if inside else sent_bytes)


def in_turns(case: Case, one: TimeEstimate) -> TimeEstimate:
    """The mean time between two steps, of workers that each take as long as `one` for theirs.

    Of a synchronous server `one` itself.
    """
    if not free_running(case.layout):
        return one
    workers = workers_of(case.layout)
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
class Pace:
    """What workers of unequal speed make of a server, in the mean.

    Attributes:
        steps_per_s: steps of the weights.
        staleness, largest: mean and most steps that the weights of an applied gradient lacked.
        by_worker: gradients applied of each.
        held_share: share of the workers' time in which they wait for a turn.
    """

    steps_per_s: float
    staleness: float
    largest: int
    by_worker: tuple[int, ...]
    held_share: float


MOST_STEPS = 200_000
"""Steps that are played through at most: a second or two."""


def pace(
    worker_s: Sequence[float],
    *,
    bound: int | None = None,
    synchronous: bool = False,
    apply_s: float = 0.0,
    steps: int = 2000,
) -> Pace:
    """Play the turns of workers that take `worker_s` each from reading weights to bringing theirs.

    Args:
        worker_s: for the samples of a whole step, which one worker computes.
        bound: as layout.staleness; None: none.
        synchronous: a step's samples are divided evenly and all wait for the slowest.
        apply_s: how long a server takes to apply one gradient and to give weights.

    Raises:
        PlanError: for no worker, times that are none, or a bound that cannot be kept.

    >>> pace([1, 1, 4]).steps_per_s > 2.2, pace([1, 1, 4], synchronous=True).steps_per_s
    (True, 0.75)
    >>> round(pace([1, 1, 4], bound=4).steps_per_s, 2)
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
        return Pace(1 / step_s, 0.0, 0, (steps,) * count, held)
    if bound is not None and bound < count - 1:
        raise PlanError(
            f"staleness = {bound}: {count} workers need at least {count - 1}; try: "
            f"staleness={count - 1}"
        )
    turns, now_s, held_s = Admission(bound), 0.0, 0.0
    arrive = [(seconds, worker) for worker, seconds in enumerate(worker_s)]
    heapq.heapify(arrive)
    came_s: dict[int, float] = {}
    made = [0] * count
    for worker in range(count):
        turns.read(worker)
    while turns.step < steps:
        while arrive and (turns.next() is None or arrive[0][0] <= now_s):
            at_s, worker = heapq.heappop(arrive)
            now_s = max(now_s, at_s)
            came_s[worker] = at_s
            turns.brought(worker)
        worker = turns.next()  # type: ignore[assignment]  # somebody always may
        now_s += apply_s
        held_s += now_s - apply_s - came_s[worker]
        turns.applied(worker)
        made[worker] += 1
        turns.read(worker)
        heapq.heappush(arrive, (now_s + worker_s[worker], worker))
    total = sum(turns.counts.values())
    mean = sum(late * often for late, often in turns.counts.items()) / total
    return Pace(steps / now_s, mean, max(turns.counts), tuple(made), held_s / (now_s * count))
