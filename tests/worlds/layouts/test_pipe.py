"""Pipelines over real processes equal one process, for every schedule; see `pipe_case`."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.report.sections.recorded_actions import read_recorded_step

SAME = 1e-12
SCHEDULES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zbv", 1), ("dualpipe", 1)
]  # fmt: skip
COUNTS = [(4, 3), (2, 5), (2, 2), (4, 4), (4, 9), (4, 1)]
"""All but the first by `make proof`: every schedule's lists are checked for all counts in
tests/planning, and on two ranks a derived pipeline runs each below."""
SHORT = ("1f1b", "interleaved", "zbv", "dualpipe")
"""Schedules on four ranks here. `gpipe` and `zero-bubble` run there for headers and frozen stages, too."""


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "schedule", "chunks"),
    [
        pytest.param(
            *count,
            *one,
            marks=[] if (count, one[0]) in [(COUNTS[0], s) for s in SHORT] else [pytest.mark.proof],
        )
        for count in COUNTS
        for one in SCHEDULES
    ],
)
def test_a_pipeline_equals_one_process(
    worlds, ranks: int, micro_batches: int, schedule: str, chunks: int
) -> None:
    told = worlds(ranks).call(
        "pipe_case:equality", schedule=schedule, micro_batches=micro_batches, chunks=chunks
    )
    assert max(one["far"] for one in told) <= SAME
    assert max(one["loss"] for one in told) <= SAME
    assert [one["eval"] for one in told if one["eval"] is not None] == [pytest.approx(0, abs=SAME)]
    for one in told:
        assert one["most"] == one["planned"], "graphs alive at once"
        assert one["left"] == 0
        assert one["sent"][1] == one["payload"]
        assert one["armed"] == [False] * (one["closes"] - 1) + [True]
        assert one["counted"] == one["closes"]
        assert one["timed"][0] == {}, "read in the second step alone"
        assert [row[0] for row in one["timed"][1]["actions"]] == one["acts"]
    assert_messages_arrive_after_they_are_sent([one["timed"][1] for one in told])


def assert_messages_arrive_after_they_are_sent(timed: list[dict[str, Any]]) -> None:
    """So the reader of a report shifts no rank's clock."""
    first_s = min(one["began_s"] for one in timed)
    rows = [{**one, "began_s": one["began_s"] - first_s} for one in timed]
    found = read_recorded_step([{"step": 2, "ranks": rows}], len(timed), 4_096)
    assert found is not None
    firsts = [next(o.start_s for o in found.actions if o.rank == r) for r in range(len(rows))]
    shifts = [
        s - row["began_s"] - row["actions"][0][2] for s, row in zip(firsts, rows, strict=True)
    ]
    assert max(shifts) - min(shifts) < 1e-3


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_a_derived_pipeline_equals_one_process(worlds, schedule: str, chunks: int) -> None:
    told = worlds(2).call("pipe_case:derived", schedule=schedule, chunks=chunks)
    assert max(one["far"] for one in told) <= SAME
    assert max(one["loss"] for one in told) <= SAME


@pytest.mark.parametrize(
    ("frozen", "schedule"),
    [
        *((1, "1f1b"), (2, "zero-bubble")),
        *(pytest.param(*row, marks=pytest.mark.proof) for row in ((2, "1f1b"), (1, "zero-bubble"))),
    ],
)
def test_frozen_stages_send_and_get_no_gradients(worlds, frozen: int, schedule: str) -> None:
    told = worlds(4).call("pipe_case:equality", schedule=schedule, micro_batches=5, frozen=frozen)
    assert max(one["far"] for one in told) <= SAME
    assert [one["sent"][1] for one in told] == [one["payload"] for one in told]


PLANTED = ["dropped micro-batch", "stage order", "running average"]


@pytest.mark.proof  # each is named: test_planted_divided.py
@pytest.mark.parametrize("planted", PLANTED)
def test_planted_bugs_show(worlds, planted: str) -> None:
    told = worlds(4).call("pipe_case:equality", schedule="1f1b", micro_batches=5, planted=planted)
    assert max(one["far"] for one in told) > 0.1


def test_the_form_is_told_once_per_shape_of_the_inputs(worlds) -> None:
    """Sizes 3, 1, 4, 3, 2: four headers across each of three cuts, in the first step only."""
    told = worlds(4).call("pipe_case:equality", schedule="gpipe", micro_batches=5)
    header_bytes = 8 * (1 + 6 * 4 + 4 * 2 + 2)  # how many; 6 values, 4 of two dims, 2 of one
    assert [one["sent"][0] - one["sent"][1] for one in told] == [4 * header_bytes] * 3 + [0]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.proof), 4])
def test_tensors_of_every_format_arrive(worlds, ranks: int) -> None:
    assert all(all(told) for told in worlds(ranks).call("pipe_case:formats"))


def test_a_message_that_does_not_come_is_named(worlds) -> None:
    told = worlds(2).call("pipe_case:too_late")[1]
    assert told.startswith(
        "ClusterError: pipeline: outputs of stage 0 for stage 1, micro-batch 0: did not come from "
        "rank 0 of the pipeline: "
    )
    assert "imed out" in told
    assert "\n" not in told
