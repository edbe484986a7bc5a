"""NoLoCo's islands are never equal, but their vote sees numbers: what a pair steps with, what is its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shoal.base.layouts.island_options import IslandsPolicy
from shoal.islands.commit_vote import NOBODY_ADMITTED, NOT_FINITE, Ballot, commit_failure_remedy
from shoal.islands.methods import find_method
from shoal.islands.methods.noloco import UnsharedOuterState

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "none": torch.empty(0, 3)}
MEAN = {name: -0.5 * weight for name, weight in WEIGHTS.items()}


def opened() -> tuple[object, UnsharedOuterState]:
    method = find_method(IslandsPolicy("noloco", count=2).resolved())
    outer = method.open(WEIGHTS)
    assert isinstance(outer, UnsharedOuterState)
    assert method.step(outer, MEAN)
    outer.commit()
    return method, outer


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """The last bit of a number's fraction: the smallest change there is."""
    tensor.view(torch.int32).view(-1)[1] ^= 1 << bit


BITS: dict[str, Callable[[UnsharedOuterState], torch.Tensor]] = {
    "weight": lambda outer: outer.weights["a"],
    "momentum": lambda outer: outer._state("a")["momentum_buffer"],
}


@pytest.mark.parametrize("where", BITS)
def test_a_flipped_bit_of_its_own_is_no_step(where: str) -> None:
    method, outer = opened()
    flip(BITS[where](outer))
    before = {name: weight.clone() for name, weight in outer.weights.items()}
    assert not method.step(outer, MEAN)
    assert "outer weights or momentum of a are not what it committed: its memory changed" in (
        outer.trouble
    )
    outer.undo()
    assert all(torch.equal(outer.weights[name], kept) for name, kept in before.items())
    outer.load({name: weight.clone() for name, weight in WEIGHTS.items()})
    assert method.step(outer, MEAN), "what a checkpoint holds is sound again"
    assert outer.trouble == ""


def test_a_pair_agrees_on_the_bits_of_its_mean() -> None:
    voted = []
    for change in (0, 0, 1):
        method, outer = opened()
        mean = {name: part.clone() for name, part in MEAN.items()}
        if change:
            flip(mean["a"])
        assert method.step(outer, mean)
        voted.append((outer.vote_digest(), outer.digest()))
    assert voted[0] == voted[1]
    assert voted[0][0] != voted[2][0]
    assert voted[0][1] == voted[2][1], "of a round that is resumed from all hold the same"


def test_steps_and_steps_back_leave_it_sound() -> None:
    method, outer = opened()
    for committed in (True, False, True, False, True):
        assert method.step(outer, MEAN), outer.trouble
        outer.commit() if committed else outer.undo()


ONE = Ballot(round=0, fragment=0, ok=True, digest="a", tokens=1, steps_per_s=None, used=1)


@pytest.mark.parametrize(
    ("fields", "numbers", "said"),
    [
        ({"digest": "b"}, False, "resume from the last round that all agreed on"),
        ({"ok": False, "why": "its memory changed"}, False, "memory or processor of one of them"),
        ({"ok": False, "why": NOT_FINITE}, True, "a lower optimizer.lr"),
        ({"ok": False, "why": NOBODY_ADMITTED}, True, "a lower optimizer.lr"),
        ({"ok": False, "saved": False, "why": "no space"}, True, "mend that, and resume"),
    ],
)
def test_the_cure_is_that_of_the_cause(fields: dict, numbers: bool, said: str) -> None:
    at_fault, nearest = commit_failure_remedy([ONE, Ballot(**{**vars(ONE), **fields})])
    assert at_fault == numbers
    assert said in nearest
    assert numbers or "optimizer.lr" not in nearest
