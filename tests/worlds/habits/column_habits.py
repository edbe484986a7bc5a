"""Habits of batches with further columns: tables of all samples, constants, filters, soft labels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from habits.habit_sides import CLASSES, CUTS, ROWS, Chain, Script, X, Y, net, squares
from habits.habit_table import habit

DRAWN = torch.Generator().manual_seed(50)
TABLE = torch.randn(ROWS, 6, generator=DRAWN, dtype=torch.float64)
LINKS = torch.rand(ROWS, ROWS, generator=DRAWN, dtype=torch.float64)


def mixing(features: Callable[[Any], torch.Tensor]) -> type[nn.Module]:
    """Return a model that makes features of several inputs."""

    class Mixing(Chain):
        def forward(self, inputs: Any) -> torch.Tensor:
            return super().forward(features(inputs))

    return Mixing


def attended(inputs: Any) -> torch.Tensor:
    x, table = inputs
    return (x @ table.T).softmax(1) @ table


def train(script: Script, model: type[nn.Module], batch: Any, **more: Any) -> None:
    """Train three steps by `run.step`."""
    script.train(script.begin(net(model), sample=batch(0), **more), batch=batch)


@habit("loops", sums=True)
def a_table_of_as_many_classes_as_samples(script: Script) -> None:
    """Prototypes [8, 6] beside 8 samples, the same tensor in each step."""

    def batch(step: int) -> Any:
        x, y = script.share(step, X, Y)
        return (x, TABLE), y

    train(script, mixing(attended), batch)


@habit("loops", sums=True)
def a_fresh_table_in_each_step(script: Script) -> None:
    """The collate function stacks it anew, and it changes from step to step."""

    def batch(step: int) -> Any:
        x, y = script.share(step, X, Y)
        return [[x, torch.stack([row * (1 + 0.1 * step) for row in TABLE])], y]

    train(script, mixing(attended), batch)


@habit("loops", sums=True)
def an_adjacency_beside_as_many_samples(script: Script) -> None:
    """[8, 8], which mixes the eight features of a sample."""

    class Wide(Chain):
        def forward(self, inputs: Any) -> torch.Tensor:
            x, links = inputs
            wide = torch.cat([x, x[:, :2]], 1) @ links
            return super().forward(wide[:, :6])

    def batch(step: int) -> Any:
        x, y = script.share(step, X, Y)
        return (x, LINKS), y

    train(script, Wide, batch)


class Graph(Chain):
    """A graph network: every block mixes the rows of the nodes by one adjacency."""

    def forward(self, inputs: Any) -> torch.Tensor:
        x, links = inputs
        for block in self.layers:
            x = block(links @ x)
        return self.head(x)


def graph_batch(script: Script) -> Callable[[int], Any]:
    """Return batches of nodes; ranks with nodes of their own have graphs without links between."""
    bounds = CUTS[script.shares]
    parts = [LINKS[a:b, a:b] / (b - a) for a, b in itertools.pairwise(bounds)]

    def batch(step: int) -> Any:
        x, y = script.share(step, X, Y)
        links = torch.block_diag(*parts) if script.alone else parts[script.own_share]
        return (x, links), y

    return batch


@habit("models", sums=True)
def nodes_of_a_graph_and_their_adjacency(script: Script) -> None:
    """Node features [8, 6] and links [8, 8], in one pass: `A @ x` in every block."""
    batch = graph_batch(script)
    script.train(script.begin(net(Graph), sample=batch(0), micro_batch=None), batch=batch)


@habit("models", sums=False)
def nodes_of_a_graph_in_micro_batches(script: Script) -> None:
    """The same where a micro-batch has two nodes, whose neighbours are in others."""
    train(script, Graph, graph_batch(script))


@habit("loops", sums=True)
def a_prior_over_samples_in_a_dict(script: Script) -> None:
    """A vector [8] of a prior over classes, read by model and loss."""

    class Prior(Chain):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch["x"]) * batch["prior"].exp().mean()

    def batch(step: int) -> Any:
        x, y = script.share(step, X, Y)
        return {"x": x, "y": y, "prior": TABLE[:, 0].clone()}

    train(script, Prior, batch, loss=lambda o, b: squares(o, b["y"]))


@habit("losses", sums=True)
def weights_of_as_many_classes_as_samples(script: Script) -> None:
    """`F.cross_entropy(o, y, weight)` with eight classes and eight samples."""

    class Classifier(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, ROWS)

    def loss(o: Any, targets: Any) -> Any:
        y, weight = targets
        return F.cross_entropy(o, y, weight, reduction="sum"), weight[y].sum()

    def batch(step: int) -> Any:
        x, y = script.share(step, X, (Y[:, 0].abs() * 3).long() % ROWS)
        return x, (y, TABLE[:, 1].exp())

    train(script, Classifier, batch, loss=loss)


@habit("loops", sums=True)
def a_constant_column_of_each_sample(script: Script) -> None:
    """Noise that is drawn once for the eight places of a batch."""

    def batch(step: int) -> Any:
        x, y, noise = script.share(step, X, Y, TABLE.repeat(ROWS, 1))
        return (x, noise), y

    train(script, mixing(lambda inputs: inputs[0] + 0.1 * inputs[1]), batch)


@habit("loops", sums=True)
def rows_filtered_by_a_mask(script: Script) -> None:
    """`x[keep]`: ranks and steps have other numbers of samples."""

    def batch(step: int) -> Any:
        x, y = script.share(step, X, Y)
        keep = x[:, 0] > -0.8
        return x[keep], y[keep]

    train(script, Chain, batch)


@habit("loops", sums=True)
def a_step_that_a_filter_empties_on_one_rank(script: Script) -> None:
    """Rank 0 alone keeps samples in the second step."""

    def batch(step: int) -> Any:
        x, y = script.share(step, X, Y)
        if step == 1 and script.shares > 1:
            keep = CUTS[script.shares][1] if script.own_share == 0 else 0
            return x[:keep], y[:keep]
        return x, y

    train(script, Chain, batch)


@habit("loops", sums=True)
def features_pooled_by_a_mask_of_padding(script: Script) -> None:
    """Tokens of a sample, and a mask [batch, tokens] whose means are by sample."""

    def pooled(batch: Any) -> torch.Tensor:
        mask = batch["mask"][..., None]
        return (batch["tokens"] * mask).sum(1) / mask.sum(1)

    def batch(step: int) -> Any:
        x, y = script.share(step, X, Y)
        mask = torch.ones(len(x), 3).double()
        mask[:, 1:] = (x[:, :2] > 0).double()
        return {"tokens": torch.stack([x, 0.5 * x, x.square()], 1), "mask": mask, "y": y}

    train(script, mixing(pooled), batch, loss=lambda o, b: squares(o, b["y"]))


@habit("losses", sums=True)
def labels_smoothed_by_hand(script: Script) -> None:
    """One-hot labels, mixed with a uniform share."""

    def loss(o: Any, soft: Any) -> Any:
        return -(soft * o.log_softmax(1)).sum(), len(soft)

    def batch(step: int) -> Any:
        x, y = script.share(step, X, CLASSES)
        return x, F.one_hot(y, 3).double() * 0.9 + 0.1 / 3

    train(script, Chain, batch, loss=loss)


@habit("losses", sums=False)
def samples_mixed_inside_of_the_model(script: Script) -> None:
    """Manifold mixup: hidden features with those of the batch in another order."""

    class Mixed(Chain):
        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            return self.head(0.7 * hidden + 0.3 * hidden.flip(0))

    train(script, Mixed, script.batch)
