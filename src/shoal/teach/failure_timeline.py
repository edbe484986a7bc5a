"""Simulated and closed-form goodput of a long run: failures, restarts, checkpoints, spare nodes.

The simulated run is a queue of two kinds of events, "a device fails" and "a node is repaired".
Between two of them everything is arithmetic, so the cost of a run of 100 000 devices grows only
with its failures.

    failures     every device at rate 1/M₁, so the run at n/M₁; restarts can be hit as well
    a failure    loses the work since the last checkpoint that is safe on disk, then R of restart
    checkpoint   after every τ of work: C seconds of stall, safe D seconds later
    spare nodes  a share of the failures takes its node away for T of repair; with more than
                 `spares` nodes away the run waits until one is back

The closed form is exact for exponential failures: goodput of calculators/goodput.py, times 1 − B. B
is Erlang's B for s + 1 servers and load T·(nodes lost per second): nodes under repair are calls in
progress, and the run stops when s + 1 are away. B holds for any distribution of T. `shape` below 1
makes failures come in bursts (Weibull; 0.7–0.8 is usual in logs of large machines); only the
simulation is right there.
Sources: calculators/goodput.py; Erlang 1917; Schroeder and Gibson 2006 (shape of failure logs).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.base.errors import PlanError
from shoal.teach.calculators.goodput import goodput, mtbf_s

MOST_FAILURES = 2_000_000


@dataclass(frozen=True)
class FailureCase:
    """A run and its failure rates; times in seconds.

    Attributes:
        interval_s: τ, work between checkpoints.
        stall_s: C.
        write_s: D ≤ τ.
        restart_s: R.
        spares: nodes on standby.
        repair_s: T; 0: a failed node is back when the run is.
        node_share: share of the failures that take a node away.
        shape: Weibull shape of the times between failures.

    Raises:
        PlanError: a value is out of range.
    """

    devices: int
    device_mtbf_s: float
    interval_s: float
    stall_s: float
    restart_s: float
    write_s: float = 0.0
    spares: int = 0
    repair_s: float = 0.0
    node_share: float = 1.0
    shape: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that are out of range."""
        goodput(self.interval_s, self.stall_s, self.restart_s, self.mean_s, self.write_s)
        if self.spares < 0 or self.repair_s < 0:
            raise PlanError(
                f"spares = {self.spares}, repair_s = {self.repair_s:g}: 0 or more; try: "
                f"spares={max(0, self.spares)} repair_s={max(0.0, self.repair_s):g}"
            )
        if not 0 <= self.node_share <= 1:
            raise PlanError(f"node_share = {self.node_share:g}: a share, 0 to 1; try: node_share=1")
        if not 0.2 <= self.shape <= 5:
            raise PlanError(
                f"shape = {self.shape:g}: of a Weibull distribution, 0.2 to 5; try: shape=1"
            )

    @property
    def mean_s(self) -> float:
        """Return the mean time between failures of the whole run."""
        return mtbf_s(self.devices, self.device_mtbf_s)


@dataclass(frozen=True)
class FailureOutcome:
    """Time of a run by use, in seconds; the parts add up to `duration_s`.

    Attributes:
        work_s: progress that was saved.
        checkpoint_s: stalls of checkpoints that counted.
        repeated_s: lost work and stalls.
        restart_s: restarts.
        waiting_s: waiting for a node.
    """

    duration_s: float
    work_s: float
    checkpoint_s: float
    repeated_s: float
    restart_s: float
    waiting_s: float
    failures: int
    checkpoints: int

    @property
    def goodput(self) -> float:
        """Return the share of the time that is saved progress."""
        return self.work_s / self.duration_s


@dataclass(frozen=True)
class RunInterval:
    """Interval between two failures: waiting until `up_s`, restarting until `run_s`, then running.

    Attributes:
        checkpoints: number that became safe in it.
    """

    start_s: float
    up_s: float
    run_s: float
    end_s: float
    checkpoints: int


def erlang_b(servers: int, load: float) -> float:
    """Return the share of time in which all servers are busy, for `load` calls per holding time.

    >>> round(erlang_b(2, 1.0), 4), erlang_b(3, 0.0)
    (0.2, 0.0)
    """
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked


