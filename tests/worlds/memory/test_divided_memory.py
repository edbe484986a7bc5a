"""What a rank holds and sends under tp and pp is what the plan says, and little enough.

States are counted from live storages after a step's last backward pass, activations are the peak of
what a step holds beyond them, bytes are those of the run's own counters.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from shoal.fabric.collectives.traffic_counts import wire_bytes

TP, PP, BOTH = {"tp": 2}, {"pp": 2, "schedule": "1f1b"}, {"tp": 2, "pp": 2}
WHOLE = {"tp": 2, "sequence_parallel": "off"}
GPIPE = {"pp": 2, "schedule": "gpipe"}
DUALPIPE = {"pp": 2, "schedule": "dualpipe"}

Row = dict[str, Any]

ROWS: dict[int, list[Row]] = {
    2: [
        {"layout": TP, "peak": True},
        {"layout": TP, "precision": "bf16", "tied": True},
        {"layout": WHOLE, "peak": True},
        {"layout": GPIPE, "peak": True, "micro_batches": 8},
        {"layout": PP, "peak": True},
        {"layout": PP, "precision": "bf16", "tied": True},
        {"layout": DUALPIPE, "peak": True},
    ],
    4: [
        {"layout": {"tp": 4}},
        {"layout": {"pp": 4}, "precision": "bf16"},
        {"layout": BOTH, "peak": True},
        {"layout": {"tp": 2, "dp_shard": 2, "zero": 3}, "precision": "bf16"},
        {"layout": {"pp": 2, "dp_shard": 2, "zero": 3}},
        {"layout": {"pp": 2, "dp_shard": 2, "zero": 1}, "tied": True},
        {"layout": {**DUALPIPE, "dp_shard": 2, "zero": 1}, "tied": True},
    ],
}
LONG = ((2, 1), (2, 2), (2, 5), (2, 6), *((4, place) for place in range(7)))
"""Rows that others hold most of."""
PLACES = [(ranks, place) for ranks, rows in ROWS.items() for place in range(len(rows))]
SEEN = [one for one in PLACES if ROWS[one[0]][one[1]].get("peak")]


def is_stated(row: Row) -> bool:
    """Not under fsdp, whose hooks gather parts of sequences, nor in formats autocast chooses."""
    narrow = row.get("precision") == "bf16" and "tp" in row["layout"]
    return row["layout"].get("zero") != 3 and not narrow


SAID = [one for one in PLACES if is_stated(ROWS[one[0]][one[1]])]
NORM, DIM, BLOCKS = 256, 256, 4

Measured = dict[int, list[dict[int, dict[str, Any]]]]


def cases(places: list[tuple[int, int]]) -> list[Any]:
    long = [pytest.param(one, marks=pytest.mark.proof) for one in places if one in LONG]
    return [one for one in places if one not in LONG] + long


def named(place: tuple[int, int]) -> str:
    row = ROWS[place[0]][place[1]]
    words = [f"{axis}{degree}" for axis, degree in row["layout"].items()]
    words += [str(value) for key, value in row.items() if key in ("precision", "micro_batches")]
    return "-".join(words)


@pytest.fixture(scope="module")
def measured(worlds, request: pytest.FixtureRequest) -> Measured:
    """Ranks → what each of them answered to every row, by place; long ones where tests want them."""
    short = request.config.option.markexpr == "not proof"
    found: Measured = {}
    for ranks, rows in ROWS.items():
        places = [n for n in range(len(rows)) if not (short and (ranks, n) in LONG)]
        if not places:
            continue
        wanted = [rows[n] for n in places]
        told = worlds(ranks).call("divided_memory_case:measure", wanted=wanted, deadline_s=240)
        found[ranks] = [dict(zip(places, answers, strict=True)) for answers in told]
    return found


@pytest.mark.parametrize("place", cases(PLACES), ids=named)
def test_states_are_what_the_plan_assigns(measured: Measured, place: tuple[int, int]) -> None:
    for answers in measured[place[0]]:
        held, assigned = answers[place[1]]["held"], answers[place[1]]["assigned"]
        assert sum(held.values()) == pytest.approx(sum(assigned.values()), rel=0.001)
        for kind, expected in assigned.items():
            assert held[kind] == pytest.approx(expected, rel=0.001), kind


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_tensor_parallel_ranks_hold_their_share_exactly(measured: Measured, ranks: int) -> None:
    """All but the norms, which every rank has whole."""
    norms = NORM * (2 * BLOCKS + 1)
    for answers in measured[ranks]:
        found = answers[0]
        assert ROWS[ranks][0]["layout"] == {"tp": ranks}
        assert (found["elements"] - norms) * ranks == found["parameters"] - norms


def test_equal_stages_hold_their_share_exactly(measured: Measured) -> None:
    """Two blocks each, embedding and head are of one size; the last norm is the last stage's."""
    place = next(n for n, row in enumerate(ROWS[2]) if row["layout"] == PP)
    first, last = (answers[place] for answers in measured[2])
    assert first["blocks"] == last["blocks"] == 2
    assert last["elements"] == first["elements"] + NORM
    assert first["elements"] + last["elements"] == first["parameters"]


