"""Shards of unknown length: each sample once, the same under every layout, each read by one rank."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deal_ranks import Ranks, alone, in_order, merged, numbers

from shoal.base.errors import ConfigError, UserError
from shoal.data.streams.shard_order import ShardAssignment
from shoal.data.streams.stream_loader import ShardedLoader

LENGTHS = [7, 0, 23, 5, 1, 40, 0, 3, 11, 8, 2]
LAST_EMPTY = [0, 3, 0, 0, 9, 0, 0, 0]


class Shard:
    """Numbers of one shard with noise; tells where it stands, if that is asked for."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length, self.next = first, length, 0
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for place in range(self.next, self.length):
            self.next = place + 1
            self.read += 1
            yield torch.tensor([self.first + place, random.random()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Shards:
    """Shards of given lengths; remembers which were opened, and how much of them was read."""

    def __init__(self, lengths: list[int], has_places: bool = True, digest: str = "abc") -> None:
        self.lengths, self.has_places, self.digest = lengths, has_places, digest
        self.count, self.dataset = len(lengths), object()
        self.draws_nothing = len(lengths) > len(LENGTHS)
        self.opened: list[tuple[int, Shard]] = []

    def open(self, number: int, seed: int, epoch: int, streams: int) -> Shard:
        shard = Shard(sum(self.lengths[:number]), self.lengths[number])
        self.opened.append((number, shard))
        return shard


@pytest.mark.parametrize("lengths", [LENGTHS, LAST_EMPTY, [5], [0, 0, 4]])
def test_every_sample_once_and_the_order_knows_no_layout(lengths: list[int]) -> None:
    single = Ranks(1, [Shards(lengths)])
    epochs = [single.epoch(), single.epoch()]
    for one in epochs:
        assert sorted(numbers(one)) == list(range(sum(lengths)))
    assert single.loaders[0].epoch == 2
    assert lengths != LENGTHS or len({tuple(numbers(one)) for one in epochs}) == 2
    for degree in (2, 3, 8):
        ranks = Ranks(degree, [Shards(lengths) for _ in range(degree)])
        for expected in epochs:
            taken = ranks.epoch()
            assert in_order(taken) == in_order(expected)
            for step in zip(*taken, strict=True):
                counts = tuple(len(batch) for batch in step)
                assert all(batch.by_rank == counts for batch in step)
                assert all(batch.total == sum(counts) for batch in step)
        assert {loader.position for loader in ranks.loaders} == {2 * sum(lengths)}


def placed(taken: list[list[Any]]) -> dict[int, int]:
    """The sample at each position of the stream that some steps of all ranks hold."""
    return {
        position: int(value[0])
        for batches in taken
        for batch in batches
        for m in batch.micro_batches
        for position, value in zip(m.positions, m.value.tolist(), strict=True)
    }


SHARES = ((1, 24, 2), (2, 12, 1), (3, 8, 1), (4, 6, 2), (2, 6, 1), (1, 6, 100))
"""Ranks, samples of a pass and steps of one leg after another: a default on changing ranks."""


@pytest.mark.parametrize("lengths", [LENGTHS, LAST_EMPTY, [10] * 64])
def test_passes_of_several_turns_hold_the_same_samples(lengths: list[int]) -> None:
    """Another micro-batch, in mid-epoch too, loses none, doubles none and changes no order."""
    given = {"batch": 24, "turn": 3}
    whole = placed(Ranks(1, [Shards(lengths)], micro_batch=3, **given).epoch())
    assert sorted(whole.values()) == list(range(sum(lengths)))
    for degree, micro_batch, _ in SHARES:
        ranks = Ranks(
            degree, [Shards(lengths) for _ in range(degree)], micro_batch=micro_batch, **given
        )
        taken = ranks.epoch()
        assert placed(taken) == whole
        for step in zip(*taken, strict=True):
            counts = tuple(len(batch) for batch in step)
            assert all(batch.by_rank == counts for batch in step)
            assert all(batch.total == sum(counts) for batch in step)
            indices = sorted(m.index for batch in step for m in batch.micro_batches)
            assert indices == list(range(sum(counts)))
            assert all(len(m.value) <= micro_batch for batch in step for m in batch.micro_batches)
    seen: dict[int, int] = {}
    kept: dict[str, Any] | None = None
    for degree, micro_batch, steps in SHARES:
        shards = [Shards(lengths) for _ in range(degree)]
        again = Ranks(degree, shards, batch=24, micro_batch=micro_batch)
        if kept is None:
            again = Ranks(degree, shards, micro_batch=micro_batch, **given)
        for loader in again.loaders if kept else ():
            loader.restore(kept)
        if len(seen) == len(whole):
            break
        taken = again.epoch(steps)
        assert not seen.keys() & placed(taken).keys(), "doubled"
        seen |= placed(taken)
        kept = merged([batches[-1].after for batches in taken])
    assert seen == whole


def test_a_full_step_is_one_pass_on_each_rank() -> None:
    for degree in (1, 2, 4, 8):
        given = {"batch": 32, "turn": 4, "micro_batch": 32 // degree}
        taken = Ranks(degree, [Shards([10] * 64) for _ in range(degree)], **given).epoch()
        assert {len(batch) for batches in taken for batch in batches} == {1}


def test_a_shard_is_read_by_one_rank() -> None:
    for degree in (2, 4, 8):
        shards = [Shards(LENGTHS) for _ in range(degree)]
        Ranks(degree, shards).epoch()
        opened = Counter(number for one in shards for number, _ in one.opened)
        assert opened == Counter(range(len(LENGTHS)))
    whole = [Shards(LENGTHS) for _ in range(3)]  # 3 does not divide 8 streams
    ranks = Ranks(3, whole)
    assert all(loader.is_whole for loader in ranks.loaders)
    ranks.epoch()
    assert all(len(one.opened) == len(LENGTHS) for one in whole)


def test_all_ranks_have_as_much_while_samples_are_left() -> None:
    taken = Ranks(4, [Shards([10] * 64) for _ in range(4)], batch=32).epoch()
    assert [{len(batch) for batch in step} for step in zip(*taken, strict=True)] == [{4}] * 20


@pytest.mark.parametrize("has_places", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, LAST_EMPTY])
def test_a_resume_on_another_layout_gives_the_rest(lengths: list[int], has_places: bool) -> None:
    single = Ranks(1, [Shards(lengths)])
    whole = numbers(single.epoch()) + numbers(single.epoch())
    for before, after, steps in ((1, 2, 1), (2, 4, 3), (4, 1, 4), (2, 3, 2), (3, 2, 5)):
        ranks = Ranks(before, [Shards(lengths, has_places) for _ in range(before)])
        taken = ranks.epoch(steps)
        seen = numbers(taken)
        kept = merged([batches[-1].after for batches in taken])
        shards = [Shards(lengths, has_places) for _ in range(after)]
        again = Ranks(after, shards)
        for loader in again.loaders:
            loader.restore(kept)
        while len(seen) < len(whole):
            seen += numbers(again.epoch())
        assert seen == whole


def test_a_place_saves_reading_from_the_front() -> None:
    taken = Ranks(1, [Shards([64, 64])]).epoch(4)
    for has_places, read in ((True, 96), (False, 128)):
        shards = Shards([64, 64], has_places)
        ranks = Ranks(1, [shards])
        state = taken[0][-1].after
        if not has_places:
            state = {**state, "iterable": {**state["iterable"], "places": {}}}
        ranks.loaders[0].restore(state)
        assert len(numbers(ranks.epoch())) == 96
        assert sum(shard.read for _, shard in shards.opened) == read


def test_a_step_before_nothing_but_empty_shards_is_the_epochs_last() -> None:
    order = ShardAssignment(138, 3, 0).order
    lengths = [0] * 138
    for number in order[:128]:
        lengths[number] = 1
    for degree in (1, 2):
        ranks = Ranks(degree, [Shards(lengths) for _ in range(degree)], batch=128)
        taken = ranks.epoch()
        assert sorted(numbers(taken)) == list(range(128))
        assert [[batch.after["epoch"] for batch in one] for one in taken] == [[1]] * degree


@pytest.mark.parametrize("degree", [1, 2])
def test_a_worker_changes_nothing(degree: int) -> None:
    kept = [Ranks(degree, [Shards(LENGTHS)] * degree, workers=n).epoch() for n in (0, 2)]
    assert in_order(kept[0]) == in_order(kept[1])


def test_errors_are_one_line() -> None:
    class Broken(Shard):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from [torch.zeros(2)] * 2
            raise ValueError("no such row")

    class Ill(Shards):
        def open(self, number: int, seed: int, epoch: int, streams: int) -> Shard:
            return Broken(0, 9)

    for workers in (0, 1):
        loader = ShardedLoader(
            Ill([9]), gather=alone, batch=4, micro_batch=2, seed=0, workers=workers
        )
        with pytest.raises(UserError) as caught:
            list(loader)
        assert str(caught.value) == (
            "data.source: shard 0, sample 2 (epoch 0): ValueError: no such row"
        )
    with pytest.raises(ConfigError, match="object gives no samples in epoch 0"):
        list(ShardedLoader(Shards([0, 0]), gather=alone, batch=4, micro_batch=2, seed=0))


def test_other_shards_are_refused_after_a_resume() -> None:
    given: dict[str, Any] = {"gather": alone, "batch": 4, "micro_batch": 2, "seed": 0}
    first = ShardedLoader(Shards([9, 9], has_places=False), **given)
    state = next(iter(first)).after
    for other, was in ((state, "of other files, or in another order"),
                       ({**state, "iterable": {"epoch": 0}}, "of one stream")):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            ShardedLoader(Shards([9, 9], digest="xyz"), **given).restore(other)
        assert str(caught.value) == (
            f"data.source: the checkpoint was made {was}, so samples would come twice or not at "
            f"all; try: the same files, a shuffle(seed=…) with a seed, or a new run"
        )
    second = ShardedLoader(Shards([1, 1], has_places=False), **given)
    second.restore(state)
    with pytest.raises(ConfigError, match=r"shard \d ends after 1 samples, the checkpoint was"):
        list(second)


def test_a_deal_of_a_million_shards_is_quick_to_tell() -> None:
    assert len(ShardAssignment(10**6, 0, 0).state()["held"]) == 64
