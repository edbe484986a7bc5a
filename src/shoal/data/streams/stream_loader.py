"""Loader of shards of unknown lengths: HF streaming datasets.

    Deal.turns ──> reads of each rank ──ShardReader──> its samples ──one message──> Deal.settle

In every step the ranks exchange which shards ended: mostly none, which is one all-reduce of 72
bytes. So all ranks know the position of each stream, the samples of a step, and the end of the
epoch. A checkpoint stores these, and the positions in each shard's own state, gathered at the save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from shoal.base.errors import ConfigError
from shoal.data.loading.epoch_reader import ReadStep
from shoal.data.loading.iterable import IterableLoader
from shoal.data.loading.step_samples import LoadedMicroBatch, StepBatch
from shoal.data.streams.shard_order import ShardAssignment, Turn, stream_count
from shoal.data.streams.shard_reader import ReaderClient, ShardReader, StepAnswer

if TYPE_CHECKING:
    from shoal.data.loading.read_retries import UnreadableSample

Gather = Callable[[Any], list[Any]]
"""Function that all-gathers every data rank's JSON value, by rank."""


def gather_places(state: dict[str, Any], gather: Gather) -> dict[str, Any]:
    """Return a loader's state with the shard positions of all ranks; unchanged if it has none.

    Without the places a resume would read shards from their fronts, which only costs time.
    """
    stream = state.get("iterable")
    if not isinstance(stream, dict) or "places" not in stream:
        return state
    places = {key: one for told in gather(stream["places"]) for key, one in told.items()}
    return {**state, "iterable": {**stream, "places": places}}


