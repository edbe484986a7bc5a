"""Share of the processor time that each rank asks for and gets; the cost of a busy machine.

    processes.jsonl   seconds for which a rank's main thread ran, and waited for a processor

The kernel counts both, so one process alone shows a busy machine too. Ranks that are late by turns
need at least two (step_costs.py).

    share      ran / (ran + waited), over the time of the newest steps
    step       T' = T with each rank's own time reduced by the time for which it waited

T' is an upper bound: threads of a rank that wait for each other, and caches that other processes
fill, make the time for which it runs longer too. One process that got 9 % was foretold 99 ms
instead of 1.0 s; it took 2.7 ms once it had the machine alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.runlog.damaged_lines import Record, is_number, iter_newest_lines, parse_object
from shoal.report.verdict.step_costs import StepCost
from shoal.report.verdict.step_replay import StepReplay
from shoal.report.verdict.step_seconds import StepSeconds

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

PROCESSES_FILE = "processes.jsonl"
MOST_LINES, LEAST_WINDOW_S = 5_000, 4.0
"""Newest lines that are read · fewest seconds between two samples of a rank."""
ALSO = "Its own work is slower too while others use the cores, so a step may be shorter still."
LEAST_SHARE = 0.1
"""Share of a step from which waiting for a processor is reported."""
MOST_DELAY = 0.98
"""Share of own time that waiting for a processor may take: samples and steps differ a bit."""


@dataclass(frozen=True)
class ProcessorTime:
    """Processor time of a rank's main thread over some seconds."""

    window_s: float
    cpu_s: float
    run_delay_s: float

    @property
    def share(self) -> float:
        """Return the share of the time asked for in which the thread ran.

        >>> ProcessorTime(10.0, 2.0, 6.0).share
        0.25
        """
        asked_s = self.cpu_s + self.run_delay_s
        return self.cpu_s / asked_s if asked_s > 0 else 1.0


def read_processor_times(folder: Path, begin_s: float, end_s: float) -> dict[int, ProcessorTime]:
    """Return the processor time of each rank between two times, from its newest process.

    Args:
        folder: the run's.
        begin_s, end_s: in seconds since 1970; NaN: unknown, and the result is empty.
    """
    newest: dict[int, tuple[float, Record]] = {}
    oldest: dict[int, tuple[float, Record]] = {}
    for time_s, entry in _iter_samples(folder / PROCESSES_FILE, begin_s, end_s):
        rank = int(entry["rank"])
        first = newest.setdefault(rank, (time_s, entry))
        if entry.get("pid") == first[1].get("pid"):
            oldest[rank] = (time_s, entry)
    found = {}
    for rank, (last_s, last) in newest.items():
        first_s, early = oldest[rank]
        cpu_s, delay_s = last["cpu_s"] - early["cpu_s"], last["run_delay_s"] - early["run_delay_s"]
        if last_s - first_s >= LEAST_WINDOW_S and cpu_s >= 0 and delay_s >= 0:
            found[rank] = ProcessorTime(last_s - first_s, cpu_s, delay_s)
    return found


def _iter_samples(path: Path, begin_s: float, end_s: float) -> Iterator[tuple[float, Record]]:
    """Yield time and entry of each sample between two times, the newest first."""
    for line in iter_newest_lines(path, MOST_LINES):
        record = parse_object(line) or {}
        time_s, ranks = record.get("time_s"), record.get("ranks")
        if not is_number(time_s) or not isinstance(ranks, list):
            continue
        if time_s < begin_s:
            return
        if time_s <= end_s:
            yield from ((float(time_s), one) for one in ranks if _is_sound(one))


def _is_sound(entry: Any) -> bool:
    keys = ("rank", "cpu_s", "run_delay_s")
    return isinstance(entry, dict) and all(is_number(entry.get(key)) for key in keys)


def read_run_processor_times(folder: Path, times: StepSeconds) -> dict[int, ProcessorTime]:
    """Return the processor time of each rank over the steps of a verdict; {} if unknown."""
    if not times.by_rank:
        return {}
    return read_processor_times(folder, float(times.end_s[0].min()), float(times.end_s[-1].max()))


def list_processor_costs(
    replay: StepReplay, found: Mapping[int, ProcessorTime]
) -> Iterator[StepCost]:
    """Yield the cost of waiting for a processor.

    Args:
        replay: the steps.
        found: processor time by rank; other ranks count as ranks that never wait.
    """
    delays = {rank: one for rank, one in found.items() if rank in replay.ranks}
    if not delays:
        return
    own_s = replay.own_s.copy()
    for place, rank in enumerate(replay.ranks):
        if rank in delays:
            own_s[:, place] *= 1.0 - _delay_of_own(replay, place, delays[rank])
    yield StepCost(
        "busy_machine",
        f"the machine is busy: {_share_text(delays, replay.ranks)}",
        replay.without(own_s),
        (*evidence_sentences(delays), ALSO),
        "ps -eo pid,ni,psr,pcpu,comm --sort=-pcpu | head",
        LEAST_SHARE,
    )


def _delay_of_own(replay: StepReplay, place: int, time: ProcessorTime) -> float:
    """Return the share of a rank's own seconds in which it waited for a processor."""
    own_s = float(replay.own_s[:, place].sum())
    whole_s = own_s + float(replay.wait_s[:, place].sum())
    busy_s = time.window_s * (own_s / whole_s if whole_s > 0 else 0.0)
    return min(MOST_DELAY, time.run_delay_s / busy_s) if busy_s > 0 else 0.0


def _share_text(delays: Mapping[int, ProcessorTime], ranks: tuple[int, ...]) -> str:
    least = min(delays, key=lambda rank: delays[rank].share)
    who = "the process" if len(ranks) == 1 else f"rank {least}"
    return f"{who} gets {delays[least].share:.0%} of the processor time that it asks for"


def evidence_sentences(delays: Mapping[int, ProcessorTime], below: float = 1.0) -> list[str]:
    """Return a sentence on the rank that gets the least, if its share is below some share."""
    least = min(delays, key=lambda rank: delays[rank].share, default=None)
    if least is None or delays[least].share >= below:
        return []
    time = delays[least]
    idle_s = max(0.0, time.window_s - time.cpu_s - time.run_delay_s)
    return [
        f"Of {time.window_s:.0f} s, rank {least}'s main thread ran for {time.cpu_s:.1f} s, waited "
        f"{time.run_delay_s:.1f} s for a processor (other processes have it, or a limit of its "
        f"container), and for {idle_s:.1f} s for data, disks or other ranks."
    ]
