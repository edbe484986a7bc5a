"""Traces of ranks: clocks, summaries and the checker, on traces made here."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.base.runlog.traced_steps import Flight, TracedRange, chrome_events, encode_rows
from shoal.cli.main import app
from shoal.view.traces.merged_trace import merge_traces
from shoal.view.traces.rank_traces import read_rank_traces
from shoal.view.traces.trace_checks import find_trace_faults
from shoal.view.traces.trace_summary import summarize_traces

MS = 1_000_000
ZERO = 1_700_000_000_000 * MS


def document(rank: int, late_ms: int, clock_ms: int) -> dict[str, Any]:
    """A rank's trace of one step of 100 ms; it comes `late_ms` later to the all-reduce.

    The call is made at 40 ms + late, the first wait for it begins at 60 ms + late, all are done at 90.
    """

    def at(ms: float) -> int:
        return ZERO + round((ms + clock_ms) * MS)

    ranges = [
        TracedRange("step", "step 2", at(0), at(100)),
        TracedRange("part", "forward and backward", at(0), at(60 + late_ms)),
        TracedRange("micro-batch", "micro-batch 0", at(1), at(59)),
        TracedRange("part", "sum over ranks", at(60 + late_ms), at(90)),
        TracedRange("wait", "wait for ranks", at(60 + late_ms), at(90)),
        TracedRange("part", "optimizer", at(90), at(100)),
    ]
    flights = [
        Flight("all_reduce", (0, 1), 0, 4096, "bucket 0", at(40 + late_ms), at(90)),
        Flight("send" if rank == 0 else "receive", (0, 1), 0, 64, "", at(5 + rank), at(8 + rank)),
    ]
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 1.0, "dur": 5.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::t", "pid": 77, "tid": 77, "ts": 2.0, "dur": 3.0},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 3, "pid": 77, "tid": 77, "ts": 2.0},
    ]  # fmt: skip
    clocks = [[at(ms) for ms in range(start, start + 9)] for start in (-20, 110)]
    return {
        "traceEvents": events + chrome_events(77, ranges, flights, ZERO),
        "baseTimeNanoseconds": at(0),
        "shoal": {"rank": rank, "ranks": 2, "steps": [2, 2], "clocks": clocks,
                  **encode_rows(ranges, flights)},
    }  # fmt: skip


def write(folder: Path, *documents: dict[str, Any]) -> Path:
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    for rank, one in enumerate(documents):
        (folder / "traces" / f"steps-2-2-rank-{rank}.json").write_text(json.dumps(one))
    (folder / "events.jsonl").write_text("")
    return folder


def faults(folder: Path, *documents: dict[str, Any]) -> list[str]:
    traces = read_rank_traces(write(folder, *documents))
    return find_trace_faults(merge_traces(traces), traces)


def test_clocks_are_aligned_and_time_is_told_apart(tmp_path: Path) -> None:
    """Rank 1's clock is 7 s ahead; it comes 20 ms later, for which rank 0 is idle."""
    traces = read_rank_traces(write(tmp_path, document(0, 0, 0), document(1, 20, 7000)))
    assert traces[1].clock.differences == (-7000 * MS, -7000 * MS)
    found = summarize_traces(traces)
    rounded = [
        [round(1e3 * n) for n in (one.compute_s, one.alone_s, one.idle_s, one.hidden_s)]
        for one in found
    ]
    # Under way on both from 60 ms on; rank 1 computes until 80. Messages are not counted as hidden.
    assert rounded == [[70, 30, 0, 0], [90, 10, 0, 20]]
    late = summarize_traces(
        read_rank_traces(write(tmp_path, document(0, 0, 0), document(1, 29, 0)))
    )
    assert round(1e3 * late[0].idle_s) == 9, "it waits from 60 to 69 ms for a rank that is late"
    merged = merge_traces(traces)
    ends = [one["ts"] + one["dur"] for one in merged["traceEvents"] if one.get("cat") == "step"]
    assert ends == pytest.approx([100e3, 100e3])
    assert find_trace_faults(merged, traces) == []


