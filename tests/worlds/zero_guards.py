"""Checks inside a world of processes: what sharded layouts refuse, and what they must get right."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from guards import INPUTS, TARGETS, linear, message, run_of, sgd, share, squares
from shoal.fabric import World
from shoal.optim.muon import MuonWithAdamW
from shoal.parallel.build.full_state import assemble_tensors, gather_weights


class Rows:
    """The first samples of what all checks share."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return INPUTS[index], TARGETS[index]


class Layer(nn.Module):
    """A block: layers inside, as fsdp wants a unit."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Blocks, then a head."""

    def __init__(self, layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shared(Stack):
    """The first and the last block have one weight; the middle one has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner.weight = self.blocks[0].inner.weight


class View(nn.Module):
    """A block whose output is a view, as a linear layer of three dims gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class AddsInPlace(nn.Module):
    """Writes into what its blocks returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(View() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1).expand(-1, 3, -1)
        for block in self.blocks:
            y = block(x)
            y += x
            x = torch.tanh(y)
        return self.head(x).mean(1)


class Scaled(nn.Module):
    """A temperature without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Empty(nn.Module):
    """A table of no rows, as a configuration leaves one behind (DINOv3's register tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.registers = nn.Parameter(torch.empty(1, 0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.registers.expand(x.shape[0], -1, -1), x.unsqueeze(1)], dim=1)
        return self.layer(rows)[:, 0]


def refusals(world: World) -> list[str]:
    """Two formats, and an optimizer of whole matrices under fsdp."""
    mixed = linear()
    mixed[2].to(torch.float64)

    def muon(parameters: Any) -> torch.optim.Optimizer:
        return MuonWithAdamW(parameters, lr=0.1)

    return [
        message(lambda: run_of(world, mixed, layout="fsdp", precision="fp32")),
        message(lambda: run_of(world, linear(), muon, layout="fsdp")),
    ]


def trains_a_scalar(world: World, layout: str) -> str:
    """A parameter without rows, under layouts that cut rows and one that does not."""
    return message(lambda: run_of(world, Scaled(), layout=layout).step(share(world)))


def trains_with_nothing(world: World, layout: str, folder: str) -> list[list[float]]:
    """Weights after a step, a save, a restore and another step; one parameter has no element."""
    for step in (0, 1):
        torch.manual_seed(3)
        run = run_of(world, Empty(), layout=layout, precision="fp64", folder=folder)
        assert run.restore() == bool(step)
        run.step(share(world))
        run.save()
        weights = run.state_dict()
        if run.lease is not None:  # a closed run would end the world, which other checks need
            run.lease.release()
    return [weights[name].flatten().tolist() for name in sorted(weights)] if world.is_first else []


class Named(Stack):
    """Takes its inputs by name, and something else."""

    def forward(self, x: torch.Tensor, extra: object = None) -> torch.Tensor:
        return super().forward(x)


def first_step_without_samples(world: World, layout: str, kind: str = "pair") -> Any:
    """One micro-batch for all ranks, the others never had one: off by how much from plain PyTorch?"""
    model = Named().double()
    twin = copy.deepcopy(model)
    extra = {"extra": object()} if kind == "own class" else {"extra": (1, "text", None)}

    def by_name(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        x, y = (torch.stack(one).double() for one in zip(*rows, strict=True))
        return (x, y) if kind == "pair" else ({"x": x, **extra}, y)

    run = run_of(
        world,
        model,
        layout={"dp_replicate": 2, "dp_shard": 2} if layout == "hsdp" else layout,
        precision="fp64",
        batch=4 * world.size,
        micro_batch=2,
        call="single" if kind == "pair" else "kwargs",
    )
    found = message(lambda: [run.step(batch) for batch in run.loader(Rows(2), collate=by_name)])
    if found != "nothing was raised":
        return found
    plain = sgd(twin.parameters())
    squares(twin(INPUTS[:2].double()), TARGETS[:2].double()).mean().backward()
    plain.step()
    weights = gather_weights(run.program)
    return max(float((weights[n] - p).detach().abs().max()) for n, p in twin.named_parameters())


def whole_gradients(run: Any) -> dict[str, torch.Tensor]:
    """Gather every rank's parts of the gradients."""
    local = run.program.local.items()
    parts = {name: (one.parameter.grad.detach(), one.shard) for name, one in local}
    return assemble_tensors(parts, run.program.world)


def gradients_after_a_step(world: World, layout: str) -> dict[str, Any]:
    """Which `.grad` a user finds, and whether the parts hold the sum of everybody's."""
    model = Stack()
    twin = copy.deepcopy(model)
    run = run_of(world, model, layout=layout)
    x, y = share(world)
    run.step((x, y))
    rows = 4 * world.size
    (squares(twin(INPUTS[:rows]), TARGETS[:rows]).sum() / (2 * rows)).backward()
    found = whole_gradients(run)
    return {
        "none": [p.grad is None or hasattr(p.grad, "stands_for") for p in model.parameters()],
        "parts": sum(p.shard.elements for p in run.program.local.values()),
        "elements": run.plan.parameters,
        "apart": max(float((found[n] - p.grad).abs().max()) for n, p in twin.named_parameters()),
    }


def apart(world: World, model: nn.Module, layout: str, steps: int = 2) -> float:
    """Largest difference of a weight from plain PyTorch's, after some steps in float64."""
    model = model.double()
    twin = copy.deepcopy(model)
    run = run_of(world, model, layout=layout, precision="fp64")
    plain = sgd(twin.parameters())
    rows = 4 * world.size
    x, y = INPUTS[:rows].double(), TARGETS[:rows].double()
    mine = slice(world.rank * 4, world.rank * 4 + 4)
    for _ in range(steps):
        run.step((x[mine], y[mine]))
        plain.zero_grad()
        squares(twin(x), y).mean().backward()
        plain.step()
    weights = gather_weights(run.program)
    return max(float((weights[n] - p.detach()).abs().max()) for n, p in twin.named_parameters())


def shared_over_blocks(world: World) -> float:
    return apart(world, Shared(), "fsdp")


def written_in_place(world: World) -> float:
    return apart(world, AddsInPlace(), "fsdp")


def few_rows(world: World) -> float:
    """The head has two rows: on four ranks, two hold nothing of it."""
    return apart(world, Stack(), "fsdp")


def short_steps(world: World, layout: str, defer_sync: bool = False) -> dict[str, Any]:
    """An epoch whose last step has one micro-batch, twice; then what the weights are."""
    model = Stack().double()
    run = run_of(
        world, model, layout=layout, batch=8, micro_batch=1, precision="fp64",
        defer_sync=defer_sync,
    )  # fmt: skip
    told, own = [], []
    for _ in range(2):
        for batch in run.loader(Doubles(9)):
            own.append(len(batch.micro_batches))
            told.append(run.step(batch).loss)
    weights = {n: w.flatten().tolist() for n, w in gather_weights(run.program).items()}
    return {"losses": told, "own": own, "weights": weights}


class Doubles(Rows):
    """The same samples in float64."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x.double(), y.double()


def evaluation(world: World, layout: str, samples: int) -> dict[str, float] | str:
    """Means over samples that ranks hold in unequal numbers, between two steps of training."""
    run = run_of(world, Stack(), layout=layout, batch=24, micro_batch=2, precision="fp64")
    x, y = INPUTS.double(), TARGETS.double()
    share_of = slice(world.rank * 24 // world.size, (world.rank + 1) * 24 // world.size)
    run.step((x[share_of], y[share_of]))
    values: dict[str, Any] = {}

    def look() -> None:
        values.update(run.evaluate(Doubles(samples), {"bias": lambda o, t: o - t}))

    refused = message(look)
    if not values:
        return refused
    values["after"] = run.step((x[share_of], y[share_of])).loss
    return values


def frozen_stays(world: World, layout: str) -> dict[str, Any]:
    """A frozen layer inside of what is sharded, with weight decay on all else."""
    model = Stack()
    model.blocks[1].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def decaying(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)

    run = run_of(world, model, decaying, layout=layout)
    for _ in range(2):
        run.step(share(world))
    weights = gather_weights(run.program)
    still = [n for n, w in weights.items() if torch.equal(w, before[n])]
    model.head.bias.requires_grad_(True)
    return {"still": still, "later": message(lambda: run.step(share(world)))}


def channels_last(world: World, layout: str) -> list[float]:
    """Three fused AdamW steps on weights in channels_last order, against plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 2)
    ).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    run = run_of(world, model, adamw, layout=layout)
    plain = adamw(twin.parameters())
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    rows = 8 // world.size
    mine = slice(world.rank * rows, (world.rank + 1) * rows)
    for _ in range(3):
        run.step((images[mine], TARGETS[:8][mine]))
        plain.zero_grad()
        F.mse_loss(twin(images), TARGETS[:8]).backward()
        plain.step()
    weights, gradients = gather_weights(run.program), whole_gradients(run)
    apart = []
    for name, p in twin.named_parameters():
        apart.append(float((weights[name] - p.detach()).abs().max()))
        apart.append(float((gradients[name] - p.grad).abs().max()))
    return apart
