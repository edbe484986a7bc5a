"""Sums of gradients beyond the data ranks: who is asked, in which messages.

The worlds here have one rank at hand; they add what the others of a message would bring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.base.plans.tensor_shards import Shard
from shoal.parallel.data_parallel import shared_parameters
from shoal.parallel.data_parallel.shared_parameters import all_reduce_shared_gradients
from shoal.parallel.data_parallel.single import LocalGradients
from shoal.parallel.program import LocalParameter

Ranks = tuple[int, ...]


class Others:
    """A world whose other ranks bring ones; remembers the messages."""

    def __init__(self, ranks: Ranks, seen: list[tuple[Ranks, int]]) -> None:
        self.ranks, self.seen = ranks, seen

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.seen.append((self.ranks, tensor.numel()))
        tensor += 1


@dataclass
class Few:
    """As much of a program as the sums look at."""

    sums: dict[str, tuple[Any, ...]]
    local: dict[str, LocalParameter]


class Rank:
    """A rank with parameters of these sizes, which are summed over these ranks too."""

    def __init__(self, sizes: dict[str, int], ranks: dict[str, list[Ranks]]) -> None:
        self.seen: list[tuple[Ranks, int]] = []
        self.parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
        local = {
            name: LocalParameter(p, Shard.whole(name, tuple(p.shape), "float32"))
            for name, p in self.parameters.items()
        }
        data = Others((0,), [])
        sums = {n: (data, *(Others(one, self.seen) for one in told)) for n, told in ranks.items()}
        self.program, self.reducer = Few(sums, local), LocalGradients(self.parameters)
        self.reducer.start_step(1)

    def sum(self) -> None:
        all_reduce_shared_gradients(self.program, self.reducer)


def test_what_another_holder_computed_arrives() -> None:
    rank = Rank({"mine": 4, "theirs": 2}, {"mine": [(0, 1)], "theirs": [(0, 1)]})
    rank.parameters["mine"].grad = torch.full((4,), 2.0)
    rank.sum()
    assert rank.parameters["mine"].grad.tolist() == [3.0] * 4
    assert rank.parameters["theirs"].grad.tolist() == [1.0] * 2


def test_tensor_parallel_sums_come_first_whatever_the_ranks_are_called() -> None:
    """The last sum is over stages; its ranks may come before the others in the order of names."""
    rank = Rank({"norm": 3, "weight": 5}, {"norm": [(2, 3), (0, 2)], "weight": [(0, 2)]})
    for parameter in rank.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    rank.sum()
    assert rank.seen == [((2, 3), 3), ((0, 2), 8)]


def test_messages_are_buckets(monkeypatch) -> None:
    monkeypatch.setattr(shared_parameters, "BUCKET_BYTES", 40)
    sizes = {"a": 4, "b": 6, "c": 1, "large": 30, "d": 2}
    rank = Rank(sizes, {name: [(0, 1)] for name in sizes})
    for number, parameter in enumerate(rank.parameters.values()):
        parameter.grad = torch.full_like(parameter, number)
    rank.sum()
    assert [size for _, size in rank.seen] == [10, 1, 30, 2]
    for number, parameter in enumerate(rank.parameters.values()):
        assert parameter.grad.tolist() == [number + 1] * parameter.numel()


def test_gradients_in_another_order_of_memory() -> None:
    rank = Rank({"image": 1}, {"image": [(0, 1)]})
    last = torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last)
    image = rank.parameters["image"]
    image.data = torch.zeros_like(last)
    image.grad = last.clone(memory_format=torch.preserve_format)
    rank.sum()
    assert torch.equal(image.grad, last + 1)
