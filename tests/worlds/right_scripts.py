"""Right scripts that look like mistakes: guards must stay silent, and numbers equal plain PyTorch's.

    @right("ddp", "fsdp")            the layouts under which every rank runs it as its script would
    def what_the_script_does(world, layout): ...

A function returns the largest difference to plain PyTorch in one process over all ranks' samples, in
float64. `attempt` collects errors and notices: a control has neither. Add yours below.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import shoal
from guards import Lines
from shoal.base.errors import ShoalError
from shoal.fabric import World

DRAWN = torch.Generator().manual_seed(5)
X = torch.randn(64, 6, generator=DRAWN, dtype=torch.float64)
Y = torch.randn(64, 3, generator=DRAWN, dtype=torch.float64)
ROWS = 4
"""Samples of a rank and step."""
USUAL = ("on 2 cores", "processes compute on", "layout.strategy = auto")
"""Parts of lines about the machine, which say nothing of the script."""


@dataclass(frozen=True)
class Control:
    """One of them. act  the script · layouts  under which it runs · ranks  it needs"""

    act: Callable[[World, str], float]
    layouts: tuple[Any, ...]
    ranks: int


TABLE: dict[str, Control] = {}


def right(*layouts: Any, ranks: int = 2):
    """Put a script into the table."""

    def mark(act: Callable[[World, Any], float]) -> Callable[[World, Any], float]:
        TABLE[act.__name__] = Control(act, layouts, ranks)
        return act

    return mark


def attempt(world: World, name: str, layout: Any) -> dict[str, Any]:
    """Run a script and return its error, the lines that guards wrote, and its difference."""
    error, value = "", None
    with Lines() as heard:
        try:
            value = TABLE[name].act(world, layout)
        except ShoalError as failure:
            error = f"{type(failure).__name__}: {failure}"
    lines = [line for line in heard.lines if not any(part in line for part in USUAL)]
    return {"error": error, "lines": lines, "value": value}


# ---- what the scripts share


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs - targets).square().sum(), len(targets)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Net(nn.Module):
    """A trunk of blocks, and heads of which each pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)) for _ in "ab")
        self.head, self.skipped = 0, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for place, block in enumerate(self.trunk):
            if place != self.skipped:
                x = x + block(x)
        return self.heads[self.head](x)


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def share(world: World, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's samples of a step."""
    first = (step * world.size + world.rank) * ROWS % 64
    return X[first : first + ROWS], Y[first : first + ROWS]


def parts(world: World, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the samples of a step, a part for each rank."""
    firsts = [(step * world.size + rank) * ROWS % 64 for rank in range(world.size)]
    return [(X[first : first + ROWS], Y[first : first + ROWS]) for first in firsts]


def begin(world: World, layout: Any, model: nn.Module, optimizer: Any = sgd, **more: Any) -> Any:
    if layout in ("tp", "pp") or isinstance(layout, dict):
        more.setdefault("sample", (X[:ROWS], Y[:ROWS]))
    loss = more.pop("loss", squares)
    return shoal.parallelize(model, optimizer, loss, layout, world=world, precision="fp64", **more)


Around = Callable[[nn.Module, int, int], None]
"""Prepares a model for the pass of (step, rank)."""


def compared(
    world: World,
    layout: Any,
    around: Around = lambda model, step, rank: None,
    *,
    steps: int = 4,
    build: Callable[[], nn.Module] = net,
    optimizer: Any = sgd,
    between: Callable[[Any, int], None] = lambda run, step: None,
    **more: Any,
) -> float:
    """Train by `run.step` and in plain PyTorch, and return the weights' largest difference."""
    model = build()
    run = begin(world, layout, model, optimizer, **more)
    for step in range(steps):
        around(run.model, step, world.rank)
        run.step(share(world, step))
        between(run, step)
    return difference(run, plain(world, around, steps, build, optimizer))


def plain(
    world: World, around: Around, steps: int, build: Callable[[], nn.Module], optimizer: Any = sgd
) -> nn.Module:
    """Train in one process: each rank's part is a pass of its own, their mean is one step."""
    model = build()
    made = optimizer(p for p in model.parameters() if p.requires_grad)
    for step in range(steps):
        made.zero_grad()
        count = world.size * ROWS
        for rank, (inputs, targets) in enumerate(parts(world, step)):
            around(model, step, rank)
            (squares(model(inputs), targets)[0] / count).backward()
        made.step()
    return model


def difference(run: Any, model: nn.Module) -> float:
    """Return the largest difference between a run's weights and a plain model's."""
    got, wanted = run.state_dict(), model.state_dict()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)


# ---- parts of a model that rest


@right("ddp", "zero2", "fsdp")
def a_head_rests_for_20_steps(world: World, layout: str) -> float:
    return compared(world, layout, steps=20)


def own_head(model: nn.Module, step: int, rank: int) -> None:
    model.head = (step + rank) % 2


@right("ddp", "zero1", "zero2")
def ranks_use_different_heads(world: World, layout: str) -> float:
    return compared(world, layout, own_head)


@right("fsdp")
def all_ranks_change_heads_together(world: World, layout: str) -> float:
    return compared(world, layout, lambda model, step, rank: setattr(model, "head", step % 2))


@right("ddp", "zero2")
def layerdrop_by_rank(world: World, layout: str) -> float:
    def drop(model: nn.Module, step: int, rank: int) -> None:
        model.skipped = random.Random(10 * step + rank).randrange(-1, 3)

    return compared(world, layout, drop, steps=6)


@right("fsdp")
def layerdrop_alike_on_all_ranks(world: World, layout: str) -> float:
    def drop(model: nn.Module, step: int, rank: int) -> None:
        model.skipped = step % 4 - 1

    return compared(world, layout, drop)


class Mixture(nn.Module):
    """A router over a list of experts, of which one gets no token for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.router, self.out = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        mixed = x
        for place, expert in enumerate(self.experts[:2]):
            rows = chosen == place
            if rows.any():
                mixed = mixed.index_add(
                    0, rows.nonzero()[:, 0], expert(x[rows]) * weights[rows, place : place + 1]
                )
        return self.out(mixed)


@right("ddp", "zero2")
def experts_rest_for_20_steps(world: World, layout: str) -> float:
    return compared(world, layout, steps=20, build=lambda: net(Mixture))


class Pooled(Net):
    """A model with a pooler that no pass asks, as transformers' encoders have."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(3, 3)


@right("ddp", "zero2", "fsdp")
def an_unused_pooler(world: World, layout: str) -> float:
    return compared(world, layout, build=lambda: net(Pooled))


def frozen_trunk() -> nn.Module:
    model = net()
    model.trunk.requires_grad_(False)
    return model


@right("ddp", "zero2", "fsdp")
def a_frozen_tower(world: World, layout: str) -> float:
    return compared(world, layout, build=frozen_trunk)


def of_heads(parameters: Any) -> torch.optim.Optimizer:
    return sgd(list(parameters)[-8:])


@right("ddp", "fsdp")
def an_optimizer_over_the_head_alone(world: World, layout: str) -> float:
    return compared(world, layout, optimizer=of_heads)


# ---- what a script may do around a step


@right("ddp", "fsdp")
def zero_grad_before_and_after_a_step(world: World, layout: str) -> float:
    model = net()
    optimizer = sgd(model.parameters())
    run = begin(world, layout, model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        run.forward_backward(share(world, step))
        run.update()
        run.model.zero_grad()
    return difference(run, plain(world, lambda *_: None, 4, net))


def by_groups(parameters: Any) -> torch.optim.Optimizer:
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)


@right("zero2", "fsdp")
def groups_whose_rates_all_ranks_change(world: World, layout: str) -> float:
    model, alone = net(), net()
    found = []
    for one in (model, alone):
        optimizer = by_groups(one.parameters())
        found.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)))
    run = begin(world, layout, model, found[0][0])
    for step in range(4):
        run.step(share(world, step))
        found[0][1].step()
        for inputs, targets in parts(world, step):
            (squares(alone(inputs), targets)[0] / (world.size * ROWS)).backward()
        found[1][0].step()
        found[1][0].zero_grad()
        found[1][1].step()
    return difference(run, alone)


