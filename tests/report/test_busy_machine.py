"""A process that waits for a processor: what is recorded, and the verdict on it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_verdict import OWN_S, SUM_S, make_run

from shoal.launch.watch import process_records
from shoal.launch.watch.hang_watch import HangWatch
from shoal.launch.watch.process_records import PROCESSES_FILE, ProcessRecordFile
from shoal.report.verdict import find_verdict, processor_shares
from shoal.report.verdict.processor_shares import read_processor_times
from shoal.wire.phases import PASSES
from shoal.wire.watch_page import PAGE_VARIABLE, WatchPage


def write_samples(folder: Path, shares: dict[int, float], *, until_s: float, pid: int = 7) -> None:
    """Write samples of ranks that run for a share of the time, and wait for the rest."""
    lines = [
        {
            "time_s": 1000.0 + at,
            "host": "a",
            "ranks": [
                {
                    "rank": rank, "pid": pid, "cpu_s": 3.0 + share * at,
                    "run_delay_s": 1.0 + (1 - share) * at,
                }
                for rank, share in shares.items()
            ],
        }
        for at in range(0, int(until_s - 1000.0) + 1)
    ]  # fmt: skip
    with (folder / PROCESSES_FILE).open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("share", [0.19, 0.6])
def test_one_process_on_a_busy_machine(tmp_path: Path, share: float) -> None:
    """A process has no other one that waits for it; the kernel's counters name the cause."""
    alone_s = sum(OWN_S.values()) + SUM_S
    slow = lambda _, __, part: OWN_S[part] * (1 / share - 1)  # noqa: E731
    took_s = make_run(tmp_path, slow, ranks=1, steps=200)
    assert find_verdict(tmp_path).kind == "nothing"  # without samples nobody knows
    write_samples(tmp_path, {0: share}, until_s=1000.0 + sum(took_s))
    verdict = find_verdict(tmp_path)
    assert verdict.kind == "busy_machine"
    assert verdict.cause == (
        f"the machine is busy: the process gets {share:.0%} of the processor time that it asks for"
    )
    assert verdict.without_s == pytest.approx(alone_s, rel=0.1)
    assert "ran for" in verdict.evidence[0]


def test_a_process_that_has_its_processor_has_no_verdict(tmp_path: Path) -> None:
    """The parts of a step are named instead, so that nobody reads them as nothing."""
    took_s = make_run(tmp_path, ranks=1, steps=400)
    write_samples(tmp_path, {0: 0.97}, until_s=1000.0 + sum(took_s))
    verdict = find_verdict(tmp_path)
    assert verdict.kind == "nothing"
    assert "forward and backward 8" in verdict.line()
    assert "the optimizer 7%" in verdict.line()


def test_a_slow_rank_that_gets_no_processor_is_explained(tmp_path: Path) -> None:
    slow = lambda _, rank, part: OWN_S[part] * (rank == 1 and part == "passes") * 2  # noqa: E731
    took_s = make_run(tmp_path, slow, ranks=2, steps=200)
    write_samples(tmp_path, {0: 1.0, 1: 0.7}, until_s=1000.0 + sum(took_s))
    verdict = find_verdict(tmp_path)
    assert verdict.kind == "slow_rank"
    assert (
        "rank 1's main thread ran for 12.6 s, waited 5.4 s for a processor" in verdict.evidence[-1]
    )


def test_samples_of_an_older_process_do_not_count(tmp_path: Path) -> None:
    """Counters start anew with a process, and damaged lines are left out."""
    write_samples(tmp_path, {0: 0.1}, until_s=1005.0, pid=3)
    with (tmp_path / PROCESSES_FILE).open("a") as file:
        file.write('{"time_s": 1005.5, "ranks": [{"rank": 0}, 3]}\n[]\n{"ti\n')
    write_samples(tmp_path, {0: 0.9}, until_s=1009.0, pid=4)
    found = read_processor_times(tmp_path, 1000.0, 1100.0)
    assert found[0].share == pytest.approx(0.9)
    assert found[0].window_s == pytest.approx(9.0)
    assert read_processor_times(tmp_path, float("nan"), float("nan")) == {}
    assert read_processor_times(tmp_path / "none", 0.0, 1e9) == {}


counts = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count"
)


@counts
def test_the_watch_records_ranks_of_this_machine(tmp_path: Path) -> None:
    """A process id of another machine means nothing here; lines have their least distance."""
    file = ProcessRecordFile(tmp_path)
    ranks = [SimpleNamespace(rank=rank, pid=os.getpid()) for rank in (0, 1)]
    file.append_sample([*ranks, SimpleNamespace(rank=2, pid=1 << 30)], {0: None, 2: None})
    file.append_sample(ranks, {0: None})
    lines = (tmp_path / PROCESSES_FILE).read_text().splitlines()
    (record,) = (json.loads(line) for line in lines)
    (rank,) = record["ranks"]
    assert (rank["rank"], rank["pid"]) == (0, os.getpid())
    assert rank["cpu_s"] > 0.01
    assert rank["run_delay_s"] >= 0.0
    ProcessRecordFile(tmp_path / "none").append_sample(ranks, {0: None})
    assert not (tmp_path / "none").exists()


def test_reader_and_writer_name_one_file() -> None:
    assert processor_shares.PROCESSES_FILE == process_records.PROCESSES_FILE


@counts
def test_the_watch_begins_with_the_first_step(tmp_path: Path) -> None:
    """A start says nothing of steps: imports and reads of a disk are in it."""
    watch = HangWatch(tmp_path, lambda event, **fields: None, 1e9)
    (path,) = watch.start_attempt(1)
    page = WatchPage.open({PAGE_VARIABLE: path})
    rank: Any = SimpleNamespace(rank=0, pid=os.getpid(), code=None)
    try:
        for step in (0, 1):
            if step:
                page.record_part(PASSES)
                page.record_step_end(step, peak_bytes=1)
            watch._looked_s = 0.0
            watch.poll([rank])
            assert (tmp_path / PROCESSES_FILE).exists() == bool(step), step
    finally:
        page._cast(memoryview(bytearray(1 << 20)))
        watch.close()
