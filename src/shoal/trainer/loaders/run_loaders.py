"""Batches of a run: its loaders, their positions in the stream, and the batches of a validation.

A checkpoint holds the state of every loader, in the order in which they were opened, as of the last
committed batch; so batches may be prefetched. After `restore` the loaders continue there, whether
they are opened before or after, in the same order. A second call for a loader over the same dataset
returns the same loader, so `for batch in run.loader(data)` is a new epoch each time. The same holds
for a dataset that is rebuilt for each epoch, if it has the same samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from shoal.base.errors import BugError, ConfigError
from shoal.base.plans.batches import default_turn
from shoal.base.plans.plan import Plan
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric import World

if TYPE_CHECKING:  # a run over the user's own batches does not import these
    from shoal.config.differences import Difference
    from shoal.data.loading.iterable import IterableLoader
    from shoal.data.loading.loader import Loader

    AnyLoader = Loader | IterableLoader


@runtime_checkable
class SkippingLoader(Protocol):
    """A loader over an indexed dataset that can skip some of its samples."""

    position: int
    samples: int
    leaves_out: bool

    def skip_samples(self, start: int, stop: int) -> None:
        """Exclude the samples at positions start … stop − 1 of the stream."""

    def state(self) -> dict[str, Any]:
        """Return the position and the excluded samples as JSON."""


class RunLoaders:
    """The loaders of one run; a checkpoint stores `state`: one JSON entry per loader.

    Args:
        notice: reports a line that holds for all ranks; rank 0 writes it.
        tell: reports a line of one rank; that rank writes it.
        given: those of "batch" and "micro_batch" that the user fixed. A stream of sharded data
            deals a micro-batch at a time if the user fixed it, else an eighth of the batch.
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
        self.turn = plan.micro_batch if "micro_batch" in given else default_turn(plan.batch)
        self.plan = plan
        self.world = world
        self.notice = notice
        self.state: list[dict[str, Any]] = []
        self.loaders: list[AnyLoader] = []
        self.settings: list[tuple[Any, int, Any]] = []
        self.choose: Callable[[Any, Any, int], None] | None = None
        self.check_dataset: Callable[[Any], None] | None = None
        self.on_first_open: Callable[[], None] | None = None
        self.opened_at: list[int] = []
        self.told_of_another = False
        self._own_under_way = False
        self._seen: dict[int, list[str]] = {}
        self._validated: Any = None

    @property
    def under_way(self) -> bool:
        """Return whether the user's code is inside a loop over a loader, or over `run.steps`."""
        return self._own_under_way or any(one.under_way for one in self.loaders)

    def count_epochs(self) -> int:
        """Return how often the first loader reached its end, counted by used batches."""
        kept = self.state[0] if self.state else {}
        if "samples" in kept:
            return int(kept["position"]) // int(kept["samples"])
        return int(kept.get("epoch", 0))

    def at_end(self) -> bool:
        """Return whether the last used batch of the first loader was the last one of its epoch."""
        kept = self.state[0] if self.state else {}
        if "samples" in kept:
            return int(kept["position"]) % int(kept["samples"]) == 0
        return bool(kept) and kept["position"] == kept["epoch_start"]

    def open(self, dataset: Any, workers: int, collate: Any) -> AnyLoader:
        """Return a loader of this rank's micro-batches, at the stream's position in `dataset`.

        Raises:
            ConfigError: the object cannot be read, or the restored state belongs to other data.
        """
        for known, (of, by, joined) in zip(self.loaders, self.settings, strict=True):
            if of is dataset and by == workers and joined is collate:
                return known
        if self.check_dataset is not None:
            self.check_dataset(dataset)
        if self.choose is not None:  # choose the micro-batch by the memory of one sample
            choose, self.choose = self.choose, None
            choose(dataset, collate, workers)
        if self.on_first_open is not None:  # the batch of the plan is known now
            told, self.on_first_open = self.on_first_open, None
            told()
        settings = {
            "batch": self.plan.batch,
            "workers": workers,
            "collate": collate,
            "turn": self.turn,
            **self._rank_settings(),
        }
        loader = self._made(dataset, settings)
        if hasattr(loader, "tell"):
            loader.tell = self.tell
        if hasattr(loader, "leaves_out"):
            # Ranks that read the same samples would each exclude different ones.
            alone = self.plan.layout.processes == self.world.size
            loader.leaves_out = alone and self.plan.unreadable > 0
        if self.loaders:
            from shoal.trainer.loaders.dataset_identity import replace_finished_loader

            if replace_finished_loader(self, loader, dataset, workers, collate):
                return loader
        place = len(self.loaders)
        self.settings.append((dataset, workers, collate))
        if place < len(self.state) and self.state[place]:
            loader.restore(self.state[place])
            if self.world.is_first and (other := self.compare_dataset(place, self.state[place])):
                self.notice(f"different from the checkpoint: {other.line}")
        self.loaders.append(loader)
        self.opened_at.append(loader.position)
        return loader

    def _made(self, dataset: Any, settings: dict[str, Any]) -> AnyLoader:
        loader: AnyLoader | None = None
        if "datasets" in sys.modules and not self.plan.layout.servers:
            from shoal.data.streams.hf_streams import open_sharded_loader

            loader = open_sharded_loader(dataset, self.world.gather_json, self.notice, settings)
        if loader is None:  # it has a length, which may be unknown
            loader = open_loader(dataset, **settings)
            if not (is_indexed(dataset) or is_hf_stream(dataset)):
                from shoal.data.loading.iterable import full_read_warning

                if line := full_read_warning(dataset, self.plan.layout.data_degree):
                    self.notice(line)
        return loader

    def sample_digests(self, place: int) -> list[str]:
        """Return digests of some samples of a loader's dataset, computed once, by rank 0."""
        if place >= len(self.settings) or not self.world.is_first:
            return []
        if place not in self._seen:
            from shoal.trainer.run_folder.resume_checks import (
                digest_samples,  # for a save or a resume
            )

            dataset, workers, _ = self.settings[place]
            self._seen[place] = digest_samples(dataset, workers)
        return self._seen[place]

    def compare_dataset(self, place: int, kept: dict[str, Any]) -> Difference | None:
        """Return how the dataset of an open loader differs from the dataset of a saved state."""
        if not kept.get("seen") or place >= len(self.settings):
            return None
        from shoal.trainer.run_folder.resume_checks import compare_digests

        return compare_digests(kept["seen"], self.sample_digests(place))

    def training_batches(self, data: Any, workers: int, collate: Any) -> Iterable[Any]:
        """Return one epoch of batches, from a dataset split over ranks or from this rank's own.

        Raises:
            ConfigError: a DataLoader yields the whole dataset on each of several ranks.
        """
        if isinstance(data, IterableDataset) or (is_indexed(data) and not isinstance(data, list)):
            return self.open(data, workers, collate)
        _refuse_collate("run.steps", data, collate)
        if self.check_dataset is not None:
            self.check_dataset(data)
        from shoal.trainer.guards.reports.own_loaders import identify_unsharded_data

        entry = identify_unsharded_data(
            getattr(data, "batch_sampler", None), getattr(data, "dataset", None)
        )
        told = self.world.gather_json(entry) if self.world.size > 1 else []
        if told and entry is not None and all(one == entry for one in told):
            raise ConfigError(
                f"run.steps: the DataLoader has a {entry[0]}, so each of {self.world.size} ranks "
                f"would train on the whole dataset; try: run.steps(loader.dataset), or a "
                f"DistributedSampler in the loader"
            )
        return self._iterate_own_batches(data)

    def _iterate_own_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the user's batches and mark an epoch as under way during the loop."""
        self._own_under_way = True
        try:
            yield from batches
        finally:
            self._own_under_way = False

    def mark_consumed(self, batch: Any) -> None:
        """Record the loader's position after `batch`, which a step has used."""
        if not isinstance(batch, StepBatch):
            return
        for place, loader in enumerate(self.loaders):
            if id(loader) == batch.stream:
                self.state += [{} for _ in range(place + 1 - len(self.state))]
                self.state[place] = batch.after

    def can_skip_samples(self, batch: StepBatch) -> bool:
        """Return whether the loader of a batch can exclude samples: it needs an index."""
        return any(
            isinstance(one, SkippingLoader) and id(one) == batch.stream for one in self.loaders
        )

    def skip_samples(self, batch: StepBatch) -> tuple[int, int]:
        """Exclude the samples from the loader's position to a batch's end; return their start.

        Args:
            batch: a batch of one of the loaders.

        Returns:
            (first excluded position, samples of an epoch).
        """
        for place, loader in enumerate(self.loaders):
            if isinstance(loader, SkippingLoader) and id(loader) == batch.stream:
                first = loader.position
                loader.skip_samples(first, batch.next_position)
                self.state[place] = loader.state()
                return first, loader.samples
        raise BugError("a batch of no loader")

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Continue at the positions of a saved `state`, also with loaders that are open already."""
        self.state = list(state)
        for loader, kept in zip(self.loaders, self.state, strict=False):
            if kept:
                loader.restore(kept)

    def validation(
        self, data: Any, workers: int, collate: Any, everyone: World | None = None
    ) -> MicroBatches:
        """Return this rank's micro-batches of `data`; over all ranks each sample comes once.

        Args:
            data: a dataset (split over ranks here), or an iterable of this rank's own batches.
            everyone: all ranks, which compare their datasets.
        """
        if isinstance(data, MicroBatches):
            return data
        if isinstance(data, list) or not is_indexed(data):
            _refuse_collate("run.evaluate", data, collate)
            return MicroBatches(data, _count_batches(data))
        if everyone is not None and everyone.size > 1 and self._validated is not data:
            self._validated = data
            from shoal.trainer.run_folder.resume_checks import held_out_line

            if line := held_out_line(data, workers, everyone):
                self.notice(line)
        return self.held_out_batches(data, workers, collate)

    def held_out_batches(
        self, data: Any, workers: int, collate: Any, micro_batch: int = 0
    ) -> MicroBatches:
        """Return this rank's micro-batches of held-out data: a dataset, a list, or samples.

        Args:
            micro_batch: samples per forward pass; 0: as in training, or fewer if some ranks would
                have no sample.
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
            **{**self._rank_settings(), "micro_batch": micro_batch},
        )
        if not isinstance(loader, Loader):
            return MicroBatches(loader, 0)
        names = tuple(dict.fromkeys(getattr(data, "source_names", ())))
        return MicroBatches(loader, len(loader), names, data.source_of if names else None)

    def _rank_settings(self) -> dict[str, Any]:
        return {
            "micro_batch": self.plan.micro_batch,
            "seed": self.plan.seed,
            "rank": self.world.rank if self.world.rank < self.plan.layout.data_degree else -1,
            "degree": self.plan.layout.data_degree,
        }


