"""Owners: who trains in a round, on which samples; what a split deals; how changes are merged."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.data.owner_split import OwnerSubset, deal_samples
from shoal.fabric.islands.compressed_all_reduce import MergeRule, merge_rows
from shoal.islands.owner_schedule import OwnerSchedule


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_each_sample_is_used_once_in_every_own_epoch(epochs: int) -> None:
    """Lengths 7, 16, 0 and 40; half of the owners are drawn, and owner 3 is refused at times."""
    schedule = OwnerSchedule((7, 16, 0, 40), 4, 3, epochs, last_epoch=4, share=0.5, seed=1)
    positions, used = [0] * 4, [Counter[int]() for _ in range(4)]
    for round_number in range(200):
        drawn = schedule.draw(round_number, positions)
        assert len(drawn) == max(1, round(0.5 * len(schedule.active(positions)))) or not drawn
        refused = {3} if round_number % 3 == 0 else set()
        for owner in set(drawn) - refused:
            steps = schedule.cut_steps(owner, positions[owner])
            assert all(start // schedule.held[owner] == (stop - 1) // schedule.held[owner]
                       for start, stop in steps)  # fmt: skip
            assert epochs or len(steps) <= 3
            used[owner].update(p for start, stop in steps for p in range(start, stop))
        positions = schedule.advance(positions, drawn, set(drawn) - refused)
    assert not schedule.draw(200, positions)
    for owner, samples in enumerate(schedule.held):
        assert used[owner] == Counter(range(4 * samples)), "each position once, and none beyond"


def test_the_draw_depends_on_seed_and_round_alone_and_is_fair() -> None:
    draws = [OwnerSchedule((9,) * 10, 3, 1, share=0.3, seed=s).draw(r, [0] * 10)
             for s in range(2) for r in range(300)]  # fmt: skip
    assert all(len(draw) == 3 for draw in draws)
    assert len(set(draws)) > 60
    times = Counter(owner for draw in draws for owner in draw)
    assert all(120 <= times[owner] <= 240 for owner in range(10))


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_the_steps_of_a_group_are_counted_before_they_are_taken(epochs: int) -> None:
    """As rounds take them; a round without an own owner counts as a step, which its save has."""
    schedule = OwnerSchedule((7, 16, 0, 40, 9), 4, 3, epochs, last_epoch=4, share=0.5, seed=1)
    for group in ((0, 2, 4), (1, 3)):
        positions, step, steps = [0] * 5, 0, [0]
        for number in range(40):
            drawn = schedule.draw(number, positions)
            own = [len(schedule.cut_steps(one, positions[one])) for one in drawn if one in group]
            step += max(1, sum(own)) if drawn else 0
            steps.append(step)
            if number == 2:
                middle = list(positions)
            positions = schedule.advance(positions, drawn, drawn)
        assert schedule.count_group_steps(group, range(40), [0] * 5) == step
        assert schedule.count_group_steps(group, range(7), [0] * 5) == steps[7]
        resumed = schedule.count_group_steps(group, range(2, 40), middle, first_step=steps[2])
        assert resumed == step
    assert schedule.count_group_steps((0,), range(10**6), [0] * 5) == 0


class Labelled:
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1), torch.tensor(index % 10)


@pytest.mark.parametrize("split", ["even", "labels:1", "labels:3", "dirichlet:0.1"])
def test_a_split_deals_every_sample_to_one_owner(split: str) -> None:
    deal = deal_samples(Labelled(), 20, split, seed=5)
    parts = deal.parts
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(300))
    assert all(np.array_equal(a, b)
               for a, b in zip(parts, deal_samples(Labelled(), 20, split, seed=5).parts, strict=True))  # fmt: skip
    assert any(not np.array_equal(a, b)
               for a, b in zip(parts, deal_samples(Labelled(), 20, split, seed=6).parts, strict=True))  # fmt: skip
    labels = [{int(index) % 10 for index in part} for part in parts]
    if split == "even":
        assert {len(part) for part in parts} == {15}
    elif split.startswith("labels"):
        assert {len(one) for one in labels} == {int(split[-1])}
    else:
        assert np.mean([len(one) for one in labels]) < 6, "most owners lack most labels"
    held = deal.deal_held_out(Labelled())
    assert held.min() >= 0
    assert held.max() < 20
    assert np.array_equal(held, deal.deal_held_out(Labelled())), "the seed decides"
    for owner, (part, own) in enumerate(zip(parts, labels, strict=True)):
        there = np.flatnonzero(held == owner)
        assert split == "even" or {int(index) % 10 for index in there} <= own
        assert abs(len(there) - len(part)) <= 10, "each label's count is rounded on its own"
    subset = OwnerSubset(Labelled(), parts[1])
    assert [int(subset[k][1]) for k in range(len(subset))] == [int(i) % 10 for i in parts[1]]


def test_a_label_that_training_lacks_is_dealt_evenly() -> None:
    pairs = [(torch.zeros(1), label) for label in [0, 1] * 20]
    deal = deal_samples(pairs, 4, "labels:1", seed=0)
    held = deal.deal_held_out([(torch.zeros(1), 7)] * 8)
    assert sorted(held) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_split_that_leaves_labels_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 owners with 1 of 10 labels each leave some out; try: "
                       "data.split=labels:3"):  # fmt: skip
        deal_samples(Labelled(), 4, "labels:1", seed=0)
    with pytest.raises(ConfigError, match="sample 0 is no pair.*try: data.split=even"):
        deal_samples([torch.zeros(3)] * 5, 2, "dirichlet:1", seed=0)


def test_median_and_trimmed_mean_bear_one_wrong_owner() -> None:
    rows = torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wrong = rows.clone()
    wrong[2] *= -1e6
    for rule in (MergeRule("median"), MergeRule("trimmed", 0.2)):
        assert merge_rows(wrong, rule).abs().max() < 10
    assert torch.equal(merge_rows(rows, MergeRule("median")), rows.median(dim=0).values)
    ordered = rows.sort(dim=0).values
    torch.testing.assert_close(merge_rows(rows, MergeRule("trimmed", 0.2)), ordered[1:4].mean(0))
    assert torch.equal(merge_rows(rows[:2], MergeRule("trimmed", 0.49)), rows[:2].mean(0))