@pytest.mark.parametrize("place", cases(SEEN), ids=named)
def test_activations_in_flight_are_what_is_foreseen(
    measured: Measured, place: tuple[int, int]
) -> None:
    for answers in measured[place[0]]:
        found = answers[place[1]]
        assert found["foreseen"] == pytest.approx(found["extra"], rel=0.1)


def test_what_falls(measured: Measured) -> None:
    """1f1b keeps two micro-batches where gpipe keeps all."""
    assert extra_of(measured, GPIPE) > 3 * extra_of(measured, PP)


@pytest.mark.proof
def test_what_falls_where_parts_of_sequences_stay_parts(measured: Measured) -> None:
    assert extra_of(measured, TP) < extra_of(measured, WHOLE)


def extra_of(measured: Measured, layout: Row) -> float:
    """What a step holds beyond states on rank 0 of two, in the first row of a layout."""
    place = next(n for n, row in enumerate(ROWS[2]) if row["layout"] == layout)
    return measured[2][0][place]["extra"]


@pytest.mark.parametrize("place", cases(SAID), ids=named)
def test_bytes_are_what_was_stated(measured: Measured, place: tuple[int, int]) -> None:
    """To the byte, and kind by kind."""
    for answers in measured[place[0]]:
        found = answers[place[1]]
        sent: Counter[str] = Counter()
        for kind, payload_bytes, degree in found["calls"]:
            sent[f"{kind}_bytes"] += wire_bytes(kind, payload_bytes, degree)
        assert dict(sent) == pytest.approx({k: v for k, v in found["stated"].items() if v})


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        pytest.param(WHOLE, {"all_reduce": 4}, marks=pytest.mark.proof),
        (TP, {"all_gather": 4, "reduce_scatter": 4}),
    ],
)
def test_collectives_of_a_block(measured: Measured, layout: Row, kinds: dict[str, int]) -> None:
    """Four all-reduces or their pairs; beside them the vocabulary's, and one sum per step."""
    place = next(n for n, row in enumerate(ROWS[2]) if row["layout"] == layout)
    passes, tokens = 4, 2 * 64
    hidden_bytes, numbers_bytes = 4 * tokens * DIM, 2 * 3 * 4 * tokens
    expected: Counter[tuple[str, int]] = Counter()
    for kind, count in kinds.items():
        expected[kind, hidden_bytes] += count * BLOCKS * passes
    if layout is WHOLE:
        expected["all_reduce", hidden_bytes] += passes  # lookup
    else:
        expected["reduce_scatter", hidden_bytes] += passes  # lookup
        expected["all_gather", hidden_bytes] += 2 * passes  # its gradient; what the last norm reads
        expected["all_reduce", 4 * NORM * 2 * BLOCKS] += 1  # the norms' gradients, once a step
    expected["all_reduce", hidden_bytes] += passes  # the head's gradient of hidden states
    expected["all_gather", numbers_bytes] += passes  # three numbers per token of the loss
    for answers in measured[2]:
        counted = Counter((kind, size) for kind, size, _ in answers[place]["calls"])
        assert counted == expected


MIB = 2**20
LIMIT = 440 * MIB
"""The builder's files count in it too, which are mapped privately, but are no memory."""


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_model_too_large_for_one_process_trains_on_four(worlds) -> None:
    """16 bytes of states per element are more than the limit; a quarter of them is not."""
    alone = worlds(1).call("limited_case:train", layout="single", more_bytes=LIMIT)[0]
    assert "can't allocate memory" in alone["failed"]
    together = worlds(4).call("limited_case:train", layout=BOTH, more_bytes=LIMIT)
    for answer in together:
        assert "failed" not in answer, answer
        assert 16 * answer["parameters"] > 1.4 * LIMIT
        assert answer["losses"][-1] < answer["losses"][0]
        assert answer["losses"] == together[0]["losses"]