@right("ddp")
def a_rate_in_a_tensor(world: World, layout: str) -> float:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False)

    return compared(world, layout, optimizer=adam)


@right("ddp", "fsdp")
def norms_are_logged_in_written_out_passes(world: World, layout: str) -> float:
    run = begin(world, layout, net())
    for step in range(4):
        for micro in run.micro_batches(share(world, step)):
            total, count = squares(run.model(micro.inputs), micro.targets)
            run.backward(total, count)
            [float(p.grad.norm()) for p in run.model.parameters() if p.grad is not None]
        run.update()
    return difference(run, plain(world, lambda *_: None, 4, net))


@right("ddp")
def an_average_of_weights_beside_the_run(world: World, layout: str) -> float:
    kept: list[nn.Module] = []

    def average(run: Any, step: int) -> None:
        if not kept:
            kept.append(copy.deepcopy(run.model))
        with torch.no_grad():
            for mean, now in zip(kept[0].parameters(), run.model.parameters(), strict=True):
                mean.lerp_(now, 0.1)

    return compared(world, layout, between=average)


@right("fsdp")
def a_validation_takes_another_head(world: World, layout: str) -> float:
    def validate(run: Any, step: int) -> None:
        run.model.head = 1
        run.evaluate(TensorDataset(X[:6], Y[:6]))
        run.model.head = 0

    return compared(world, layout, between=validate)


