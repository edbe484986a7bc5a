"""Two tiers: who merges with whom, and an outer state of two parts that moves as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.base.errors import CheckpointError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.islands.methods import find_method
from shoal.islands.outer_optimizer import OuterState
from shoal.islands.two_tiers import TwoTierOuterState, list_partners

SHAPES = {"a.w": (3, 2), "b": (1,), "none": (0,)}
NEAR, FAR = 0, 2
"""Rounds of the two kinds, with far_period = 3."""


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def opened(**keys) -> OuterState:
    policy = IslandsPolicy("diloco", count=4, regions=2, far_period=3, **keys)
    return find_method(policy).open({name: numbers(0, *shape) for name, shape in SHAPES.items()})


def move(
    outer: OuterState, round_number: int, seed: int, names: tuple[str, ...] = tuple(SHAPES)
) -> None:
    acting = outer.at(round_number)
    assert acting.propose({name: numbers(seed, *SHAPES[name]) for name in names})
    acting.commit()


def bits(outer: OuterState) -> dict[str, bytes]:
    return {key: part.numpy().tobytes() for key, part in outer.tensors().items()}


def test_every_island_has_the_same_partners_as_its_partners() -> None:
    for count, regions, far_period in ((8, 4, 3), (6, 2, 2), (4, 4, 5), (3, 1, 4)):
        for round_number in range(12):
            for index in range(count):
                found = list_partners(round_number, index, count, regions, far_period)
                assert index in found
                far = (round_number + 1) % far_period == 0 or regions == 1
                assert len(found) == (count if far else count // regions)
                for other in found:
                    assert list_partners(round_number, other, count, regions, far_period) == found


def test_a_far_merge_in_every_round_is_one_tier_in_effect() -> None:
    one = find_method(IslandsPolicy("diloco", count=4)).open({"w": numbers(0, 4)})
    policy = IslandsPolicy("diloco", count=4, regions=2, far_period=1)
    two = find_method(policy).open({"w": numbers(0, 4)})
    for step in range(3):
        for outer in (one, two):
            assert outer.at(step).propose({"w": numbers(step + 1, 4)})
            outer.at(step).commit()
    assert torch.equal(one.weights["w"], two.weights["w"])


def test_the_tiers_have_their_own_momentum() -> None:
    outer = opened()
    assert isinstance(outer, TwoTierOuterState)
    assert outer.at(NEAR) is outer
    move(outer, NEAR, 1)
    assert set(outer.tensors()) == {
        *SHAPES,
        *(f"{name}.momentum_buffer" for name in SHAPES),
        *(f"{name}.far" for name in SHAPES),
    }
    assert not torch.equal(outer.weights["b"], outer.at(FAR).weights["b"])
    move(outer, FAR, 2)
    found = outer.tensors()
    assert set(found) == {
        *SHAPES,
        *(f"{name}.far" for name in SHAPES),
        *(f"{name}.far_momentum_buffer" for name in SHAPES),
    }, "the near tier begins anew"
    assert torch.equal(found["b"], found["b.far"])


def test_after_a_far_merge_all_regions_are_alike() -> None:
    one, two = opened(), opened()
    move(one, NEAR, 1)
    move(two, NEAR, 2)
    assert one.digest() != two.digest()
    for outer in (one, two):
        outer.at(FAR).propose({name: numbers(3, *SHAPES[name]) for name in SHAPES})
    assert one.at(FAR).digest() == two.at(FAR).digest(), "proposed: what is voted on"
    for outer in (one, two):
        outer.at(FAR).commit()
    assert one.digest() == two.digest() == one.at(FAR).digest()
    assert bits(one) == bits(two)


def test_the_digest_knows_both_tiers() -> None:
    one, two = opened(), opened()
    move(one, FAR, 1)
    for key in one.tensors():
        if not key.startswith("none"):
            two.load({**one.tensors(), key: one.tensors()[key] + 1})
            assert two.digest() != one.digest(), key
    two.load(one.tensors())
    assert two.digest() == one.digest()


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("round_number", [NEAR, FAR])
def test_undo_takes_both_tiers_back(name: str, round_number: int) -> None:
    outer = opened(outer=name)
    move(outer, NEAR, 1)
    move(outer, FAR, 2)
    move(outer, NEAR, 3)
    before, digest = bits(outer), outer.digest()
    acting = outer.at(round_number)
    assert acting.propose({name: numbers(4, *shape) for name, shape in SHAPES.items()})
    assert acting.digest() != digest
    acting.undo()
    assert bits(outer) == before
    assert outer.digest() == digest
    assert not acting.propose({"b": torch.full((1,), torch.nan, dtype=torch.float64)})
    acting.undo()
    assert bits(outer) == before


def test_a_fragment_merges_far_by_itself() -> None:
    outer = opened()
    move(outer, NEAR, 1)
    before = bits(outer)
    move(outer, FAR, 2, ("b",))
    after = bits(outer)
    kept = {key for key in after if key.startswith(("a.w", "none"))}
    assert all(after[key] == before[key] for key in kept)
    assert "a.w.momentum_buffer" in after
    assert "b.momentum_buffer" not in after


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_saved_and_loaded_it_goes_on_with_the_same_bits(name: str) -> None:
    outer, other = opened(outer=name), opened(outer=name)
    move(outer, FAR, 1)
    move(outer, NEAR, 2)
    other.load(outer.tensors())
    assert other.digest() == outer.digest()
    for round_number in (NEAR, FAR):
        for one in (outer, other):
            move(one, round_number, 5 + round_number)
        assert bits(other) == bits(outer)


def test_a_checkpoint_of_one_tier_is_refused_whole() -> None:
    outer = opened()
    move(outer, NEAR, 1)
    digest = outer.digest()
    with pytest.raises(CheckpointError, match=r"outer a.w: \[3, 2\] wanted, found nothing"):
        outer.load({name: numbers(9, *shape) for name, shape in SHAPES.items()})
    assert outer.digest() == digest
    damaged = {key: part for key, part in outer.tensors().items() if key != "b"}
    damaged["b.far"] = numbers(9, 1)
    with pytest.raises(CheckpointError, match=r"outer b: \[1\] wanted, found nothing"):
        outer.load(damaged)
    assert outer.digest() == digest, "one tier was loaded, the other not"
    single = find_method(IslandsPolicy("diloco", count=4)).open({"b": numbers(0, 1)})
    saved = {key: part for key, part in outer.tensors().items() if key.startswith("b")}
    with pytest.raises(
        CheckpointError, match="outer b: saved with far, momentum_buffer, .*regions"
    ):
        single.load(saved)
