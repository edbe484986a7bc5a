"""Streams of which a disk or a connection refuses a sample: tried again, else stepped over."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deal_ranks import Ranks, alone, merged, numbers

from shoal.base.errors import ClusterError, UserError
from shoal.data.loading import read_retries
from shoal.data.loading.iterable import IterableLoader
from shoal.data.streams.stream_loader import ShardedLoader

LENGTHS = [7, 0, 23, 5, 1, 40, 0, 3, 11, 8, 2]
TORN = {0, 12, 13, 14, 15, 40, 99}
"""Sample 0, neighbours in one shard, and the epoch's last."""


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_retries, "PAUSES_S", (0.0, 0.0, 0.0))


class Stream:
    """Numbers first … first + length − 1 with noise; it stands behind a sample that it refuses.

    torn     those that fail · times  how often each does, before it goes well
    behind   its state says so
    """

    def __init__(
        self, first: int, length: int, torn: set[int], times: int, *, behind: bool = True
    ) -> None:
        self.first, self.length, self.next = first, length, 0
        self.torn, self.times, self.behind = torn, times, behind
        self.failed = Counter[int]()

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.next == self.length:
            self.next = 0
            return
        for place in range(self.next, self.length):
            self.next = place + self.behind
            self.refuse(self.first + place)
            self.next = place + 1
            yield torch.tensor([self.first + place, random.random()], dtype=torch.float64)

    def refuse(self, number: int) -> None:
        if number in self.torn and self.failed[number] < self.times:
            self.failed[number] += 1
            raise OSError(errno.EIO, "Input/output error")

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Shards:
    """Shards of given lengths, whose failures are counted over all openings."""

    digest = "abc"
    draws_nothing = False

    def __init__(self, torn: set[int], times: int, *, has_places: bool = True) -> None:
        self.torn, self.times, self.has_places = torn, times, has_places
        self.count, self.dataset = len(LENGTHS), object()
        self.failed = Counter[int]()

    def open(self, number: int, seed: int, epoch: int, streams: int) -> Stream:
        first = sum(LENGTHS[:number])
        shard = Stream(first, LENGTHS[number], self.torn, self.times)
        shard.failed = self.failed
        return shard


def ranks(degree: int, torn: set[int], times: int, **settings: Any) -> Ranks:
    made = Ranks(degree, [Shards(torn, times) for _ in range(degree)], **settings)
    for loader in made.loaders:
        loader.leaves_out = True
    return made


