"""Where a run's batches come from: its loaders, where the stream stands, and what validation reads.

A checkpoint keeps the state of every loader, in the order in which they were opened, as it was when
its last batch was committed; so batches may be taken ahead. After `restore` the loaders go on from
there, whether they are opened before or after, in the same order. Asking again for a loader over
the same dataset gives the same one, so `for batch in run.loader(data)` is a new epoch each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from shoal.base.errors import ConfigError
from shoal.base.plan import Plan
from shoal.data.iterable import IterableLoader, open_loader
from shoal.data.loader import Loader, is_indexed
from shoal.data.step import StepBatch
from shoal.fabric import World

AnyLoader = Loader | IterableLoader


class Feed:
    """The loaders of one run; `state` is what a checkpoint keeps: one entry per loader, JSON."""

    def __init__(self, plan: Plan, world: World, seed: int) -> None:
        self.plan = plan
        self.world = world
        self.seed = seed
        self.state: list[dict[str, Any]] = []
        self._loaders: list[AnyLoader] = []
        self._settings: list[tuple[Any, int, Any]] = []

    def open(self, dataset: Any, workers: int, collate: Any) -> AnyLoader:
        """A loader of this rank's micro-batches, where the stream over `dataset` stands.

        Errors: ConfigError for an object that cannot be read, or a restored state of other data.
        """
        for known, (of, by, joined) in zip(self._loaders, self._settings, strict=True):
            if of is dataset and by == workers and joined is collate:
                return known
        loader = open_loader(
            dataset, batch=self.plan.batch, workers=workers, collate=collate, **self._share()
        )
        place = len(self._loaders)
        if place < len(self.state) and self.state[place]:
            loader.restore(self.state[place])
        self._loaders.append(loader)
        self._settings.append((dataset, workers, collate))
        return loader

    def training(self, data: Any, workers: int, collate: Any) -> Iterable[Any]:
        """One epoch of steps: over a dataset, split over ranks here, or this rank's own batches.

        Errors: ConfigError for a DataLoader that gives each of several ranks the whole dataset.
        """
        if isinstance(data, IterableDataset) or (is_indexed(data) and not isinstance(data, list)):
            return self.open(data, workers, collate)
        batches = getattr(data, "batch_sampler", None)
        sampler = batches.sampler if type(batches) is BatchSampler else None
        if type(sampler) in (RandomSampler, SequentialSampler) and self.world.size > 1:
            raise ConfigError(
                f"run.steps: the DataLoader has a {type(sampler).__name__}, so each of "
                f"{self.world.size} ranks would train on the whole dataset; nearest: "
                f"run.steps(loader.dataset), or a DistributedSampler in the loader"
            )
        return data

    def consumed(self, batch: Any) -> None:
        """A step used `batch`: remember where its loader stands now."""
        if not isinstance(batch, StepBatch):
            return
        for place, loader in enumerate(self._loaders):
            if id(loader) == batch.stream:
                self.state += [{} for _ in range(place + 1 - len(self.state))]
                self.state[place] = batch.after

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on where `state` was saved, also with loaders that are open already."""
        self.state = list(state)
        for loader, kept in zip(self._loaders, self.state, strict=False):
            if kept:
                loader.restore(kept)

    def validation(self, data: Any, workers: int, collate: Any) -> Iterator[Any]:
        """This rank's micro-batches of `data`, every sample once over all ranks.

        data   a dataset (split over ranks here), or an iterable of this rank's own batches
        """
        if isinstance(data, list) or not is_indexed(data):
            return _flat(data)
        return self.held_out(data, workers, collate)

    def held_out(self, data: Any, workers: int, collate: Any) -> Iterator[Any]:
        """As `validation`, for samples in any form: a dataset, a list, an iterable of samples."""
        loader = open_loader(
            data,
            batch=self.plan.micro_batch * self.plan.layout.data_degree,
            workers=workers,
            collate=collate,
            shuffle=False,
            **self._share(),
        )
        return _flat(loader)

    def _share(self) -> dict[str, Any]:
        return {
            "micro_batch": self.plan.micro_batch,
            "seed": self.seed,
            "rank": self.world.rank,
            "degree": self.plan.layout.data_degree,
        }


def _flat(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        if isinstance(batch, StepBatch):
            yield from (m.value for m in batch.micro_batches)
        else:
            yield batch
