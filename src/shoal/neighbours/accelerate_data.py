"""Distribute a script's batches to processes as Accelerate does, and map over tensors in batches.

Process r of n takes the batches r, r + n, … of the script's own sampler, in an order that the first
process draws once. If the last ones do not suffice for all, samples of the epoch's beginning come
again (even batches); metrics gathered over processes leave these out. `end_of_dataloader` refers to
the loader that started last: an evaluation inside of an epoch has its own.

A state that is saved inside an epoch has the generators of its start: without the batches that were
used, the epoch goes on in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.base.errors import ConfigError
from shoal.data.loading.epoch_order import EpochOrder, cut_batches, deal_batches

COPIED = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)


class _RankBatchSampler:
    """Batch sampler of one process's share."""

    def __init__(self, sampler: Any, accelerator: Any) -> None:
        self.sampler, self.world = sampler, accelerator.world
        self.splits, self.even = accelerator.split_batches, accelerator.even_batches

    def __iter__(self) -> Iterator[list[int]]:
        batches, size, world = self.sampler, self.sampler.batch_size, self.world
        if self.splits:
            size //= world.size
            batches = cut_batches(batches, size)
        drops = self.sampler.drop_last
        return deal_batches(batches, world.rank, world.size, size, drops=drops, even=self.even)

    def __len__(self) -> int:
        if self.splits:
            return len(self.sampler)
        rounds, more = divmod(len(self.sampler), self.world.size)
        if not self.sampler.drop_last and more > 0:
            rounds += self.even or self.world.rank < more
        return rounds


class RankDataLoader:
    """A script's DataLoader with this process's share of the batches, on its device.

    Attributes:
        at_end: the last batch of an epoch was returned.
        epoch: the place in the order of batches.
        remainder: samples of an epoch's last step over all ranks, if fewer than a whole one; 0:
            none.
    """

    def __init__(self, loader: DataLoader[Any], accelerator: Any) -> None:
        world = accelerator.world
        self.loader, self.accelerator, self.epoch = loader, accelerator, EpochOrder()
        self.skipped, self.at_end, self.remainder, self.synchronised = 0, False, 0, None
        whole: int = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        self.total_batch_size = whole if accelerator.split_batches else whole * world.size
        if hasattr(loader.dataset, "__len__"):
            self.total_dataset_length = len(loader.dataset)
            if not loader.drop_last:
                self.remainder = self.total_dataset_length % self.total_batch_size
        sampler: Any = getattr(loader.batch_sampler, "sampler", None)
        seedable, seed = accelerator.use_seedable_sampler, accelerator.data_seed
        if seedable and isinstance(sampler, torch.utils.data.RandomSampler):
            self.first_seed = torch.random.initial_seed() if seed is None else seed
            self.seeded = sampler
        self.counting: Sequence[Any] = (
            loader.batch_sampler,
            sampler or loader.sampler,
            loader.dataset,
        )
        if world.size == 1:
            if not seedable:  # without a generator torch's own draws the order
                self.synchronised = getattr(sampler, "generator", None)
            return
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                "accelerator.prepare: an iterable dataset is not dealt by this facade; try: "
                "run.loader(dataset) of shoal.parallelize, which does"
            )
        if accelerator.split_batches and whole % world.size:
            raise ConfigError(
                f"split_batches: batch_size = {whole} is not as many samples on each of "
                f"{world.size} processes; try: {max(1, whole // world.size) * world.size}"
            )
        if hasattr(sampler, "generator") and not seedable:
            if sampler.generator is None:
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            self.synchronised = sampler.generator
        named = {name: getattr(loader, name) for name in COPIED}
        batches: Any = _RankBatchSampler(loader.batch_sampler, accelerator)
        self.loader = DataLoader(loader.dataset, batch_sampler=batches, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader) - self.skipped

    @property
    def iteration(self) -> int:
        """Epochs until now."""
        return self.epoch.number

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self.epoch.number = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order of batches, as plain values that all ranks have."""
        return self.epoch.state(self.synchronised)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`."""
        self.epoch.load(state, self.synchronised)

    def __iter__(self) -> Iterator[Any]:
        now = self.epoch
        resumes, now.loaded = now.loaded and self.skipped > 0, False
        if resumes and 0 < now.ended <= self.skipped:
            return  # the saved epoch had ended, and was counted
        batches = (
            now.read_on(self._read, self.synchronised)
            if resumes and now.is_inside
            else self._start_epoch()
        )
        now.is_open, now.ended, self.at_end = True, 0, False
        self._end_epoch()
        self.accelerator.active.append(self)  # an unfinished loop stays active, as in Accelerate
        ahead, count = next(batches, batches), self.skipped
        while ahead is not batches:
            batch, count = ahead, count + 1
            now.draws[1:] = [torch.get_rng_state()]
            ahead = next(batches, batches)
            self.at_end = ahead is batches
            now.ended = count if self.at_end else 0
            yield move_batch(batch, self.accelerator.device)
        now.number, now.is_open, now.loaded = now.number + 1, False, False
        self._end_epoch()

    def _start_epoch(self) -> Iterator[Any]:
        """Return the batches of a new epoch."""
        drawn, world = self.synchronised, self.accelerator.world
        if drawn is not None and world.size > 1:
            held = drawn.get_state().to(self.accelerator.device)
            world.broadcast(held)
            drawn.set_state(held.cpu())
        self.epoch.start(drawn)
        return self._read()

    def _read(self) -> Iterator[Any]:
        """Return batches in the order that the generators draw now, without those to skip."""
        if hasattr(self, "seeded"):
            self.seeded.generator = torch.Generator()
            self.seeded.generator.manual_seed(self.first_seed + self.iteration)
        for one in self.counting:
            if hasattr(one, "set_epoch"):
                one.set_epoch(self.iteration)
        batches = iter(self.loader)
        for _ in itertools.islice(batches, self.skipped):
            pass
        return batches

    def _end_epoch(self) -> None:
        self.accelerator.active[:] = [one for one in self.accelerator.active if one is not self]


def skip_first_batches(loader: RankDataLoader, num_batches: int = 0) -> RankDataLoader:
    """Return the loader without its first batches, for the rest of one resumed epoch."""
    made = RankDataLoader.__new__(RankDataLoader)
    made.__dict__ |= loader.__dict__
    made.skipped = num_batches
    return made


def apply_to_tensors(
    value: Any, act: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = lambda one: one
) -> Any:
    """Apply `act` to every tensor of a structure, and `other` to everything else.

    >>> apply_to_tensors({"a": torch.ones(2), "b": [torch.ones(3), "c"]}, len)
    {'a': 2, 'b': [3, 'c']}
    """
    if isinstance(value, torch.Tensor):
        return act(value)
    if hasattr(value, "items"):
        return type(value)({name: apply_to_tensors(one, act, other) for name, one in value.items()})
    if isinstance(value, tuple | list):
        parts = [apply_to_tensors(one, act, other) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return other(value)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    return apply_to_tensors(batch, lambda one: one.to(device))


def has_only_tensors(value: Any) -> bool:
    """Return whether a structure contains only tensors."""
    others: list[Any] = []
    apply_to_tensors(value, lambda one: one, others.append)
    return not others
