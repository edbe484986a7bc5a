"""Batches with lists of samples, graphs and shared tensors: on ranks, and in plain torch.

Ranks have 5 and 3 samples in a step, then 8 and none, and cut them into micro-batches of 2. Images
have three channels, so that a rank's three of them fit as three samples and as three columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from batch_steps import Made, plain_steps, run_steps
from shoal.fabric import World

SHARES = [[(0, 5), (5, 8)], [(0, 8), (8, 8)], [(0, 4), (4, 8)], [(0, 3), (3, 8)]]
"""Bounds of the two ranks' samples in each step of 8."""
EMPTY_FIRST = [SHARES[1], *SHARES[:1]]


class Block(nn.Module):
    """A residual MLP, as tensor parallelism splits it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Features [sample, 6] of any inputs, then four blocks and a head."""

    def __init__(self, features: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.head(self.layers(self.features(inputs)))


class Graph:
    """A graph as PyTorch Geometric's Data has it; len() of one is the number of its keys."""

    def __init__(self, **values: torch.Tensor) -> None:
        self.__dict__.update(values)

    def __len__(self) -> int:
        return len(vars(self))

    def apply(self, function: Callable[[Any], Any]) -> Graph:
        for name, value in vars(self).items():
            vars(self)[name] = function(value) if isinstance(value, torch.Tensor) else value
        return self


class GraphBatch(Graph):
    """Several graphs as one with nodes in a row, whose slices are lists of graphs."""

    @classmethod
    def from_data_list(cls, graphs: list[Graph]) -> GraphBatch:
        counts = [len(one.x) for one in graphs]
        firsts = [sum(counts[:n]) for n in range(len(counts))]
        made = cls(
            x=torch.cat([one.x for one in graphs]),
            edges=torch.cat(
                [one.edges + first for one, first in zip(graphs, firsts, strict=True)], 1
            ),
            y=torch.cat([one.y for one in graphs]),
            batch=torch.arange(len(graphs)).repeat_interleave(torch.tensor(counts)),
        )
        made.__dict__["graphs"] = [copy.copy(one) for one in graphs]
        return made

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, rows: slice) -> list[Graph]:
        return self.graphs[rows]


@dataclass
class Scenes:
    """Samples of a class of the user's, whose slices are of it too."""

    images: list[torch.Tensor]
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice) -> Scenes:
        return Scenes(self.images[rows], self.y[rows])


@dataclass
class Prototypes:
    """Samples, and a table that all of them share: its slices are (inputs, targets)."""

    x: torch.Tensor
    table: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> Any:
        return {"x": self.x[rows], "table": self.table}, self.y[rows]


def drawn(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def images_of(step: int) -> list[torch.Tensor]:
    return [drawn(100 * step + n, 3, 2 + n % 3, 4 - n % 2) for n in range(8)]


def pooled(images: Any) -> torch.Tensor:
    both = [torch.cat([one.mean((1, 2)), one.amax((1, 2))]) for one in images]
    return torch.stack(both)


def boxes_of(step: int, first: int, stop: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"boxes": drawn(7 * step + n, 1 + n % 3, 4), "id": torch.tensor(n)}
        for n in range(first, stop)
    ]


def squares(outputs: torch.Tensor, y: Any) -> Any:
    return (outputs - y).square().sum(), len(y)


def box_squares(outputs: torch.Tensor, targets: Any) -> Any:
    found = [
        (one - each["boxes"]).square().sum() for one, each in zip(outputs, targets, strict=True)
    ]
    return sum(found), sum(len(each["boxes"]) for each in targets)


def graphs_of(step: int, first: int, stop: int) -> list[Graph]:
    return [
        Graph(
            x=drawn(31 * step + n, 2 + n % 2, 6),
            edges=torch.tensor([[0, 1], [1, 0]])[:, : 1 + n % 2],
            y=drawn(41 * step + n, 1, 4),
        )
        for n in range(first, stop)
    ]


def passed(graphs: Any) -> torch.Tensor:
    mixed = graphs.x.index_add(0, graphs.edges[1], graphs.x[graphs.edges[0]])
    return mixed.new_zeros(len(graphs), 6).index_add(0, graphs.batch, mixed)


def batch_of(kind: str, step: int, first: int, stop: int) -> Any:
    """Return the samples first … stop − 1 of a step."""
    x, y, images = (
        drawn(step, 8, 6)[first:stop],
        drawn(step + 50, 8, 4)[first:stop],
        images_of(step),
    )
    images = images[first:stop]
    table, bias = drawn(9, 5, 6), drawn(8, 1, 6)
    if kind == "graphs":
        graphs = graphs_of(step, first, stop)
        return GraphBatch.from_data_list(graphs) if graphs else Scenes([], y)
    return {
        "images": lambda: (images, y),
        "images in a dict": lambda: {"images": images, "y": y},
        "detection": lambda: (images, boxes_of(step, first, stop)),
        "two crops": lambda: [[x, 0.5 * x[:, :3]], y],
        "a class": lambda: Scenes(images, y),
        "a table": lambda: Prototypes(x, table, y),
        "a bias": lambda: {"bias": bias, "x": x, "y": y},
    }[kind]()


FEATURES: dict[str, Callable[[Any], torch.Tensor]] = {
    "images": pooled,
    "images in a dict": lambda batch: pooled(batch["images"]),
    "detection": pooled,
    "two crops": lambda crops: torch.cat([crops[0][:, 3:], crops[0][:, :3] + crops[1]], 1),
    "graphs": passed,
    "a class": lambda scenes: pooled(scenes.images),
    "a table": lambda one: (one["x"] @ one["table"].T).softmax(1) @ one["table"],
    "a bias": lambda one: one["x"] * one["bias"],
}
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "images in a dict": lambda o, batch: squares(o, batch["y"]),
    "detection": box_squares,
    "graphs": lambda o, graphs: squares(o, graphs.y),
    "a class": lambda o, scenes: squares(o, scenes.y),
    "a bias": lambda o, batch: squares(o, batch["y"]),
}


def made(kind: str) -> Made:
    torch.manual_seed(0)
    net = Net(FEATURES[kind]).double()
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), LOSSES.get(kind, squares)


def plain(world: World, kind: str, shares: Any) -> dict[str, Any]:
    """Train on whole batches in plain torch."""
    batches = [batch_of(kind, step, 0, 8) for step in range(len(shares))]
    whole = [one[0:8] if isinstance(one, Prototypes) else one for one in batches]
    return plain_steps(made(kind), whole)


def trained(world: World, kind: str, layout: Any, shares: Any, **more: Any) -> dict[str, Any]:
    """Train on this rank's samples, in micro-batches of 2."""
    if layout in ("tp", "pp"):
        more["sample"] = batch_of(kind, 0, 0, 8)
    whole = layout in ("tp", "pp", "single")
    owns = [(0, 8) if whole else bounds[world.rank] for bounds in shares]
    batches = [batch_of(kind, step, *own) for step, own in enumerate(owns)]
    return run_steps(world, made(kind), layout, batches, **more)
