"""Where a run's batches come from: its loaders, where the stream stands, and what validation reads.

A checkpoint keeps the state of every loader, in the order in which they were opened, as it was when
its last batch was committed; so batches may be taken ahead. After `restore` the loaders go on from
there, whether they are opened before or after, in the same order. Asking again for a loader over
the same dataset gives the same one, so `for batch in run.loader(data)` is a new epoch each time;
so does one that is made anew for each epoch, where it holds the same samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from shoal.base.errors import BugError, ConfigError
from shoal.base.plans.batches import turn_of
from shoal.base.plans.plan import Plan
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric import World

if TYPE_CHECKING:  # steps over batches of one's own do without
    from shoal.config.differences import Difference
    from shoal.data.loading.iterable import IterableLoader
    from shoal.data.loading.loader import Loader

    AnyLoader = Loader | IterableLoader


@runtime_checkable
class LeavesOut(Protocol):
    """A loader of samples with an index: it need not hand all of them out."""

    position: int
    samples: int
    leaves_out: bool

    def leave_out(self, start: int, stop: int) -> None:
        """None of the samples at these positions of the stream."""

    def state(self) -> dict[str, Any]:
        """Where it stands, and what it leaves out."""


class Feed:
    """The loaders of one run; `state` is what a checkpoint keeps: one entry per loader, JSON.

    Args:
        notice: tells what all ranks find, by rank 0.
        tell: what one rank finds, by that one.
        given: of "batch" and "micro_batch" those that the user fixed: a stream of sharded data
            gives a micro-batch that was given at a time, else an eighth of the batch.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        notice: Callable[[str], None],
        tell: Callable[[str], None] | None = None,
        given: Collection[str] = ("micro_batch",),
    ) -> None:
        self.tell = tell or notice
        self.turn = plan.micro_batch if "micro_batch" in given else turn_of(plan.batch)
        self.plan = plan
        self.world = world
        self.notice = notice
        self.state: list[dict[str, Any]] = []
        self.loaders: list[AnyLoader] = []
        self.settings: list[tuple[Any, int, Any]] = []
        self.choose: Callable[[Any, Any, int], None] | None = None
        self.opened_at: list[int] = []
        self.told_of_another = False
        self._own_under_way = False
        self._seen: dict[int, list[str]] = {}

    @property
    def under_way(self) -> bool:
        """Somebody stands in the middle of a loop over a loader, or over `run.steps`."""
        return self._own_under_way or any(one.under_way for one in self.loaders)

    def passes(self) -> int:
        """How often the first loader came to its end, by the batches that were used."""
        kept = self.state[0] if self.state else {}
        if "samples" in kept:
            return int(kept["position"]) // int(kept["samples"])
        return int(kept.get("epoch", 0))

    def at_end(self) -> bool:
        """Whether the first loader's last used batch was the last of its epoch."""
        kept = self.state[0] if self.state else {}
        if "samples" in kept:
            return int(kept["position"]) % int(kept["samples"]) == 0
        return bool(kept) and kept["position"] == kept["epoch_start"]

    def open(self, dataset: Any, workers: int, collate: Any) -> AnyLoader:
        """A loader of this rank's micro-batches, where the stream over `dataset` stands.

        Errors: ConfigError for an object that cannot be read, or a restored state of other data.
        """
        for known, (of, by, joined) in zip(self.loaders, self.settings, strict=True):
            if of is dataset and by == workers and joined is collate:
                return known
        if self.choose is not None:  # the micro-batch, by what a sample of these data takes
            choose, self.choose = self.choose, None
            choose(dataset, collate, workers)
        settings = {
            "batch": self.plan.batch,
            "workers": workers,
            "collate": collate,
            "turn": self.turn,
            **self._share(),
        }
        loader = self._made(dataset, settings)
        if hasattr(loader, "tell"):
            loader.tell = self.tell
        if hasattr(loader, "leaves_out"):
            # Ranks that read the same samples would each leave out another.
            alone = self.plan.layout.processes == self.world.size
            loader.leaves_out = alone and self.plan.unreadable > 0
        if self.loaders:
            from shoal.trainer.loaders.dataset_identity import take_over

            if take_over(self, loader, dataset, workers, collate):
                return loader
        place = len(self.loaders)
        self.settings.append((dataset, workers, collate))
        if place < len(self.state) and self.state[place]:
            loader.restore(self.state[place])
            if self.world.is_first and (other := self.differs(place, self.state[place])):
                self.notice(f"different from the checkpoint: {other.line}")
        self.loaders.append(loader)
        self.opened_at.append(loader.position)
        return loader

    def _made(self, dataset: Any, settings: dict[str, Any]) -> AnyLoader:
        loader: AnyLoader | None = None
        if "datasets" in sys.modules and not self.plan.layout.servers:
            from shoal.data.streams.hf_streams import open_dealt

            loader = open_dealt(dataset, self.world.gather_json, self.notice, settings)
        if loader is None:  # it has a length, which may be unknown
            loader = open_loader(dataset, **settings)
            if not (is_indexed(dataset) or is_told(dataset)):
                from shoal.data.loading.iterable import whole_line

                if line := whole_line(dataset, self.plan.layout.data_degree):
                    self.notice(line)
        return loader

    def seen(self, place: int) -> list[str]:
        """Digests of some samples of a loader's dataset, taken once; [] without such a loader."""
        if place >= len(self.settings) or not self.world.is_first:
            return []
        if place not in self._seen:
            from shoal.trainer.run_folder.resume_checks import look_at  # only who saves, or resumes

            dataset, workers, _ = self.settings[place]
            self._seen[place] = look_at(dataset, workers)
        return self._seen[place]

    def differs(self, place: int, kept: dict[str, Any]) -> Difference | None:
        """How the dataset of a loader that is open differs from the one of a saved state."""
        if not kept.get("seen") or place >= len(self.settings):
            return None
        from shoal.trainer.run_folder.resume_checks import other_samples

        return other_samples(kept["seen"], self.seen(place))

    def training(self, data: Any, workers: int, collate: Any) -> Iterable[Any]:
        """One epoch of steps: over a dataset, split over ranks here, or this rank's own batches.

        Errors: ConfigError for a DataLoader that gives each of several ranks the whole dataset.
        """
        if isinstance(data, IterableDataset) or (is_indexed(data) and not isinstance(data, list)):
            return self.open(data, workers, collate)
        _refuse_collate("run.steps", data, collate)
        from shoal.trainer.guards.reports.own_loaders import whole_data

        entry = whole_data(getattr(data, "batch_sampler", None), getattr(data, "dataset", None))
        told = self.world.gather_json(entry) if self.world.size > 1 else []
        if told and entry is not None and all(one == entry for one in told):
            raise ConfigError(
                f"run.steps: the DataLoader has a {entry[0]}, so each of {self.world.size} ranks "
                f"would train on the whole dataset; try: run.steps(loader.dataset), or a "
                f"DistributedSampler in the loader"
            )
        return self._own(data)

    def _own(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; while they are looped over, an epoch is under way."""
        self._own_under_way = True
        try:
            yield from batches
        finally:
            self._own_under_way = False

    def consumed(self, batch: Any) -> None:
        """A step used `batch`: remember where its loader stands now."""
        if not isinstance(batch, StepBatch):
            return
        for place, loader in enumerate(self.loaders):
            if id(loader) == batch.stream:
                self.state += [{} for _ in range(place + 1 - len(self.state))]
                self.state[place] = batch.after

    def can_leave_out(self, batch: StepBatch) -> bool:
        """Whether the loader that made a batch can leave samples out: those with an index."""
        return any(isinstance(one, LeavesOut) and id(one) == batch.stream for one in self.loaders)

    def leave_out(self, batch: StepBatch) -> tuple[int, int]:
        """Leave out all from its loader's place to a batch's end; (place, samples of an epoch)."""
        for place, loader in enumerate(self.loaders):
            if isinstance(loader, LeavesOut) and id(loader) == batch.stream:
                first = loader.position
                loader.leave_out(first, batch.next_position)
                self.state[place] = loader.state()
                return first, loader.samples
        raise BugError("a batch of no loader")

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on where `state` was saved, also with loaders that are open already."""
        self.state = list(state)
        for loader, kept in zip(self.loaders, self.state, strict=False):
            if kept:
                loader.restore(kept)

    def validation(self, data: Any, workers: int, collate: Any) -> MicroBatches:
        """This rank's micro-batches of `data`, every sample once over all ranks.

        Args:
            data: a dataset (split over ranks here), or an iterable of this rank's own batches.
        """
        if isinstance(data, MicroBatches):
            return data
        if isinstance(data, list) or not is_indexed(data):
            _refuse_collate("run.evaluate", data, collate)
            return MicroBatches(data, _length(data))
        return self.held_out(data, workers, collate)

    def held_out(self, data: Any, workers: int, collate: Any, micro_batch: int = 0) -> MicroBatches:
        """As `validation`, for samples in any form: a dataset, a list, an iterable of samples.

        Args:
            micro_batch: samples per forward pass; 0: as in training, fewer where ranks had none.
        """
        from shoal.data.loading.loader import Loader

        if not micro_batch:
            micro_batch = self.plan.micro_batch
            if is_indexed(data):
                micro_batch = min(micro_batch, max(1, len(data) // self.plan.layout.data_degree))
        loader = open_loader(
            data,
            batch=micro_batch * self.plan.layout.data_degree,
            workers=workers,
            collate=collate,
            shuffle=False,
            **{**self._share(), "micro_batch": micro_batch},
        )
        return MicroBatches(loader, len(loader) if isinstance(loader, Loader) else 0)

    def _share(self) -> dict[str, Any]:
        return {
            "micro_batch": self.plan.micro_batch,
            "seed": self.plan.seed,
            "rank": self.world.rank if self.world.rank < self.plan.layout.data_degree else -1,
            "degree": self.plan.layout.data_degree,
        }


def _refuse_collate(call: str, batches: Any, collate: Any) -> None:
    """Errors: ConfigError for a collate function that nothing would call."""
    if collate is not None:
        raise ConfigError(
            f"{call}: a {type(batches).__name__} is taken as batches that are made already, for "
            f"which collate= is not called; try: a Dataset of its samples (with __len__ and "
            f"__getitem__), or run.loader(samples, collate=…)"
        )


def _length(batches: Iterable[Any]) -> int:
    """How many there are; 0 where that is not known, as in a DataLoader over a stream."""
    try:
        return len(batches) if isinstance(batches, Sized) else 0
    except TypeError:
        return 0


@dataclass(frozen=True)
class MicroBatches:
    """One rank's micro-batches; `most`: how many the busiest rank has, 0 if that is not known."""

    batches: Iterable[Any]
    most: int

    def __iter__(self) -> Iterator[Any]:
        """One after another, of whatever they come in."""
        for batch in self.batches:
            if isinstance(batch, StepBatch):
                yield from (m.value for m in batch.micro_batches)
            else:
                yield batch


def is_told(dataset: Any) -> bool:
    """Whether it is a stream of the library datasets, of which `open_dealt` says what it costs."""
    if "datasets" not in sys.modules:
        return False
    from shoal.data.loading.hf_layers import is_streaming

    return is_streaming(dataset)


def open_loader(dataset: Any, **settings: Any) -> AnyLoader:
    """Make the loader for `dataset`: Loader if it is map-style, else IterableLoader.

    Takes   settings: the keyword arguments of Loader; shuffle and turn are for datasets with an
            index, and otherwise dropped

    Raises:
        ConfigError: if it has neither an index and a length nor `__iter__`, if it is a DataLoader,
            which makes batches itself, and what the loader refuses.
    """
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"data.source: a {name} joins and orders samples itself; give the dataset inside it "
            f"(loader.dataset), and train.batch, data.workers and data.collate to Shoal"
        )
    if is_indexed(dataset):
        from shoal.data.loading.loader import Loader

        return Loader(dataset, **settings)
    if hasattr(dataset, "__iter__"):
        from shoal.data.loading.iterable import IterableLoader

        for key in ("shuffle", "turn"):
            settings.pop(key, None)
        return IterableLoader(dataset, **settings)
    has = "__getitem__ but no __len__" if hasattr(dataset, "__getitem__") else "neither"
    raise ConfigError(
        f"data.source: {name} has {has}; a dataset has __getitem__ and __len__, or __iter__"
    )
