"""Modules that several blocks hold, under fsdp; modules with running statistics that run twice, under pp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batch_steps import Made, plain_steps, run_steps
from sample_lists_case import drawn, squares
from shoal.fabric import World

STEPS, SAMPLES, WIDTH = 3, 8, 6


class Block(nn.Module):
    """A layer, then a module that other blocks may hold too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shared(self.own(x)).tanh()


class Scaled(nn.Module):
    """A buffer that no pass changes, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Counter(nn.Module):
    """A count of its calls, which changes what it computes; its weight makes it a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x * self.weight / (self.calls + 1)


class Cached(nn.Module):
    """A table that every call makes anew, with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.linspace(0.5, 1.5, WIDTH, dtype=x.dtype)
        return x * self.table


class Net(nn.Module):
    """Blocks and a head; the root may hold the shared module, too."""

    def __init__(self, shared: nn.Module, holders: list[int], blocks: int, *, root: bool) -> None:
        super().__init__()
        if root:
            self.shared = shared
        self.blocks = nn.ModuleList(
            Block(shared if number in holders else nn.Linear(WIDTH, WIDTH))
            for number in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x) if hasattr(self, "shared") else x
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(nn.Module):
    """A trunk that runs for both halves of the features, as in a siamese net."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.ReLU(), nn.Linear(WIDTH, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x) * self.trunk(x.flip(0)))


class Middle(nn.Module):
    """Four blocks; one module runs before and after the third of them, between equal halves."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block(nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three, four = self.blocks
        x = self.norm(three(self.norm(two(one(x)))))
        return self.head(four(x))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def deep() -> nn.Module:
    return nn.Sequential(linear(), nn.GELU(), nn.Sequential(linear()))


class Outer(nn.Module):
    """A submodule that holds a module which other blocks hold too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner = linear(), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.before(x).relu())


def nested() -> nn.Module:
    made, inner = Net(linear(), [], 3, root=False), linear()
    for block in list(made.blocks)[:2]:
        block.shared = Outer(inner)
    return made


NETS: dict[str, Callable[[], nn.Module]] = {
    "two blocks": lambda: Net(linear(), [0, 1], 2, root=False),
    "and the root": lambda: Net(linear(), [0, 1], 2, root=True),
    "the root and a block": lambda: Net(linear(), [1], 3, root=True),
    "two of four": lambda: Net(linear(), [1, 3], 4, root=False),
    "inside": nested,
    "a list": lambda: Net(deep(), [0, 2], 3, root=False),
    "a buffer": lambda: Net(Scaled(), [0, 1], 3, root=False),
    "siamese BatchNorm": lambda: Twice(nn.BatchNorm1d(WIDTH)),
    "siamese GroupNorm": lambda: Twice(nn.GroupNorm(2, WIDTH)),
    "siamese count": lambda: Twice(Counter()),
    "siamese cache": lambda: Twice(Cached()),
    "shared BatchNorm": lambda: Net(nn.BatchNorm1d(WIDTH), [0, 1], 2, root=False),
    "middle BatchNorm": lambda: Middle(nn.BatchNorm1d(WIDTH)),
    "middle count": lambda: Middle(Counter()),
}


def made(kind: str) -> Made:
    torch.manual_seed(0)
    net = NETS[kind]().double()
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), squares


def batches(first: int = 0, stop: int = SAMPLES) -> list[Any]:
    pairs = [(drawn(k, SAMPLES, WIDTH), drawn(k + 50, SAMPLES, 4)) for k in range(STEPS)]
    return [(x[first:stop], y[first:stop]) for x, y in pairs]


def plain(world: World, kind: str) -> dict[str, Any]:
    """Train on whole batches in plain torch."""
    return plain_steps(made(kind), batches())


def trained(world: World, kind: str, layout: Any, **more: Any) -> dict[str, Any]:
    """Train on this rank's samples; under pp every rank has all, in one micro-batch."""
    if layout == "pp":
        more |= {"sample": batches()[0], "micro_batch": SAMPLES}
        return run_steps(world, made(kind), layout, batches(), **more)
    each = SAMPLES // world.size
    return run_steps(
        world, made(kind), layout, batches(each * world.rank, each * (world.rank + 1)), **more
    )
