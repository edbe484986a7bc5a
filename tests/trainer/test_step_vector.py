"""The vector of a step's one all-reduce: its entries are read by name, whichever way leads in."""

from __future__ import annotations

from typing import Any, cast

import pytest
from trainer_small import linear, pair, run_of

from shoal.base.errors import BugError
from shoal.fabric import World
from shoal.trainer.passes.free_passes import FreePasses
from shoal.trainer.servers.server_loop import _make_equal_numbers
from shoal.trainer.step.step_vector import (
    UNLIKE,
    Invariant,
    InvariantCheck,
    InvariantGroup,
    StepVector,
    zero_sum_terms,
)

RANKS = 3


class Ranks:
    """A world whose members say what they are given to say."""

    def __init__(self, ranks: int, told: list[Any]) -> None:
        self.size, self.told, self.asked = ranks, told, 0

    def gather_json(self, _own: Any) -> list[Any]:
        self.asked += 1
        return self.told


def world_of(ranks: int, told: list[Any]) -> World:
    return cast("World", Ranks(ranks, told))


def vector_of(rank: int) -> StepVector:
    vector = StepVector()
    vector.add("loss", [1.5 * rank, 2.0])
    own = vector.add("broken", [0.0, 0.0])
    vector.add("none", [])
    vector.add("used", [float(rank == 1)])
    vector.add_invariants((), 1, world_of(RANKS, []))
    vector.add_device_entry("measured")
    vector.values[own] = [100.0 + rank, 200.0 + rank]  # as a device would fill it
    return vector


def test_what_ranks_add_is_read_by_name() -> None:
    vectors = [vector_of(rank) for rank in range(RANKS)]
    summed = [sum(column) for column in zip(*(one.values for one in vectors), strict=True)]
    for vector in vectors:
        numbers = vector.name_sums([*summed, 7.0, 8.0], (), world_of(RANKS, []))
        assert numbers.sums("loss") == [4.5, 6.0]
        assert numbers.sums("broken") == [303.0, 603.0]
        assert numbers.sums("none") == []
        assert numbers.sums("used") == [1.0]
        assert numbers.sums("measured") == [7.0, 8.0]


def test_a_name_has_one_entry() -> None:
    with pytest.raises(BugError, match="two entries of the name used"):
        vector_of(0).add("used", [1.0])


def test_the_vector_does_not_grow_with_ranks() -> None:
    run = run_of(linear())
    run.forward_backward(pair(4))
    assert run.step_state.tally is not None
    lengths = {
        ranks: len(zero_sum_terms([Invariant("a", 1, InvariantGroup(range(ranks), 0))], 1, ranks))
        for ranks in (2, 4096)
    }
    assert len(set(lengths.values())) == 1
    assert sum(map(len, run.step_state.tally.numbers.entries.values())) <= 32


def test_what_is_the_same_on_all_ranks_needs_no_message() -> None:
    world = world_of(2, [])
    own = [Invariant("lr", 0.5, InvariantGroup(range(2), 0))]
    numbers = _make_equal_numbers(own, {"unreadable": [3.0]}, world)
    assert not numbers.invariants.differs("lr")
    assert numbers.sums("unreadable") == [3.0]
    assert cast("Any", world).asked == 0