@right("ddp")
def two_runs_in_one_process(world: World, layout: str) -> float:
    first, second = begin(world, layout, net()), begin(world, layout, net(Pooled))
    for step in range(4):
        first.step(share(world, step))
        second.step(share(world, step))
    ours = difference(first, plain(world, lambda *_: None, 4, net))
    return max(ours, difference(second, plain(world, lambda *_: None, 4, lambda: net(Pooled))))


@right("ddp", "fsdp")
def a_rank_without_samples(world: World, layout: str) -> float:
    run = begin(world, layout, net(), batch=8, micro_batch=4)
    for batch in run.loader(TensorDataset(X[:20], Y[:20])):  # the last step: one micro-batch
        run.step(batch)
    return 0.0  # numbers: tests/worlds/layouts/test_equality.py; here only silence is held


# ---- models


class Recomputed(Net):
    """Blocks under a checkpoint of the user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.trunk:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.heads[0](x)


@right("ddp", "fsdp")
def a_checkpoint_of_ones_own(world: World, layout: str) -> float:
    return compared(world, layout, build=lambda: net(Recomputed))


class Tied(Net):
    """Two layers around the trunk share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.after.weight = self.before.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(self.into(x))
        for block in self.trunk:
            x = x + block(x)
        return self.heads[0](self.after(x))


@right("ddp", "zero2", "fsdp")
def tied_weights(world: World, layout: str) -> float:
    return compared(world, layout, build=lambda: net(Tied))


class Normed(nn.Module):
    """Norms that look at one sample, and a batch norm that was put into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.group, self.batch = nn.GroupNorm(2, 8), nn.BatchNorm1d(8)
        self.batch.eval()
        self.batch.train = lambda mode=True: self.batch  # as frozen backbones do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.batch(self.group(self.into(x))))


@right("ddp")
def norms_that_no_micro_batch_changes(world: World, layout: str) -> float:
    run = begin(world, layout, net(Normed), batch=16)
    for batch in run.loader(TensorDataset(X, Y)):
        run.step(batch)
    return 0.0  # silence is held here


@right("ddp")
def a_batch_norm_with_a_given_micro_batch(world: World, layout: str) -> float:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    run = begin(world, layout, model.double(), batch=16, micro_batch=4)
    for batch in run.loader(TensorDataset(X, Y)):
        run.step(batch)
    return 0.0  # silence is held here


@right("ddp", "fsdp")
def own_clipping_by_the_run(world: World, layout: str) -> float:
    model, alone = net(), net()
    run, made = begin(world, layout, model, clip=0.5), sgd(alone.parameters())
    for step in range(4):
        run.step(share(world, step))
        made.zero_grad()
        for inputs, targets in parts(world, step):
            (squares(alone(inputs), targets)[0] / (world.size * ROWS)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        made.step()
    return difference(run, alone)


@right("ddp", "fsdp")
def a_slow_first_batch(world: World, layout: str, wait_s: float = 4.0) -> float:
    def wait(model: nn.Module, step: int, rank: int) -> None:
        if step == 0 and rank == 1 == world.rank:
            time.sleep(wait_s)

    return compared(world, layout, wait, steps=2)


# ---- four ranks


@right({"pp": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}, "hsdp", ranks=4)
def groups_that_gather_different_blocks(world: World, layout: Any) -> float:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(x)))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Mlp() for _ in range(4)), nn.Linear(6, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    run = begin(world, layout, net(Chain), batch=16, micro_batch=4)
    for batch in run.loader(TensorDataset(X, Y)):
        run.step(batch)
    return 0.0  # numbers: tests/worlds/layouts/test_equality.py; here only silence is held