def values(taken: list[list[Any]]) -> dict[int, float]:
    """Noise by number, of all that was handed out."""
    rows = [m.value.tolist() for own in taken for batch in own for m in batch.micro_batches]
    return {int(number): noise for row in rows for number, noise in row}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_a_read_that_goes_well_later_changes_nothing(degree: int, workers: int) -> None:
    calm, told = Ranks(degree, [Shards(set(), 0) for _ in range(degree)]), []
    torn = ranks(degree, TORN, 2, workers=workers)
    for loader in torn.loaders:
        loader.tell = told.append
    found = torn.epoch()
    assert numbers(found) == numbers(want := calm.epoch())
    assert values(found) == values(want), "draws are keyed by the sample, not by the try"
    assert not any(batch.left_out for own in found for batch in own)
    assert "was read after 2 tries; the first such sample" in told[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_no_try_reads_is_left_out_of_its_micro_batch(workers: int) -> None:
    calm = numbers(Ranks(1, [Shards(set(), 0)]).epoch())
    kept = [number for number in calm if number not in TORN]
    for degree in (1, 2, 4):
        found = ranks(degree, TORN, 99, workers=workers).epoch()
        assert numbers(found) == kept, "the same on every layout, and no other sample is gone"
        lost = sorted((one for own in found for b in own for one in b.left_out), key=place)
        assert [calm[one.position] for one in lost] == [n for n in calm if n in TORN]
        assert all(one.left_out and one.failures == 5 for one in lost)
        assert "OSError: [Errno 5] Input/output error" in lost[0].text
        for own in found:
            for batch in own:
                assert all(len(m.value) for m in batch.micro_batches), "none of no sample"
                shown = [len(ids) for ids in batch.sample_ids]
                assert shown == [len(m.value) for m in batch.micro_batches]


def place(one: Any) -> int:
    return int(one.position)


def test_a_resume_goes_on_past_what_was_left_out() -> None:
    calm = numbers(Ranks(1, [Shards(set(), 0)]).epoch())
    kept = [number for number in calm if number not in TORN]
    for before, after, steps in ((1, 2, 1), (2, 4, 3), (4, 1, 6), (2, 1, 9)):
        first = ranks(before, TORN, 99).epoch(steps)
        again = ranks(after, TORN, 99)
        for loader in again.loaders:
            loader.restore(merged([own[-1].after for own in first]))
        assert numbers(first) + numbers(again.epoch()) == kept


def test_what_cannot_be_stepped_over_says_why() -> None:
    blind, whole = Shards({30}, 99, has_places=False), Shards({30}, 99)
    for shards, leaves_out, said in ((blind, True, "so it is not left out: "), (whole, False, "")):
        loader = ShardedLoader(shards, gather=alone, batch=8, micro_batch=2, seed=3)
        loader.leaves_out = leaves_out
        with pytest.raises(ClusterError) as caught:
            list(loader)
        assert str(caught.value).startswith("data.source: shard 3, sample 0 (epoch 0)")
        assert str(caught.value).endswith(f"{said}OSError: [Errno 5] Input/output error")


def rows(loader: IterableLoader) -> list[int]:
    return [int(row[0]) for batch in loader for m in batch.micro_batches for row in m.value]


def opened(stream: Any, **settings: Any) -> IterableLoader:
    loader = IterableLoader(stream, **{"batch": 8, "micro_batch": 2, "seed": 3, **settings})
    loader.leaves_out = True
    return loader


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_is_read_again_from_its_last_state(workers: int) -> None:
    for degree in (1, 2):
        shares = []
        for rank in range(degree):
            loader = opened(
                Stream(0, 21, {0, 9, 16, 20}, 3), workers=workers, rank=rank, degree=degree
            )
            shares += rows(loader) if degree == 1 else [n for n in rows(loader)]
        assert sorted(shares) == list(range(21))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_says_where_it_goes_on(workers: int) -> None:
    loader = opened(Stream(0, 21, {0, 2, 3, 16, 20}, 99), workers=workers)
    kept = [number for number in range(21) if number not in {0, 2, 3, 16, 20}]
    assert rows(loader) == kept
    assert rows(loader) == kept, "and in the next epoch, which begins with such a sample"
    first = opened(Stream(0, 21, {0, 2, 3, 16, 20}, 99), workers=workers)
    batch = next(iter(first))
    again = opened(Stream(0, 21, {0, 2, 3, 16, 20}, 99), workers=workers)
    again.restore(batch.after)
    assert rows(again) == [number for number in kept if number > 7]


def test_an_iterable_that_does_not_say_so_ends_the_run() -> None:
    with pytest.raises(ClusterError, match=r"sample 5 \(epoch 0\); the stream does not say where"):
        rows(opened(Stream(0, 21, {5}, 99, behind=False)))
    with pytest.raises(ClusterError, match=r"sample 5 \(epoch 0\): OSError"):
        rows(opened(Stream(0, 21, {5}, 99), rank=0, degree=2))

    def generator() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(ClusterError, match=r"it has no state_dict\(\) and load_state_dict\(\)"):
        rows(opened(generator()))

    def wrong() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        raise ValueError("no number")

    with pytest.raises(UserError, match=r"sample 1 \(epoch 0\): ValueError: no number"):
        rows(opened(wrong()))