def test_all_ways_into_a_step_give_the_same_entries() -> None:
    """Batches, written-out passes, free passes: none moves what another one reads."""

    batch = pair(4)
    tallies: dict[str, Any] = {}
    run = run_of(linear())
    run.forward_backward(batch)
    tallies["batches"] = run.step_state.tally
    run = run_of(linear())
    for micro in run.micro_batches(batch):
        run.backward(((run.model(micro.inputs) - micro.targets) ** 2).sum(), 4)
    tallies["written-out passes"] = run.step_state.tally
    run = run_of(linear())
    run.begin_step(None)
    passes = FreePasses(run.program, run.step_count, run.scale, run.collect_flags)
    loss = ((passes.forward(batch[0]) - batch[1]) ** 2).sum(1).mean()
    passes.backward(loss, share=1.0, last=True)
    tallies["free passes"] = passes.finish()

    own = {
        "written-out passes": {"backward_calls", "counts"},
        "free passes": {"unfinished passes"},
    }
    expected = set(tallies["batches"].numbers.entries)
    assert {"loss_and_count", "drift", "unreadable", "used", UNLIKE, "measured"} <= expected
    for way, tally in tallies.items():
        numbers = tally.numbers
        assert set(numbers.entries) == expected | own.get(way, set()), way
        for name in expected - {"measured"}:
            assert len(numbers.sums(name)) == len(tallies["batches"].numbers.sums(name)), (
                way,
                name,
            )
        assert numbers.invariants.by_rank("training_mode") == [True], way
        assert numbers.sums("used") == [1.0] * 4, way
    assert tallies["written-out passes"].numbers.sums("backward_calls") == [1.0, 1.0, 1.0]
    assert tallies["free passes"].numbers.invariants.by_rank("backward passes") == [1]


def test_sums_are_zero_where_members_of_all_groups_agree_and_else_they_are_not() -> None:
    """Groups may differ from one another; float64 adds the largest terms exactly."""
    ranks = 64
    groups = [tuple(range(first, ranks, 8)) for first in range(8)]
    seen = {rank: InvariantGroup(group, rank) for group in groups for rank in group}
    everyone = {rank: InvariantGroup(range(ranks), rank) for rank in range(ranks)}

    def summed(values: list[int], step: int) -> list[float]:
        terms = [
            zero_sum_terms(
                [
                    Invariant("own", values[rank], seen[rank]),
                    Invariant("all", step, everyone[rank]),
                ],
                step,
                ranks,
            )
            for rank in range(ranks)
        ]
        return [sum(column) for column in zip(*terms, strict=True)]

    alike = [2**48 - 1 - rank % 8 for rank in range(ranks)]
    for step in range(1, 100):
        assert summed(alike, step) == [0.0, 0.0]
        rank = step % ranks
        other = [*alike[:rank], alike[rank] ^ 1 << step % 48, *alike[rank + 1 :]]
        assert any(summed(other, step)), step


def test_no_order_of_adding_rounds() -> None:
    ranks = 4096
    groups = 32
    own = [[InvariantGroup(range(ranks), rank) for _ in range(groups)] for rank in range(ranks)]
    totals = [0.0, 0.0]
    for rank in range(ranks):
        invariants = [Invariant(str(place), 1, group) for place, group in enumerate(own[rank])]
        terms = zero_sum_terms(invariants, 7, ranks)
        totals = [total + abs(term) for total, term in zip(totals, terms, strict=True)]
    assert max(totals) < 2**53


def test_who_differs_is_asked_only_where_somebody_does() -> None:
    told = [
        [["mode", 0, True], ["weights", 0, 5]],
        [["mode", 0, True], ["weights", 0, 5]],
        [["mode", 0, True], ["weights", 2, 6]],
        [["mode", 0, True], ["weights", 2, 7], ["only here", -1, 1]],
    ]
    asked = []

    def gather(own: Any) -> list[Any]:
        asked.append(own)
        return told

    own = [
        Invariant("mode", True, InvariantGroup(range(4), 0)),
        Invariant("weights", 5, InvariantGroup((0, 1), 0)),
    ]
    equal = InvariantCheck(own, [0.0, 0.0], gather)
    assert not equal.differs("mode", "weights")
    assert equal.first_differing_pair("weights") is None
    assert asked == []
    found = InvariantCheck(own, [0.0, 3.0], gather)
    assert found.differs("mode", "weights")
    assert not found.differs("mode")
    assert found.first_differing_pair("weights") == (2, 3)
    assert found.by_rank("only here") == [None, None, None, 1]
    assert len(asked) == 1, "once for all questions"
