"""Where a run's batches come from: its loaders, where the stream stands, and what validation reads.

A checkpoint keeps the state of the loader that the last step's batch came from. After `restore` a
loader goes on from there, whether it is made before or after. Asking again for a loader over the
same dataset gives the same one, so `for batch in run.loader(data)` once per epoch is a new epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shoal.base.plan import Plan
from shoal.data.iterable import IterableLoader, open_loader
from shoal.data.loader import Loader, is_indexed
from shoal.data.step import StepBatch
from shoal.fabric import World

AnyLoader = Loader | IterableLoader


class Feed:
    """The loaders of one run; `state` is what a checkpoint keeps of them, None before any step."""

    def __init__(self, plan: Plan, world: World, seed: int) -> None:
        self.plan = plan
        self.world = world
        self.seed = seed
        self.state: dict[str, Any] | None = None
        self._loaders: list[AnyLoader] = []
        self._settings: list[tuple[Any, int, Any]] = []
        self._waiting: dict[str, Any] | None = None

    def open(self, dataset: Any, workers: int, collate: Any) -> AnyLoader:
        """A loader of this rank's micro-batches, where the stream over `dataset` stands.

        Errors: ConfigError for an object that cannot be read, or a restored state of other data.
        """
        for known, (of, by, joined) in zip(self._loaders, self._settings, strict=True):
            if of is dataset and by == workers and joined is collate:
                return known
        loader = open_loader(
            dataset,
            batch=self.plan.batch,
            micro_batch=self.plan.micro_batch,
            seed=self.seed,
            rank=self.world.rank,
            degree=self.plan.layout.data_degree,
            workers=workers,
            collate=collate,
        )
        if self._waiting is not None:
            loader.restore(self._waiting)
            self._waiting = None
        self._loaders.append(loader)
        self._settings.append((dataset, workers, collate))
        return loader

    def consumed(self, batch: Any) -> None:
        """A step used `batch`: remember where its loader stands now."""
        if not isinstance(batch, StepBatch):
            return
        states = [loader.state() for loader in self._loaders]
        mine = [state for state in states if state.get("position") == batch.next_position]
        kept = (mine or states[-1:] or [{}])[0]
        self.state = {**kept, "position": batch.next_position}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on where `state` was saved: the first loader, also one that is open already."""
        self.state = self._waiting = state
        if state is not None and self._loaders:
            self._loaders[0].restore(state)
            self._waiting = None

    def validation(self, data: Any, workers: int, collate: Any) -> Iterator[Any]:
        """This rank's micro-batches of `data`, every sample once over all ranks.

        data   a dataset (split over ranks here), or an iterable of this rank's own batches
        """
        if isinstance(data, list) or not is_indexed(data):
            return _flat(data)
        loader = Loader(
            data,
            batch=self.plan.micro_batch * self.plan.layout.data_degree,
            micro_batch=self.plan.micro_batch,
            seed=self.seed,
            rank=self.world.rank,
            degree=self.plan.layout.data_degree,
            workers=workers,
            collate=collate,
            shuffle=False,
        )
        return _flat(loader)


def _flat(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        if isinstance(batch, StepBatch):
            yield from (m.value for m in batch.micro_batches)
        else:
            yield batch
