"""A parameter server's layout, what it refuses, and the rule by which gradients are admitted."""

from __future__ import annotations

import random

import pytest

from shoal.base.errors import PlanError
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.parameter_servers import StalenessGate, make_server_layout
from shoal.base.plans.plan import Plan
from shoal.planning.settle import layout_keys, settle_plan

LAPTOP = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)


@pytest.mark.parametrize(
    ("words", "processes", "line"),
    [
        ({"servers": 3}, 3, "try: launch.processes=4, or layout.servers=2"),
        ({"servers": 1}, 1, "leaves none of 1 processes to compute gradients; try: launch.pro"),
        ({"updates": "async"}, 3, "try: asynchronous"),
        ({"staleness": 3}, 3, "try: layout.updates=bounded-stale"),
        (
            {"updates": "bounded-stale", "staleness": 1},
            4,
            "try: layout.staleness=2, or layout.updates=synchronous",
        ),
        ({"compress": "int8"}, 3, "try: layout.compress=none, or layout.strategy=ddp"),
        ({"offload": "optimizer"}, 3, "try: memory.offload=none, or layout.strategy=zero1"),
        ({"updates": "asynchronous", "compute": "fp16"}, 3, "try: precision.compute=bf16"),
        (
            {"updates": "asynchronous", "serves": "embeddings"},
            3,
            "try: layout.updates=synchronous, or layout.serves=weights",
        ),
        (
            {"strategy": "ddp", "serves": "embeddings"},
            3,
            "try: layout.strategy=parameter-server",
        ),
        ({"updates": "asynchronous", "spikes": "rewind"}, 3, "try: train.spikes=skip"),
        ({"tp": 3}, 3, "try: leave layout.tp out, or layout.strategy out"),
        ({"strategy": "ddp", "servers": 1}, 3, "try: layout.strategy=parameter-server"),
        ({"strategy": "auto", "servers": 1}, 3, "try: layout.strategy=parameter-server"),
        ({"schedule": "1f1b"}, 3, "leave layout.schedule out"),
        ({"zero": 1}, 3, "leave layout.zero out"),
    ],
)
def test_what_does_not_go_with_servers_is_refused(words, processes: int, line: str) -> None:
    said = {"strategy": "parameter-server", **words}
    with pytest.raises(PlanError) as refused:
        settle_plan(Plan(Layout(), 24, 1), said, processes, None, LAPTOP)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_words_of_a_layout_give_it_again() -> None:
    for layout in (
        make_server_layout(4),
        make_server_layout(4, 2, "asynchronous"),
        make_server_layout(5, 1, "bounded-stale", 7),
        make_server_layout(5, 2, serves="embeddings"),
        make_server_layout(5, 2, serves="items,users.*"),
    ):
        plan = settle_plan(
            Plan(Layout(), 24, 1), layout_keys(layout), layout.processes, None, LAPTOP
        )
        assert plan.layout == layout
        again = Plan.from_json(plan.to_json({}))
        assert again.layout == layout


def test_a_step_is_all_workers_or_one() -> None:
    """Of a synchronous server a step's samples are divided; else each step is one worker's."""
    assert make_server_layout(4).data_degree == 3
    assert make_server_layout(4, updates="asynchronous").data_degree == 1


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_no_gradient_is_staler_than_the_bound_and_nobody_waits_for_ever(
    workers: int, more: int
) -> None:
    """In drawn orders of arrival: some workers seldom come, some die, and all have come at times."""
    draw = random.Random(workers * 10 + more)
    bound = workers - 1 + more
    for _ in range(30):
        turns, alive = StalenessGate(bound), set(range(workers))
        speeds = [draw.choice((1, 1, 4, 50)) for _ in range(workers)]
        for worker in alive:
            turns.read(worker)
        while turns.step < 200:
            computing = [one for one in alive if one not in turns.came]
            if computing and draw.random() < 0.7:
                weights = [1 / speeds[one] for one in computing]
                turns.record_gradient(draw.choices(computing, weights)[0])
            elif not computing:
                assert turns.next_worker() is not None, "all have come and none may be applied"
            if len(alive) > 1 and draw.random() < 0.003:
                gone = draw.choice(sorted(alive))
                alive.discard(gone)
                turns.lost(gone)
            while (worker := turns.next_worker()) is not None:
                assert turns.record_applied(worker) <= bound
                turns.read(worker)
        assert max(turns.counts) <= bound
        assert sum(turns.counts.values()) == turns.step


def test_without_a_bound_whoever_comes_is_applied() -> None:
    turns = StalenessGate(None)
    turns.read(0)
    turns.read(1)
    for _ in range(50):
        turns.record_gradient(0)
        assert turns.next_worker() == 0
        turns.record_applied(0)
        turns.read(0)
    turns.record_gradient(1)
    assert turns.next_worker() == 1
    assert turns.record_applied(1) == 50