def _refuse_collate(call: str, batches: Any, collate: Any) -> None:
    """Raise ConfigError if the user passes a collate function that nothing would call."""
    if collate is not None:
        raise ConfigError(
            f"{call}: a {type(batches).__name__} is taken as batches that are made already, for "
            f"which collate= is not called; try: a Dataset of its samples (with __len__ and "
            f"__getitem__), or run.loader(samples, collate=…)"
        )


def _count_batches(batches: Iterable[Any]) -> int:
    """Return the number of batches; 0 if it is unknown, as for a DataLoader over a stream."""
    try:
        return len(batches) if isinstance(batches, Sized) else 0
    except TypeError:
        return 0


@dataclass
class MicroBatches:
    """Micro-batches of one rank.

    Attributes:
        most: the count of the busiest rank, 0 if it is unknown.
        source_names: of a mixture, else ().
        source_of: returns the name of the source of a sample, by its entry in `sample_ids`.
        sample_ids: as in `StepBatch`, of the micro-batch that was yielded last.
    """

    batches: Iterable[Any]
    most: int
    source_names: tuple[str, ...] = ()
    source_of: Callable[[int], str] | None = None
    sample_ids: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        """Yield one micro-batch after another, from step batches or from the user's own batches."""
        for batch in self.batches:
            if isinstance(batch, StepBatch):
                for micro, self.sample_ids in zip(
                    batch.micro_batches, batch.sample_ids, strict=True
                ):
                    yield micro.value
            else:
                yield batch

    def sources(self) -> list[str]:
        """Return the source of each sample of the micro-batch that was yielded last."""
        return [self.source_of(one) for one in self.sample_ids] if self.source_of else []


def is_hf_stream(dataset: Any) -> bool:
    """Return whether a dataset is a Hugging Face stream, whose cost is reported."""
    if "datasets" not in sys.modules:
        return False
    from shoal.data.loading.hf_layers import is_streaming

    return is_streaming(dataset)


def open_loader(dataset: Any, **settings: Any) -> AnyLoader:
    """Return the loader for `dataset`: a Loader if it is map-style, else an IterableLoader.

    Args:
        settings: the keyword arguments of Loader; shuffle and turn are for datasets with an index,
            and are dropped otherwise.

    Raises:
        ConfigError: the dataset has neither an index and a length nor `__iter__`; it is a
            DataLoader, which makes batches itself; or the loader refuses it.
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
