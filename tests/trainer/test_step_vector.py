"""The vector of a step's one all-reduce: its entries are read by name, whichever way leads in."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_small import linear, pair, run_of

from shoal.base.errors import BugError
from shoal.trainer.free_passes import FreePasses
from shoal.trainer.served_server import _same_on_all_ranks
from shoal.trainer.step_vector import StepVector, zero_sum_term

RANKS = 3


def vector_of(rank: int) -> StepVector:
    vector = StepVector(RANKS, rank)
    vector.add_sums("loss", [1.5 * rank, 2.0])
    own = vector.add_by_rank("late", [0.0, 0.0])
    vector.add_by_rank("lr", [10.0 + rank])
    vector.add_sums("none", [])
    vector.add_sums("used", [float(rank == 1)])
    vector.add_rest("measured")
    vector.values[own] = [100.0 + rank, 200.0 + rank]  # as a device would fill it
    return vector


def test_what_ranks_add_is_read_by_name() -> None:
    vectors = [vector_of(rank) for rank in range(RANKS)]
    summed = [sum(column) for column in zip(*(one.values for one in vectors), strict=True)]
    for vector in vectors:
        numbers = vector.summed([*summed, 7.0, 8.0])
        assert numbers.sums("loss") == [4.5, 6.0]
        assert numbers.rows("late") == [[100.0, 101.0, 102.0], [200.0, 201.0, 202.0]]
        assert numbers.row("lr") == [10.0, 11.0, 12.0]
        assert numbers.sums("none") == numbers.rows("none") == []
        assert numbers.sums("used") == [1.0]
        assert numbers.sums("measured") == [7.0, 8.0]


def test_a_name_has_one_entry() -> None:
    vector = vector_of(0)
    with pytest.raises(BugError, match="two entries of the name lr"):
        vector.add_sums("lr", [1.0])


def test_what_is_the_same_on_all_ranks_needs_no_message() -> None:
    numbers = _same_on_all_ranks(2, {"lr": [0.5], "late": [1.0, 2.0]}, {"unreadable": [3.0]})
    assert numbers.row("lr") == [0.5, 0.5]
    assert numbers.rows("late") == [[1.0, 1.0], [2.0, 2.0]]
    assert numbers.sums("unreadable") == [3.0]


def test_all_ways_into_a_step_give_the_same_entries() -> None:
    """Batches, written-out passes, free passes: none moves what another one reads."""

    batch = pair(4)
    tallies: dict[str, Any] = {}
    run = run_of(linear())
    run.forward_backward(batch)
    tallies["batches"] = run._tally
    run = run_of(linear())
    for micro in run.micro_batches(batch):
        run.backward(((run.model(micro.inputs) - micro.targets) ** 2).sum(), 4)
    assert run._own is not None
    tallies["written-out passes"] = run._own.finish()
    run = run_of(linear())
    run.begin(None)
    passes = FreePasses(run.program, run.step_count, run.scale, run.flags)
    loss = ((passes.forward(batch[0]) - batch[1]) ** 2).sum(1).mean()
    passes.backward(loss, share=1.0, last=True)
    tallies["free passes"] = passes.finish()

    own = {"written-out passes": {"backward_calls", "counts"}, "free passes": {"backward_passes"}}
    expected = set(tallies["batches"].numbers.slices)
    assert {"loss_and_count", "drift", "unreadable", "used", "measured"} <= expected
    for way, tally in tallies.items():
        numbers = tally.numbers
        assert set(numbers.slices) == expected | own.get(way, set()), way
        for name in expected - {"measured"}:
            assert len(numbers.sums(name)) == len(tallies["batches"].numbers.sums(name)), (
                way,
                name,
            )
        assert numbers.row("training_mode") == [1.0], way
        assert numbers.sums("used") == [1.0] * 4, way
    assert tallies["written-out passes"].numbers.rows("backward_calls") == [[1.0], [1.0]]
    assert tallies["free passes"].numbers.row("backward_passes") == [1.0]


def test_a_zero_sum_is_zero_where_ranks_agree_and_else_it_is_not() -> None:
    """Groups may differ from one another; float64 adds the largest terms exactly."""
    ranks = 64
    groups = [tuple(range(first, ranks, 8)) for first in range(8)]

    def summed(values: list[int], step: int) -> float:
        total = 0.0
        for group in groups:
            for rank in group:
                total += zero_sum_term(values[rank], step, group, rank, ranks)
        return total

    largest = [2**32 - 1 - rank % 8 for rank in range(ranks)]
    missed = 0
    for step in range(1, 200):
        assert summed(largest, step) == 0.0
        rank = step % ranks
        other = [*largest[:rank], largest[rank] ^ 1 << step % 26, *largest[rank + 1 :]]
        missed += summed(other, step) == 0.0
    assert missed == 0
    everyone = tuple(range(4096))
    terms = [zero_sum_term(2**26 - 1, 7, everyone, rank, 4096) for rank in everyone]
    assert sum(map(abs, terms)) < 2**53, "no order of adding rounds"
