"""Sharded runs under what scripts really do: frozen parameters, a look between steps, no loss."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("layout", ["zero2", "fsdp"])
def test_an_optimizer_that_holds_frozen_parameters(worlds, tmp_path, layout: str) -> None:
    for answer in worlds(2).call(
        "sharded_guards:frozen_in_the_optimizer", layout=layout, folder=str(tmp_path)
    ):
        assert answer[1] == "step-3"


@pytest.mark.parametrize("layout", ["zero1", "fsdp"])
def test_a_look_before_and_between_steps_changes_nothing(worlds, layout: str) -> None:
    for evaluated, weights, looked, looked_weights in worlds(2).call(
        "sharded_guards:forward_between_steps", layout=layout
    ):
        assert (evaluated, weights) == (looked, looked_weights)


@pytest.mark.parametrize("layout", ["ddp", "zero2", "fsdp"])
def test_a_rank_whose_loss_is_a_constant(worlds, layout: str) -> None:
    answers = worlds(2).call("sharded_guards:a_loss_without_a_graph", layout=layout)
    assert answers[0] == answers[1]
    assert answers[0][1] < answers[0][0]


def test_gathers_of_user_code_are_calls_of_all_ranks(worlds) -> None:
    """The watchdog names a rank that reads a number of a weight alone; a copy needs no other rank."""
    for full, number, norm, *copies in worlds(2).call("sharded_guards:counted_gathers"):
        assert min(full, number, norm) > 0
        assert copies == [0, 0]
