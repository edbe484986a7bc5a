"""Sums of gradients beyond the data ranks: who is asked, in which messages, and what was computed.

The worlds here have one rank at hand; they add what the others of a message would bring.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.base.shards import Shard
from shoal.parallel.data_parallel import joined
from shoal.parallel.data_parallel.joined import JoinedGradients
from shoal.parallel.data_parallel.single import LocalGradients
from shoal.parallel.program import Local


class Others:
    """A world whose other ranks bring ones; remembers the messages."""

    def __init__(self, ranks: tuple[int, ...], seen: list[tuple[tuple[int, ...], int]]) -> None:
        self.ranks, self.seen = ranks, seen

    def sum(self, tensor: torch.Tensor) -> None:
        self.seen.append((self.ranks, tensor.numel()))
        tensor += 1


def reducer(
    sizes: dict[str, int], worlds: dict[str, list[tuple[int, ...]]]
) -> tuple[JoinedGradients, dict[str, nn.Parameter], list[tuple[tuple[int, ...], int]]]:
    """One of a rank with parameters of these sizes, and the messages that it sends."""
    seen: list[tuple[tuple[int, ...], int]] = []
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    local = {
        name: Local(p, Shard.whole(name, tuple(p.shape), "float32"))
        for name, p in parameters.items()
    }
    over = {n: tuple(Others(ranks, seen) for ranks in told) for n, told in worlds.items()}
    return JoinedGradients(LocalGradients(parameters), over, local), parameters, seen


def test_what_another_holder_computed_arrives_and_is_not_counted_as_used() -> None:
    made, parameters, _ = reducer({"mine": 4, "theirs": 2}, {"mine": [(0, 1)], "theirs": [(0, 1)]})
    made.begin(1)
    parameters["mine"].grad = torch.full((4,), 2.0)
    made.finish()
    assert parameters["mine"].grad.tolist() == [3.0] * 4
    assert parameters["theirs"].grad.tolist() == [1.0] * 2
    assert made.used() == [True, False]
    assert [float(norm) for norm in made.local_norms()] == [4.0], "before the others' came"


def test_tensor_parallel_sums_come_first_whatever_the_ranks_are_called() -> None:
    """The last sum is over stages; its ranks may come before the others in the order of names."""
    made, parameters, seen = reducer(
        {"norm": 3, "weight": 5}, {"norm": [(2, 3), (0, 2)], "weight": [(0, 2)]}
    )
    made.begin(1)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    made.finish()
    assert seen == [((2, 3), 3), ((0, 2), 8)]


def test_messages_are_buckets(monkeypatch) -> None:
    monkeypatch.setattr(joined, "BUCKET_BYTES", 40)
    sizes = {"a": 4, "b": 6, "c": 1, "large": 30, "d": 2}
    made, parameters, seen = reducer(sizes, {name: [(0, 1)] for name in sizes})
    made.begin(1)
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full_like(parameter, number)
    made.finish()
    assert [size for _, size in seen] == [10, 1, 30, 2]
    for number, parameter in enumerate(parameters.values()):
        assert parameter.grad.tolist() == [number + 1] * parameter.numel()


def test_gradients_in_another_order_of_memory() -> None:
    made, parameters, _ = reducer({"image": 1}, {"image": [(0, 1)]})
    made.begin(1)
    last = torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last)
    parameters["image"].data = torch.zeros_like(last)
    parameters["image"].grad = last.clone(memory_format=torch.preserve_format)
    made.finish()
    assert torch.equal(parameters["image"].grad, last + 1)
