"""Batches with a tensor that all samples share and that has as many rows as there are samples.

Under tp, pp and in one process a batch has 8 samples, and the tensor 8 rows. Under ddp a rank has 4
samples in the first step, and the tensor 4 rows; later it has 5 or 3. Micro-batches have 2 samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from batch_steps import Made, plain_steps, run_steps
from sample_lists_case import Block, drawn, squares
from shoal.fabric import World
from shoal.trainer.guards import model_checks

SHARES = [[(0, 4), (4, 8)], [(0, 5), (5, 8)], [(0, 3), (3, 8)]]
"""Bounds of the two ranks' samples in each step of 8, under ddp."""


class Net(nn.Module):
    """Features [sample, 6] of any inputs, two blocks and a head; then a function of the inputs."""

    def __init__(self, features: Callable[[Any], torch.Tensor], outputs: int, last: Any) -> None:
        super().__init__()
        self.features, self.last = features, last
        self.layers = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(6, outputs)

    def forward(self, inputs: Any) -> torch.Tensor:
        out = self.head(self.layers(self.features(inputs)))
        return out if self.last is None else self.last(out, inputs)


class ByName(Net):
    """The same, with its inputs by name."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return super().forward((x, table))


def attended(inputs: Any) -> torch.Tensor:
    x, table = inputs
    return (x @ table.T).softmax(1) @ table


def scores(out: torch.Tensor, inputs: Any) -> torch.Tensor:
    return out @ inputs[1].T


def weighted(outputs: torch.Tensor, targets: Any) -> Any:
    y, weights = targets
    scores = outputs[:, : len(weights)]
    return F.cross_entropy(scores, y, weights, reduction="sum"), weights[y].sum()


def classes(outputs: torch.Tensor, y: Any) -> Any:
    return F.cross_entropy(outputs, y, reduction="sum"), len(y)


Make = Callable[[], tuple[nn.Module, Any]]
MAKERS: dict[str, Make] = {
    "a table": lambda: (Net(attended, 4, None), squares),
    "a table in a list": lambda: (Net(attended, 4, None), squares),
    "a table by name": lambda: (ByName(attended, 4, None), squares),
    "class scores": lambda: (Net(lambda i: i[0], 6, scores), classes),
    "class weights": lambda: (Net(lambda x: x, 8, None), weighted),
    "a prior in a dict": lambda: (
        Net(lambda b: b["x"] * b["prior"].softmax(0).max() + b["prior"].mean(), 4, None),
        lambda o, b: squares(o, b["y"]),
    ),
    "an adjacency": lambda: (
        Net(lambda i: (i[0] * 0.5 + i[1].sum() * i[0]) / len(i[1]), 4, None),
        squares,
    ),
    "noise by sample": lambda: (Net(lambda i: i[0] + i[1], 4, None), squares),
}


def batch_of(kind: str, step: int, first: int, stop: int, rows: int) -> Any:
    """Return the samples first … stop − 1 of a step, and a tensor of some rows."""
    x, y = drawn(step, 8, 6)[first:stop], drawn(step + 50, 8, 4)[first:stop]
    table, labels = drawn(9, rows, 6), (y[:, 0] * 100).long().abs() % rows
    if kind == "noise by sample":
        table = drawn(9, 8, 6)[first:stop]
    return {
        "a table in a list": lambda: ([x, table], y),
        "a table by name": lambda: ({"x": x, "table": table}, y),
        "class scores": lambda: ((x, table), labels),
        "class weights": lambda: (x, (labels, table[:, 0].exp())),
        "a prior in a dict": lambda: {"x": x, "prior": table[:, 1].clone(), "y": y},
        "an adjacency": lambda: ((x, drawn(9, rows, rows)), y),
    }.get(kind, lambda: ((x, table), y))()


def made(kind: str) -> Made:
    torch.manual_seed(0)
    net, loss = MAKERS[kind]()
    net = net.double()
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), loss


def plain(world: World, kind: str, rows: int = 8) -> dict[str, Any]:
    """Train on whole batches in plain torch."""
    batches = [batch_of(kind, step, 0, 8, rows) for step in range(len(SHARES))]
    return plain_steps(made(kind), batches, by_name=kind == "a table by name")


def trained(
    world: World, kind: str, layout: str, *, is_large: bool = False, written: bool = False
) -> dict[str, Any]:
    """Train on this rank's samples, in micro-batches of 2.

    Args:
        is_large: the model is too large for a trial of its copy.
        written: the loop writes out the passes.
    """
    whole, more = layout in ("tp", "pp", "single"), dict[str, Any]()
    if layout in ("tp", "pp"):
        more["sample"] = batch_of(kind, 0, 0, 8, 8)
    if kind == "a table by name":
        more["call"] = "kwargs"
    owns = [(0, 8) if whole else bounds[world.rank] for bounds in SHARES]
    batches = [batch_of(kind, step, *own, 8 if whole else 4) for step, own in enumerate(owns)]
    largest = model_checks.LARGE
    model_checks.LARGE = 0 if is_large else largest
    try:
        return run_steps(world, made(kind), layout, batches, written=written, **more)
    finally:
        model_checks.LARGE = largest
