"""Training of models whose micro-batches run some blocks only, under any layout."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

import branch_models
import shoal
from guards import Lines, message
from shoal.fabric import World
from shoal.parallel import unit_visits
from shoal.parallel.data_parallel import fsdp

STEPS = 5
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": "full"},
    "written out": {"way": "written out"},
    "adamw": {"optimizer": "adamw", "way": "evaluated"},
}
"""How a model is trained: settings, the loop, the optimizer."""


def squares(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    answer = outputs["logits"] if isinstance(outputs, dict) else outputs
    return (answer - targets) ** 2


def train(
    world: World, layout: Any, kind: str, way: str = "steps", optimizer: str = "sgd", **more: Any
) -> dict[str, Any]:
    """Five steps: losses, norms of gradients, weights after the first and the last, and lines."""
    done: dict[str, Any] = {"losses": [], "norms": [], "weights": [], "joined": 0}
    join = unit_visits.join_unit_forward

    def count(shard: Any) -> None:
        done["joined"] += 1
        join(shard)

    with Lines() as told, mock.patch.object(unit_visits, "join_unit_forward", count):
        done["error"] = message(lambda: _train(world, layout, kind, way, optimizer, more, done))
    return {**done, "lines": told.lines}


def train_uncaught(layout: Any, kind: str) -> dict[str, Any]:
    """The same with a sample, in a process of the caller's own launcher; errors end it."""
    done: dict[str, Any] = {"losses": [], "norms": [], "weights": [], "joined": 0}
    _train(None, layout, kind, "steps", "sgd", {"sampled": True}, done)
    return {**done, "error": "nothing was raised"}


def distance(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Norm of the difference of two sets of weights, by the norm of the second."""
    apart, whole = (
        torch.cat([torch.tensor(values, dtype=torch.float64) for values in weights.values()])
        for weights in (one, other)
    )
    return float((apart - whole).norm() / whole.norm())


def _train(
    world: World | None, layout: Any, kind: str, way: str, optimizer: str, more: Any, done: Any
) -> None:
    if more.pop("sampled", False):
        inputs, targets = zip(*branch_models.samples(2), strict=True)
        inputs = {key: torch.stack([one[key] for one in inputs]) for key in inputs[0]}
        more["sample"] = (inputs, torch.stack(targets))

    def make(parameters: Any) -> torch.optim.Optimizer:
        if optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)

    run = shoal.parallelize(
        branch_models.build(kind), make, squares, layout, world=world, precision="fp64",
        call="kwargs", batch=16, micro_batch=2, seed=3, **more,
    )  # fmt: skip
    loader = run.loader(branch_models.samples())
    while run.step_count < STEPS:
        for batch in loader:
            if way == "written out":
                for micro in run.micro_batches(batch):
                    values = squares(run.model(**micro.inputs), micro.targets)
                    run.backward(values.sum(), values.numel())
                result = run.update()
            else:
                result = run.step(batch)
            done["losses"].append(result.loss)
            done["norms"].append(result.grad_norm)
            if run.step_count in (1, STEPS):
                state = run.state_dict().items()
                done["weights"].append({name: t.flatten().tolist() for name, t in state})
            if run.step_count == STEPS:
                break
    if way == "evaluated":
        done["losses"].append(run.evaluate(run.loader(branch_models.samples(12)))["loss"])


def backwards(world: World, layout: Any) -> dict[str, Any]:
    """A model whose step 3 runs its blocks in another order, on all ranks."""
    torch.manual_seed(0)
    model = branch_models.OrderByInput().double()
    run = shoal.parallelize(
        model, lambda p: torch.optim.SGD(p, lr=0.02), squares, layout, world=world,
        precision="fp64", call="kwargs",
    )  # fmt: skip
    rows = branch_models.samples(8)[4 * world.rank : 4 * world.rank + 4]
    inputs, targets = zip(*rows, strict=True)
    x = torch.stack([one["x"] for one in inputs])

    def steps() -> None:
        for step in range(4):
            run.step(({"x": x, "task": torch.full((4,), int(step == 2))}, torch.stack(targets)))

    return {"error": message(steps), "steps": run.step_count}


def collectives(world: World, layout: Any, reverse: bool) -> dict[str, Any]:
    """A model that skips nothing, with and without visits: gathers and sums of units by step.

    reverse   blocks are registered in another order than they run in
    """
    counts = {}
    for watched in ("with visits", "without"):
        patched = mock.patch.object(fsdp, "make_unit_visits", return_value=None)
        with patched if watched == "without" else nullcontext():
            counts[watched] = _count(world, layout, reverse)
    return counts


class _Chain(nn.Module):
    """Blocks in a row, which may be registered from the last to the first."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(branch_models.Block() for _ in range(3))
        self.out, self.reverse = nn.Linear(branch_models.WIDE, 3), reverse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks) if self.reverse else self.blocks:
            x = x + block(x)
        return self.out(x)


def _count(world: World, layout: Any, reverse: bool) -> list[list[int]]:
    torch.manual_seed(0)
    run = shoal.parallelize(
        _Chain(reverse).double(), lambda p: torch.optim.SGD(p, lr=0.02), squares, layout,
        world=world, precision="fp64", batch=8, micro_batch=2,
    )  # fmt: skip
    dataset = [(one["x"], targets) for one, targets in branch_models.samples(32)]
    counts = []
    for batch in run.loader(dataset):
        before = [calls.count for calls in run.program.unit_log.calls]
        run.step(batch)
        after = [calls.count for calls in run.program.unit_log.calls]
        counts.append([now - then for now, then in zip(after, before, strict=True)])
    return counts