class ShardedLoader(IterableLoader):
    """Loader of a sharded iterable for one data rank; one rank reads each stream.

    Used as an IterableLoader; every epoch has a new order, by (seed, epoch).

    Args:
        shards: `DatasetShards`, or an object with its `dataset`, `count`, `digest`, `open`,
        `has_places`. gather: all-gathers a JSON value over the data ranks.
        turn: samples that a stream yields at a time (0: a micro-batch); a restored state has its
            own. The others as for IterableLoader.

    Raises:
        ConfigError: as IterableLoader; also if a state is of other shards.
    """

    def __init__(self, shards: Any, *, gather: Gather, turn: int = 0, **settings: Any) -> None:
        super().__init__(shards.dataset, **settings)
        self.shards, self.turn = shards, turn or self.micro_batch
        self._gather = gather
        self._state = self._start = json.dumps({"shards": shards.digest})
        self._probing = self.degree > 1

    @property
    def is_whole(self) -> bool:
        """True if every rank reads all streams: the degree does not divide them."""
        return stream_count(self.shards.count) % self.degree > 0

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`, under any layout, with the shard positions of all ranks.

        Raises a ConfigError for other shards, or a checkpoint of an unsharded stream.
        """
        kept = state.get("iterable") or {}
        if kept.get("shards") != self.shards.digest:
            was = "of other files, or in another order" if "shards" in kept else "of one stream"
            raise ConfigError(
                f"data.source: the checkpoint was made {was}, so samples would come twice or not "
                f"at all; try: the same files, a shuffle(seed=…) with a seed, or a new run"
            )
        self._position = int(state["position"])
        self.epoch, self.epoch_start = int(state["epoch"]), int(state["epoch_start"])
        self._state = json.dumps(kept)
        self.turn = int(state.get("turn", self.turn))
        self._moves += 1
        self._running = None

    def state(self) -> dict[str, Any]:
        """Return the state as an IterableLoader does, with the samples of a turn."""
        return {**super().state(), "turn": self.turn}

    def _end_epoch(self) -> None:
        self.epoch += 1
        self.epoch_start = self._position
        self._running = None
        self._state = self._start

    def _read(self) -> Iterator[ReadStep]:
        deal = ShardAssignment(self.shards.count, self._seed, self.epoch)
        kept = json.loads(self._state)
        if "held" in kept:
            deal.restore(kept)
        reader = ShardReader(
            self.shards,
            seed=self._seed,
            epoch=self.epoch,
            rank=self.rank,
            degree=self.degree,
            whole=self.is_whole,
            collate=self._collate,
            places=kept.get("places", {}),
            leaves_out=self.leaves_out,
            micro_batch=0 if self.turn == self.micro_batch else self.micro_batch,
        )
        probe = (f"{self.shards.count} shards", f"files {self.shards.digest}")
        start = StepBatch((), 0, self._position, 0, self.epoch, (), probe=probe * self._probing)
        self._probing = False
        gather = None if self.is_whole else self._gather
        cut = self.batch, self.turn
        return _steps(
            ReaderClient(reader, self.workers), deal, gather, cut, start, self.epoch_start
        )


def _steps(
    asked: ReaderClient,
    deal: ShardAssignment,
    gather: Gather | None,
    cut: tuple[int, int],
    before: StepBatch,
    epoch_start: int,
) -> Iterator[ReadStep]:
    """Yield the steps to the end of the epoch, without a reference to the loader.

    Args:
        gather: None: every rank reads all streams.
        cut: batch, samples of a turn.
        before: the previous step, with the texts that ranks compare in the first step.
    """
    reader = asked.reader
    places = {key: one for key, one in reader.places.items() if reader.owns(int(key))}
    turns = [] if deal.is_over else deal.turns(*cut)
    try:
        asked.ask(deal, turns)
        while turns:
            read, answer = turns, asked.answer()
            sizes = _exchange_ends(deal, turns, answer, gather)
            places = {k: v for k, v in {**places, **answer.places}.items() if v is not None}
            while not (deal.is_over or any(deal.live)):  # what was just dealt may be empty
                asked.ask(deal, [])
                _exchange_ends(deal, [], asked.answer(), gather)
            state = {**deal.state(), "shards": reader.shards.digest, "places": places}
            turns = [] if deal.is_over else deal.turns(*cut)
            if turns:
                asked.ask(deal, turns)
            if any(sizes):
                owners = None if gather is None else [stream % reader.degree for stream, _ in read]
                step = _step(before, sizes, owners, answer.values, reader, epoch_start)
                misread = _misread(answer, sizes, before, epoch_start) if answer.late else ()
                yield ReadStep(step, json.dumps(state), not turns, misread)
                before = replace(step, probe=())
    finally:
        asked.close()


def _exchange_ends(
    deal: ShardAssignment, turns: list[Turn], answer: StepAnswer, gather: Gather | None
) -> list[int]:
    """Exchange which shards ended on each rank; return the samples of each turn."""
    short = [[turn, size] for turn, size in answer.sizes.items() if size != turns[turn][1]]
    mine = [short, [[stream, *ended] for stream, ended in answer.ended.items()]]
    told = [mine] if gather is None else gather(mine)
    sizes = [size for _, size in turns]
    for turn, size in (pair for one, _ in told for pair in one):
        sizes[turn] = size
    deal.record_step(
        turns, sizes, {stream: (n, taken) for _, one in told for stream, n, taken in one}
    )
    return sizes


def _misread(
    answer: StepAnswer, sizes: list[int], before: StepBatch, epoch_start: int
) -> tuple[UnreadableSample, ...]:
    """Return this rank's samples whose first read failed, with their stream positions."""
    from shoal.data.loading.read_retries import UnreadableSample

    starts = list(accumulate(sizes, initial=before.next_position))
    found = []
    for turn, place, failures, error, left_out in answer.late:
        position = starts[turn] + place
        number = position - epoch_start
        found.append(UnreadableSample(number, position, before.epoch, failures, error, left_out))
    return tuple(found)


def _step(
    before: StepBatch,
    sizes: list[int],
    owners: list[int] | None,
    values: list[Any],
    reader: ShardReader,
    epoch_start: int,
) -> StepBatch:
    """Return the step after another one, from turns with so many samples.

    Args:
        owners: rank of each turn; None: every rank reads all, and takes micro-batches in turn.
        values: this rank's micro-batches.
    """
    starts = list(accumulate(sizes, initial=before.next_position))
    cut, whose = _micro_batches(starts, owners, reader.micro_batch, reader.degree)
    mine = tuple(
        LoadedMicroBatch(index, places[0], places[-1] + 1, value, places)
        for (index, places), value in zip(
            ((index, cut[index]) for index, one in enumerate(whose) if one == reader.rank),
            values,
            strict=True,
        )
    )
    return StepBatch(
        micro_batches=mine,
        position=starts[0],
        next_position=starts[-1],
        total=len(cut),
        epoch=before.epoch,
        sample_ids=tuple(tuple(at - epoch_start for at in m.positions) for m in mine),
        probe=before.probe,
        by_rank=tuple(whose.count(rank) for rank in range(reader.degree)),
    )


def _micro_batches(
    starts: list[int], owners: list[int] | None, size: int, degree: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """List the stream positions of each micro-batch of a step, and its rank.

    Args:
        starts: stream position of each turn, and the end of the last one.
        owners: as in `_step`.
        size: samples of a micro-batch; 0: each turn is one.
    """
    turns = [tuple(range(*span)) for span in pairwise(starts)]
    given = [turn for turn, places in enumerate(turns) if places]
    if not size:
        whose = [owners[turn] if owners else at % degree for at, turn in enumerate(given)]
        return [turns[turn] for turn in given], whose
    if owners is None:
        every = list(chain.from_iterable(turns))
        cut = [tuple(every[at : at + size]) for at in range(0, len(every), size)]
        return cut, [at % degree for at in range(len(cut))]
    found, whose = list[tuple[int, ...]](), list[int]()
    for rank in range(degree):
        own = [at for turn in given if owners[turn] == rank for at in turns[turn]]
        cuts = [tuple(own[at : at + size]) for at in range(0, len(own), size)]
        found, whose = found + cuts, whose + [rank] * len(cuts)
    return found, whose
