"""Deals a script's batches to processes as Accelerate does, and gathers what they found.

Process r of n takes the batches r, r + n, … of the script's own sampler, in an order that is drawn
once and is the first process's. Where the last ones do not suffice for all, samples of the
epoch's beginning come again (even batches); gathered for metrics, these are dropped. Whose end it
is, asks the loader that was begun last: an evaluation inside of an epoch has its own.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.base.errors import ConfigError, one_of
from shoal.fabric import World

COPIED = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)


class Deals(Protocol):
    """What of an Accelerator says how batches are dealt."""

    world: World
    split_batches: bool
    even_batches: bool
    seedable: bool
    data_seed: int | None
    active: list[DealtLoader]


def dealt(
    batches: Iterable[Sequence[int]], rank: int, ranks: int, size: int, *, drops: bool, even: bool
) -> Iterator[list[int]]:
    """Deal batches of `size` indices to ranks in turn; every rank gets as many, if `even`.

    >>> [list(dealt([[0, 1], [2, 3], [4]], r, 2, 2, drops=False, even=True)) for r in (0, 1)]
    [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    """
    first: list[int] = []
    turn: list[list[int]] = []
    for number, batch in enumerate(batches):
        if number < ranks:
            first += batch
        turn.append(list(batch))
        if len(turn) == ranks and len(batch) == size:
            yield turn[rank]
            turn = []
    if drops or not turn:
        return
    if even:
        again = itertools.cycle(first)
        turn[-1] += itertools.islice(again, size - len(turn[-1]))
        while len(turn) < ranks:
            turn.append(list(itertools.islice(again, size)))
    if rank < len(turn):
        yield turn[rank]


def split(
    batches: Iterable[Sequence[int]], rank: int, ranks: int, size: int, *, drops: bool, even: bool
) -> Iterator[list[int]]:
    """Give each rank its part of every batch of `size` indices over all ranks.

    >>> [list(split([[0, 1], [2]], r, 2, 2, drops=False, even=True)) for r in (0, 1)]
    [[[0], [2]], [[1], [0]]]
    """
    first: list[int] = []
    part = slice(size // ranks * rank, size // ranks * (rank + 1))
    for batch in batches:
        first = first or list(batch)
        if len(batch) == size:
            yield list(batch[part])
        elif not drops:
            whole = list(batch)
            if even:
                whole += itertools.islice(itertools.cycle(first), size - len(whole))
            if whole[part]:
                yield whole[part]


class _Batches:
    """A batch sampler of one process's share."""

    def __init__(self, sampler: Any, deals: Deals) -> None:
        self.sampler, self.deals = sampler, deals

    def __iter__(self) -> Iterator[list[int]]:
        world, one = self.deals.world, split if self.deals.split_batches else dealt
        return one(
            self.sampler, world.rank, world.size, self.sampler.batch_size,
            drops=self.sampler.drop_last, even=self.deals.even_batches,
        )  # fmt: skip

    def __len__(self) -> int:
        count, world = len(self.sampler), self.deals.world
        if self.deals.split_batches:
            return count
        more = not self.sampler.drop_last and (
            self.deals.even_batches or world.rank < count % world.size
        )
        return count // world.size + (more and count % world.size > 0)


class DealtLoader:
    """A script's DataLoader, dealt: this process's batches, on its device.

    at_end      the last batch of an epoch was given · iteration  epochs until now
    remainder   samples of an epoch's last step over all ranks, if fewer than a whole one; 0: none
    """

    def __init__(self, loader: DataLoader[Any], deals: Deals) -> None:
        world = deals.world
        self.loader, self.deals, self.iteration, self.skipped = loader, deals, 0, 0
        self.at_end, self.remainder, self.synchronised = False, 0, None
        whole: int = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        self.total_batch_size = whole if deals.split_batches else whole * world.size
        if hasattr(loader.dataset, "__len__"):
            self.total_dataset_length = len(loader.dataset)
            if not loader.drop_last:
                self.remainder = self.total_dataset_length % self.total_batch_size
        sampler: Any = getattr(loader.batch_sampler, "sampler", None)
        if deals.seedable and isinstance(sampler, torch.utils.data.RandomSampler):
            seed = deals.data_seed
            self.first_seed = torch.random.initial_seed() if seed is None else seed
            self.seeded = sampler
        if world.size == 1:
            return
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                "accelerator.prepare: an iterable dataset is not dealt by this facade; nearest: "
                "run.loader(dataset) of shoal.parallelize, which does"
            )
        if hasattr(sampler, "generator") and not deals.seedable:
            if sampler.generator is None:
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            self.synchronised = sampler.generator
        named = {name: getattr(loader, name) for name in COPIED}
        batches: Any = _Batches(loader.batch_sampler, deals)
        self.loader = DataLoader(loader.dataset, batch_sampler=batches, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader) - self.skipped

    def set_epoch(self, epoch: int) -> None:
        """Number the epoch that comes."""
        self.iteration = epoch

    def state(self) -> dict[str, Any]:
        """Where its order goes on, as plain values."""
        drawn = self.synchronised
        return {"epoch": self.iteration, "draws": text_of(drawn.get_state()) if drawn else ""}

    def go_on(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.iteration = state["epoch"]
        if self.synchronised is not None and state["draws"]:
            self.synchronised.set_state(tensor_of(state["draws"]))

    def __iter__(self) -> Iterator[Any]:
        if self.synchronised is not None:
            state = self.synchronised.get_state()
            held = state.to(self.deals.world.device)
            self.deals.world.broadcast(held)
            self.synchronised.set_state(held.cpu())
        if hasattr(self, "seeded"):
            self.seeded.generator = torch.Generator()
            self.seeded.generator.manual_seed(self.first_seed + self.iteration)
        told = getattr(self.loader.sampler, "set_epoch", None)
        if told is not None:
            told(self.iteration)
        self.at_end, left = False, self.skipped
        self._leave()
        self.deals.active.append(self)  # left in the middle it stays there, as in Accelerate
        batches = iter(self.loader)
        ahead = next(batches, batches)
        while ahead is not batches:
            batch, ahead = ahead, next(batches, batches)
            self.at_end = ahead is batches
            if left > 0:
                left -= 1
                continue
            yield moved(batch, self.deals.world.device)
        self.iteration += 1
        self._leave()

    def _leave(self) -> None:
        self.deals.active[:] = [one for one in self.deals.active if one is not self]


def skip_first_batches(loader: DealtLoader, num_batches: int = 0) -> DealtLoader:
    """The same loader without its first batches, for one epoch that goes on."""
    made = DealtLoader.__new__(DealtLoader)
    made.__dict__ |= loader.__dict__
    made.skipped = num_batches
    return made


def text_of(state: torch.Tensor) -> str:
    """A generator's state as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def tensor_of(text: str) -> torch.Tensor:
    """The state that a text stands for."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def each(
    value: Any, act: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = lambda one: one
) -> Any:
    """A structure with what `act` gives of every tensor in it, and `other` of everything else.

    >>> each({"a": torch.ones(2), "b": [torch.ones(3), "c"]}, len)
    {'a': 2, 'b': [3, 'c']}
    """
    if isinstance(value, torch.Tensor):
        return act(value)
    if hasattr(value, "items"):
        return type(value)({name: each(one, act, other) for name, one in value.items()})
    if isinstance(value, tuple | list):
        parts = [each(one, act, other) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return other(value)


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return each(batch, lambda one: one.to(device))


def gathered(value: Any, world: World) -> Any:
    """All ranks' tensors along dim 0; of what holds anything else, all ranks' lists in one."""
    objects: list[Any] = []
    each(value, lambda one: one, objects.append)
    if objects:
        own = value if isinstance(value, list) else [value]
        return [one for part in world.gather_json(own) for one in part]
    return each(value, lambda one: _rows(one, world).flatten(0, 1))


def _rows(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The tensor of each rank."""
    own = tensor.detach()  # a loss is told, not differentiated
    return world.all_gather(own.reshape(1) if not own.dim() else own.contiguous())


def first_of(value: Any, count: int) -> Any:
    """The first rows of every tensor, or of a list."""
    if isinstance(value, list) and not any(isinstance(one, torch.Tensor) for one in value):
        return value[:count]
    return each(value, lambda one: one[:count])


def padded(value: Any, world: World, dim: int, index: float, first: bool) -> Any:
    """Tensors as long along a dim as the longest of all ranks, filled with `index`."""

    def filled(one: torch.Tensor) -> torch.Tensor:
        if not -one.dim() <= dim < one.dim():
            return one
        length = one.shape[dim]
        longest = world.all_reduce_max(length)
        shape = [*one.shape]
        shape[dim] = longest
        made = one.new_full(shape, index)
        made.narrow(dim, longest - length if first else 0, length).copy_(one)
        return made

    return each(value, filled)


def reduced(value: Any, world: World, reduction: str = "sum") -> Any:
    """Tensors summed over ranks; or their mean, their largest, or each rank's own (none)."""
    if reduction not in (known := ("sum", "mean", "max", "none")):
        raise ConfigError(one_of("reduction", reduction, known))

    def total(one: torch.Tensor) -> torch.Tensor:
        made = one.detach().clone().to(world.device)
        if reduction == "max":
            return _rows(made, world).amax(0).reshape(one.shape)
        if reduction != "none":
            world.all_reduce(made)
        return made / world.size if reduction == "mean" else made

    return each(value, total)