def waiting_share(case: FailureCase) -> float:
    """Return the share of the time in which the run waits because too few nodes are left."""
    if not case.repair_s:
        return 0.0
    return erlang_b(case.spares + 1, case.node_share * case.repair_s / case.mean_s)


def expected_goodput(case: FailureCase) -> float:
    """Return the share of the time that is saved progress, in closed form (shape 1).

    Llama-3 405B: 16 384 GPUs, 3.1 hours between failures; 60 s of stall every 19 minutes, 10
    minutes to restart, no shortage of nodes.

    >>> case = FailureCase(16384, 3.1 * 3600 * 16384, 1140, 60, 600)
    >>> round(expected_goodput(case), 3)
    0.853
    """
    good = goodput(case.interval_s, case.stall_s, case.restart_s, case.mean_s, case.write_s)
    return good * (1 - waiting_share(case))


def least_spares(case: FailureCase, share: float = 0.01) -> int:
    """Return the fewest spare nodes with at most `share` of the time lost to missing nodes.

    >>> least_spares(FailureCase(16384, 3.1 * 3600 * 16384, 1140, 60, 600, repair_s=86400.0))
    14
    """
    if not 0 < share < 1:
        raise PlanError(f"share = {share:g}: between 0 and 1, both out; try: share=0.01")
    load = case.node_share * case.repair_s / case.mean_s
    blocked, spares = load / (1 + load), 0
    while blocked > share:
        spares += 1
        blocked = load * blocked / (spares + 1 + load * blocked)
    return spares


def simulate_failures(case: FailureCase, duration_s: float, seed: int = 0) -> FailureOutcome:
    """Simulate one run of `duration_s` and add up its time by use.

    Raises:
        PlanError: no duration, or one with millions of failures.

    >>> case = FailureCase(16384, 3.1 * 3600 * 16384, 1140, 60, 600)
    >>> run = simulate_failures(case, 54 * 86400.0, seed=1)
    >>> abs(run.failures - 418) < 3 * math.sqrt(418), round(run.goodput, 2)
    (True, 0.85)
    """
    work = stalls = vain = down = waiting = 0.0
    failures, checkpoints = -1, 0
    for stretch in simulate_intervals(case, duration_s, seed):
        failures += 1
        checkpoints += stretch.checkpoints
        ran_s = stretch.end_s - stretch.run_s
        counted_s = stretch.checkpoints * (case.interval_s + case.stall_s)
        work += stretch.checkpoints * case.interval_s
        stalls += stretch.checkpoints * case.stall_s
        vain += ran_s - counted_s
        down += stretch.run_s - stretch.up_s
        waiting += stretch.up_s - stretch.start_s
    return FailureOutcome(duration_s, work, stalls, vain, down, waiting, failures, checkpoints)


def simulate_intervals(
    case: FailureCase, duration_s: float, seed: int = 0
) -> Iterator[RunInterval]:
    """Yield the intervals of the run between failures, in order, cut at `duration_s`."""
    if not 0 < duration_s <= MOST_FAILURES * case.mean_s:
        raise PlanError(
            f"duration_s = {duration_s:g}: more than 0 and at most {MOST_FAILURES:,} mean times "
            f"between failures; try: duration_s={min(86400.0, 1000 * case.mean_s):g}"
        )
    draw = random.Random(seed)
    scale_s = case.mean_s / math.gamma(1 + 1 / case.shape)
    back: list[float] = []
    now, first = 0.0, True
    while now < duration_s:
        up_s = _nodes_ready_s(back, now, case.spares)
        fails_s = up_s + draw.weibullvariate(scale_s, case.shape)
        end_s = min(fails_s, duration_s)
        run_s = min(up_s if first else up_s + case.restart_s, end_s)
        safe = (end_s - run_s - case.write_s) / (case.interval_s + case.stall_s)
        yield RunInterval(
            now, min(up_s, end_s), max(run_s, min(up_s, end_s)), end_s, max(0, int(safe))
        )
        if case.repair_s and draw.random() < case.node_share:
            heapq.heappush(back, fails_s + case.repair_s)
        now, first = end_s, False


def _nodes_ready_s(back: list[float], now: float, spares: int) -> float:
    """Return the time from which the run has enough nodes; `back`: queue of open repairs."""
    while back and back[0] <= now:
        heapq.heappop(back)
    while len(back) > spares:
        now = heapq.heappop(back)
    return now