def test_ranks_of_one_machine_share_a_clock(tmp_path: Path) -> None:
    """A busy machine shows rank 1 the ends of collectives 3 ms late: no difference of clocks."""
    documents = [document(0, 0, 0), document(1, 20, 0)]
    documents[1]["shoal"]["clocks"] = [
        [at + 3 * MS for at in row] for row in documents[1]["shoal"]["clocks"]
    ]
    apart = read_rank_traces(write(tmp_path, *documents))
    assert apart[1].clock.differences == (-3 * MS, -3 * MS)
    for one in documents:
        one["shoal"]["clock"] = "4f1b"
    assert read_rank_traces(write(tmp_path, *documents))[1].clock.differences == (0, 0)


def _edit(rank: int, change: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    return lambda documents: change(documents[rank])


def _shift(row: list[Any], ms: float) -> None:
    row[-2:] = [time + round(ms * MS) for time in row[-2:]]


FAULTS: dict[str, tuple[Callable[..., None], str]] = {
    "a collective that ends early": (
        _edit(0, lambda one: one["shoal"]["flights"][0].__setitem__(-1, ZERO + 50 * MS)), "before all of"),
    "a message that arrives early": (
        _edit(1, lambda one: _shift(one["shoal"]["flights"][1], -9)), "arrives"),
    "a call that one rank did not make": (
        _edit(1, lambda one: one["shoal"]["flights"].pop(0)), "not made by [1]"),
    "a part that leaves its step": (
        _edit(0, lambda one: one["shoal"]["ranges"][-1].__setitem__(-1, ZERO + 101 * MS)), "optimizer ends"),
    "an operation that crosses another": (
        _edit(0, lambda one: one["traceEvents"][1].__setitem__("dur", 9.0)), "aten::t ends"),
    "a time that is no number": (
        _edit(0, lambda one: one["traceEvents"][0].__setitem__("dur", -1.0)), "length"),
    "a flow without id": (_edit(1, lambda one: one["traceEvents"][2].pop("id")), "without id"),
    "a name that is none": (
        _edit(1, lambda one: one["traceEvents"][0].__setitem__("name", 5)), "has no name"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_checker_finds_a_planted_fault(tmp_path: Path, name: str) -> None:
    documents = [document(0, 0, 0), document(1, 20, 3)]
    assert faults(tmp_path, *copy.deepcopy(documents)) == []
    plant, said = FAULTS[name]
    plant(documents)
    found = faults(tmp_path, *documents)
    assert found
    assert said in found[0], found


def test_the_command_prints_writes_and_refuses(tmp_path: Path) -> None:
    run = write(tmp_path / "run", document(0, 0, 0), document(1, 20, 7000))
    done = CliRunner().invoke(app, ["trace", str(run)])
    assert done.exit_code == 0, done.output
    assert "70.0 ms  70%" in done.output
    assert "checked: form, nesting" in done.output
    merged = json.loads((run / "traces" / "steps-2-2.json").read_text())
    assert {one["pid"] for one in merged["traceEvents"]} == {0, 1, 100, 101}
    done = CliRunner().invoke(app, ["trace", str(run), "--json", "--out", str(tmp_path / "o.json")])
    assert json.loads(done.output)["ranks"][1]["rank"] == 1
    assert (tmp_path / "o.json").is_file()
    (run / "traces" / "steps-2-2-rank-1.json").unlink()
    done = CliRunner().invoke(app, ["trace", str(run)])
    assert "rank 1's trace of the steps 2 to 2 is not here; try: copy it" in str(done.exception)
    (run / "traces" / "steps-2-2-rank-0.json").write_text("{}")
    done = CliRunner().invoke(app, ["trace", str(run)])
    assert "is no trace with the parts of a step" in str(done.exception)
    done = CliRunner().invoke(app, ["trace", str(write(tmp_path / "none"))])
    assert "has no trace; try: shoal train --resume" in str(done.exception)
