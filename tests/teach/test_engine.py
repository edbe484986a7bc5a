"""The event engine: order, lanes, meetings, messages, memory, deadlocks."""

from __future__ import annotations

import pytest

from shoal.base.errors import PlanError
from shoal.teach.costs import AnalyticalCosts
from shoal.teach.engine import Op, run_ops

SECONDS = AnalyticalCosts({"forward": 1.0, "all-reduce": 1.0, "send": 0.0})


def work(amount: float, lane: str = "compute", name: str = "", needs: tuple[str, ...] = ()) -> Op:
    return Op("compute", "forward", amount=amount, lane=lane, name=name, needs=needs)


def refusal(*programs: list[Op]) -> str:
    with pytest.raises(PlanError) as error:
        run_ops(programs, SECONDS)
    return str(error.value)


def test_a_collective_starts_when_the_last_has_come() -> None:
    meet = Op("collective", "all-reduce", "R", "r", range(3), amount=2.0)
    line = run_ops([[work(k), meet, work(1)] for k in (1, 5, 3)], SECONDS)
    meets = {(s.start_s, s.end_s) for s in line.spans if s.kind == "all-reduce"}
    assert meets == {(5, 7)}
    assert line.end_s == 8


def test_lanes_run_side_by_side_and_wait_for_what_they_need() -> None:
    gather = Op("collective", "all-reduce", "G", "g", range(1), amount=3.0, lane="link", name="g")
    line = run_ops([[gather, work(2), work(1, needs=("g",))]], SECONDS)
    assert [(s.lane, s.start_s, s.end_s) for s in line.spans] == [
        ("compute", 0, 2),
        ("link", 0, 3),
        ("compute", 3, 4),
    ]


def test_memory_at_starts_misses_the_last_outputs() -> None:
    program = [
        Op("allocate", key="x", amount=4, part="input"),
        work(1),
        Op("allocate", key="y", amount=8, part="output"),
        Op("free", key="x"),
        work(1),
    ]
    everything = run_ops([program], SECONDS)
    starts = run_ops([program], SECONDS, sample="start")
    assert everything.peak_bytes(0) == 12
    assert starts.peak_bytes(0) == 8
    assert [(h.time_s, h.held_bytes) for h in starts.memory] == [(0, 4), (1, 8)]
    assert everything.memory[-1].parts == {"input": 0, "output": 8}
    assert everything.facts["peak"] == "12 B"


def test_memory_is_in_the_order_of_time_across_lanes() -> None:
    program = [
        Op("allocate", key="a", amount=1, lane="link"),
        work(1, lane="link", name="far"),
        Op("free", key="a", lane="link"),
        work(3),
        Op("allocate", key="b", amount=1),
    ]
    assert run_ops([program], SECONDS).peak_bytes(0) == 1


def test_a_ring_of_waits_is_a_deadlock_with_names() -> None:
    says = refusal(
        *(
            [
                Op("receive", "receive", key=("x", (r - 1) % 3), peer=(r - 1) % 3),
                Op("send", "send", key=("x", r)),
            ]
            for r in range(3)
        )
    )
    assert says.startswith("deadlock: rank 0, operation 0, receive")
    assert "waits for a message of rank 2" in says
    assert "rank 2, operation 0" in says
    assert "rank 1, operation 0" in says


def test_a_collective_that_one_rank_never_joins() -> None:
    meet = Op("collective", "all-reduce", "R", "r", range(3))
    says = refusal([meet], [meet], [work(1)])
    assert "rank 0, operation 0, all-reduce R waits for rank 2 to join" in says


def test_what_no_program_may_do() -> None:
    meet = Op("collective", "all-reduce", "R", "r", range(1, 3))
    assert "R is a collective of other ranks" in refusal([meet], [meet], [meet])
    two = [
        Op("collective", "all-reduce", "R", "r", range(2), lane="link"),
        Op("collective", "all-reduce", "R", "r", range(2)),
    ]
    assert "all-reduce R joins twice" in refusal(two, [])
    send = Op("send", "send", key="x", peer=1)
    assert "rank 0, operation 1: send x is sent twice" in refusal([send, send], [])
    assert "operation 0: free of x, not held" in refusal([Op("free", key="x"), work(1), *HOLD])
    assert "operation 1: h is allocated twice" in refusal([*HOLD, *HOLD])
    assert "no such kind: dance" in refusal([Op("dance")])
    assert "waits for never of its own" in refusal([work(1, needs=("never",))])


HOLD = [Op("allocate", key="h", amount=1.0)]


def test_tables() -> None:
    with pytest.raises(PlanError, match="try: forward"):
        AnalyticalCosts({"forward": 1.0}).seconds(Op("compute", "forwards"))


def test_thousands_of_ranks_in_linear_time() -> None:
    """40 000 operations; a search through the members at each arrival would take minutes."""
    everyone = range(4000)
    meets = [Op("collective", "all-reduce", key=k, ranks=everyone, amount=1.0) for k in range(5)]
    programs = [[op for meet in meets for op in (work(1), meet)] for _ in everyone]
    assert run_ops(programs, SECONDS).end_s == 10
