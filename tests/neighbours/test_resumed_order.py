"""Order of a loader's batches after a resume: that of the run without an interruption."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from shoal.data.loading.epoch_order import decode_state, encode_state
from shoal.neighbours.accelerate_data import RankDataLoader, skip_first_batches

EPOCHS = 3
STEPS = {1: 6, 2: 3}
"""Batches of an epoch, by processes."""


class Augmented(Dataset[Any]):
    """Rows of which each reading draws."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


class Turning(Sampler[int]):
    """An order of its own for each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(torch.arange(23).roll(7 * self.epoch).tolist())

    def __len__(self) -> int:
        return 23


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


KINDS: dict[str, Any] = {
    "shuffled": lambda: {"shuffle": True},
    "in order": dict,
    "generator": lambda: {"shuffle": True, "generator": generator()},
    "seedable": lambda: {"shuffle": True},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * 11 + [3.0], 23)},
    "own sampler": lambda: {"sampler": Turning()},
}


class Script:
    """A script with a training loader of a kind, and a shuffled one that is left in mid-epoch."""

    def __init__(self, kind: str, size: int, rank: int, *, tests: bool = True) -> None:
        self.tests = tests
        torch.manual_seed(1)
        world = SimpleNamespace(size=size, rank=rank, broadcast=lambda tensor: None)
        told = SimpleNamespace(
            world=world, device=torch.device("cpu"), active=[], split_batches=False,
            even_batches=True, use_seedable_sampler=kind == "seedable", data_seed=None,
        )  # fmt: skip
        data = Augmented()
        self.train = RankDataLoader(DataLoader(data, batch_size=4, **KINDS[kind]()), told)
        self.other = RankDataLoader(DataLoader(data, batch_size=4, shuffle=True), told)
        self.loaders = [self.train, self.other]

    def save(self) -> str:
        parts = [[one.state_dict(), one.epoch.rank_state()] for one in self.loaders]
        return json.dumps([encode_state(torch.get_rng_state()), parts])

    def load(self, text: str) -> None:
        torch.rand(17)  # what a new process draws before
        drawn, parts = json.loads(text)
        for one, (state, own) in zip(self.loaders, parts, strict=True):
            one.load_state_dict(state)
            one.epoch.load_rank_state(own)
        torch.set_rng_state(decode_state(drawn))

    def run(self, epoch: int, skipped: int, saves: dict[int, str]) -> list[Any]:
        """Return what each step sees and draws; keep a state after each one of epoch 1."""
        seen = []
        while epoch < EPOCHS:
            loader = skip_first_batches(self.train, skipped) if skipped else self.train
            for step, batch in enumerate(loader, skipped):
                seen.append((epoch, step, batch.tolist(), torch.rand(()).item()))
                if epoch == 1:
                    saves[step + 1] = self.save()
            for number, batch in enumerate(self.other if self.tests else ()):
                seen.append((epoch, "other", batch.tolist(), torch.rand(()).item()))
                if number == 1:
                    break
            epoch, skipped = epoch + 1, 0
            if epoch == 1:
                saves[0] = self.save()
        return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1)])
def test_a_resume_goes_on_in_the_order(kind: str, size: int, rank: int) -> None:
    """After each step of an epoch, its first and last included, and once more from there."""
    states: dict[int, str] = {}
    whole = Script(kind, size, rank).run(0, 0, states)
    assert list(states) == [*range(STEPS[size] + 1)]
    for step, state in states.items():
        again: dict[int, str] = {}
        script = Script(kind, size, rank)
        script.load(state)
        assert script.save() == state, "nothing followed"
        found = script.run(1, step, again)
        assert found == whole[-len(found) :], (step, "resumed")
        if again:
            script = Script(kind, size, rank)
            script.load(again[step + 1])
            found = script.run(1, step + 1, {})
            assert found == whole[-len(found) :], (step, "resumed twice")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_the_last_batch_is_the_start_of_the_next_epoch(kind: str, size: int) -> None:
    """A script that divides its steps by the epoch's length begins the next one anew."""
    states: dict[int, str] = {}
    whole = Script(kind, size, 0, tests=False).run(0, 0, states)
    rows = [[one[2] for one in whole if one[0] == epoch] for epoch in range(EPOCHS)]
    orders = [[[int(row) for row in batch] for batch in epoch] for epoch in rows]
    assert (orders[1] == orders[2]) is (kind == "in order"), "set_epoch is called, too"
    script = Script(kind, size, 0, tests=False)
    script.load(states[STEPS[size]])
    assert [one[2] for one in script.run(2, 0, {})] == rows[2]
