"""The iterable loader: layout-independent, never across the end, resumable with a state."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shoal.base.errors import ConfigError, UserError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.data.loading.iterable import IterableLoader
from shoal.data.loading.loader import Loader
from shoal.trainer.loaders.run_loaders import RunLoaders, open_loader


class Stream:
    """Numbers with noise; remembers where it stands, starts anew after its end."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.next = self.next, 0
        for i in range(first, self.samples):
            self.next = i + 1
            yield torch.tensor([i, random.random()], dtype=torch.float64)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Plain(Stream):
    """Starts anew unless a state was just loaded; after its end the state still says "the end"."""

    loaded = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.loaded = self.loaded, 0
        for i in range(first, self.samples):
            self.next = i + 1
            yield torch.tensor([i, random.random()], dtype=torch.float64)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["next"]


class Counting(Plain):
    """Counts its epochs, as one that shuffles anew in each does; the end moves the count."""

    epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for sample in super().__iter__():
            yield sample + 1000 * self.epoch
        self.epoch += 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded, self.epoch = state["next"], state["epoch"]


def run(loader: Any, epochs: int = 1) -> list[Any]:
    """Every micro-batch of so many epochs: (epoch, index, start, stop, ids, value)."""
    out = []
    for _ in range(epochs):
        for step in loader:
            for m, ids in zip(step.micro_batches, step.sample_ids, strict=True):
                out.append((step.epoch, m.index, m.start, m.stop, ids, m.value.tolist()))
    return out


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("degree", [1, 3])
def test_ranks_and_workers_do_not_change_the_samples(degree: int, workers: int) -> None:
    alone = run(IterableLoader(Stream(11), batch=4, micro_batch=1, seed=1), epochs=2)
    assert [m[5][0][0] for m in alone] == [*range(11)] * 2
    ranks: list[Any] = []
    for rank in range(degree):
        settings: dict[str, Any] = dict(rank=rank, degree=degree, workers=workers)
        ranks += run(IterableLoader(Stream(11), batch=4, micro_batch=1, seed=1, **settings), 2)
    assert sorted(ranks, key=lambda m: m[2]) == alone


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch", [2, 3])
def test_what_changes_at_the_end_of_an_epoch_is_kept(workers: int, batch: int) -> None:
    loader = IterableLoader(Counting(4), batch=batch, micro_batch=1, seed=0, workers=workers)
    seen = [int(m[5][0][0]) // 1000 for m in run(loader, epochs=3)]
    assert seen == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(("samples", "sizes"), [(11, [4, 4, 3]), (8, [4, 4]), (3, [3])])
def test_no_step_straddles_the_end(samples: int, sizes: list[int]) -> None:
    loader = IterableLoader(Stream(samples), batch=4, micro_batch=2, seed=0, rank=1, degree=2)
    for epoch in range(2):
        steps = list(loader)
        assert [s.next_position - s.position for s in steps] == sizes
        assert {s.epoch for s in steps} == {epoch}
        assert [s.total for s in steps] == [-(-size // 2) for size in sizes]
    assert loader.position == 2 * samples


def test_a_rank_without_work_still_gets_the_step() -> None:
    loader = IterableLoader(range(5), batch=4, micro_batch=1, seed=0, rank=2, degree=4)
    assert [(len(s), s.total) for s in loader] == [(1, 4), (0, 1)]


@pytest.mark.parametrize("kind", [Stream, Plain, Counting])
@pytest.mark.parametrize(("workers", "steps"), [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3)])
def test_resume_gives_the_rest(kind: type[Stream], workers: int, steps: int) -> None:
    whole = run(IterableLoader(kind(8), batch=3, micro_batch=1, seed=4), epochs=2)
    first = IterableLoader(kind(8), batch=3, micro_batch=1, seed=4, workers=workers)
    left = steps
    while left:
        for step in first:
            left, position = left - 1, step.next_position
            if not left:
                break
    state = first.state()
    assert state["position"] == position
    again = IterableLoader(kind(8), batch=3, micro_batch=1, seed=4)
    again.restore(state)
    rest = run(again, epochs=2 - first.epoch)
    assert rest == [m for m in whole if m[2] >= position]


def test_leaving_a_loop_and_coming_back_goes_on() -> None:
    loader = IterableLoader(range(6), batch=2, micro_batch=2, seed=0)
    step = next(iter(loader))
    assert [m.value.tolist() for s in loader for m in s.micro_batches] == [[2, 3], [4, 5]]
    assert step.position == 0


def test_a_dropped_loader_stops_its_worker_at_once() -> None:
    loader = IterableLoader(range(100), batch=2, micro_batch=2, seed=0, workers=1)
    next(iter(loader))
    assert len(multiprocessing.active_children()) == 1
    del loader
    assert multiprocessing.active_children() == []


def test_without_a_state_it_trains_but_resume_is_refused() -> None:
    loader = IterableLoader(range(6), batch=2, micro_batch=2, seed=0)
    next(iter(loader))
    state = loader.state()
    assert state == {"position": 2, "epoch": 0, "epoch_start": 0, "iterable": None}
    with pytest.raises(ConfigError) as caught:
        IterableLoader(range(6), batch=2, micro_batch=2, seed=0).restore(state)
    assert str(caught.value) == (
        "data.source: cannot resume at sample 2: range has no state_dict() and load_state_dict(); "
        "add both, or start a new run"
    )
    with pytest.raises(ConfigError, match="loader position = 4: an iterable cannot be moved"):
        IterableLoader(range(6), batch=2, micro_batch=2, seed=0, position=4)


class Unspeakable(Stream):
    """A state that JSON cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": torch.tensor(1)}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_must_be_json(workers: int) -> None:
    loader = IterableLoader(Unspeakable(4), batch=2, micro_batch=2, seed=0, workers=workers)
    with pytest.raises(UserError, match=r"Unspeakable.state_dict\(\) is not JSON"):
        list(loader)


def test_a_generator_can_be_read_once() -> None:
    loader = IterableLoader((i for i in range(4)), batch=2, micro_batch=2, seed=0)
    assert len(list(loader)) == 2
    with pytest.raises(ConfigError, match="generator gives no samples in epoch 1: it can be read"):
        list(loader)
    with pytest.raises(ConfigError, match="list gives no samples in epoch 0$"):
        list(IterableLoader([], batch=2, micro_batch=2, seed=0))


def _broken() -> Iterator[int]:
    yield 0
    raise OSError("the line is down")


class Broken:
    """Breaks after one sample."""

    def __iter__(self) -> Iterator[int]:
        return _broken()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_epoch_and_sample(workers: int) -> None:
    loader = IterableLoader(Broken(), batch=2, micro_batch=2, seed=0, workers=workers)
    with pytest.raises(UserError) as caught:
        list(loader)
    assert str(caught.value) == "data.source: sample 1 (epoch 0): OSError: the line is down"


def test_the_models_own_draws_are_not_disturbed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = (torch.get_rng_state().tolist(), random.getstate())
    list(IterableLoader(Stream(6), batch=2, micro_batch=2, seed=0))
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


class TorchStream(IterableDataset[int]):
    """Inherits a __getitem__ that only raises, and has a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


class NoLength(Dataset[int]):
    """Map-style, forgotten length."""

    def __getitem__(self, index: int) -> int:
        return index


def test_open_loader_chooses() -> None:
    settings: dict[str, Any] = dict(batch=2, micro_batch=1, seed=0, shuffle=False)
    assert isinstance(open_loader([1, 2, 3], **settings), Loader)
    stream = open_loader(TorchStream(), **settings)
    assert isinstance(stream, IterableLoader)
    assert len(stream) == 2
    assert isinstance(open_loader((i for i in range(3)), **settings), IterableLoader)
    with pytest.raises(ConfigError, match="NoLength has __getitem__ but no __len__"):
        open_loader(NoLength(), **settings)
    with pytest.raises(ConfigError, match="int has neither; a dataset has __getitem__"):
        open_loader(3, **settings)
    with pytest.raises(ConfigError, match="give the dataset inside it"):
        open_loader(DataLoader(NoLength()), **settings)


@pytest.mark.parametrize("degree", [1, 2])
def test_ranks_that_each_read_all_of_a_stream_are_told(degree: int) -> None:
    said: list[str] = []
    plan = Plan(Layout(dp_replicate=degree), batch=4, micro_batch=2)
    world: Any = SimpleNamespace(size=degree, rank=0)
    feed = RunLoaders(plan, world, notice=said.append)
    stream = Stream(8)
    feed.open(list(range(8)), 0, None)
    assert not said
    for _ in range(2):
        feed.open(stream, 0, None)
    assert said == ([] if degree == 1 else [
        "data.source: Stream can only be iterated, so each of 2 ranks reads all of it and keeps "
        "its own micro-batches; try: a dataset with __getitem__ and __len__, or a streaming "
        "dataset of the library datasets, whose files are dealt"
    ])  # fmt: skip
