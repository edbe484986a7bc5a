"""Ranks that run different blocks under layouts that gather them, or step by other settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from guards import Lines, message
from shoal.fabric import World

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X[:, :3] * 2


class Block(nn.Module):
    def __init__(self, out: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Net(nn.Module):
    """A trunk and two heads; `kind` says what a micro-batch of task 1 runs otherwise than one of 0.

    heads in the loss   the loss calls the head, after the model's pass is over
    reentrant   each drops another block, and torch's old checkpoints run blocks in the backward pass
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.trunk = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"a": Block(3), "b": Block(3)})

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        other = bool(task[0])
        layers = [0, 1, 2]
        if self.kind in ("layer drop", "reentrant"):  # each drops one, not the same
            layers.remove(1 + other)
        if self.kind == "order" and other:
            layers = [1, 0, 2]
        if self.kind == "experts":  # all tokens of this rank go to one of two
            layers = [0, 1 + other]
        for layer in layers:
            if self.kind == "reentrant":
                x = x if x.requires_grad else x.requires_grad_()
                x = x + checkpoint(self.trunk[layer], x, use_reentrant=True)
            else:
                x = x + self.trunk[layer](x)
        if self.kind == "heads in the loss":
            return x
        return self.heads["b" if other and self.kind in ("heads", "groups") else "a"](x)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets) ** 2


def blocks(
    world: World, layout: Any, kind: str, way: str = "batches", tasks: str = "ranks", **more: Any
) -> dict[str, Any]:
    """Three steps: what was raised, told, and the losses.

    tasks   "ranks": each other rank has the other one · "halves": the second half of the ranks has
            it · "one": nobody has
    """
    torch.manual_seed(0)
    model = Net(kind).double()
    if kind == "groups":
        model.heads.requires_grad_(False)
    losses: list[float] = []
    rank, size = world.rank, world.size
    one = {"ranks": rank % 2, "halves": int(rank >= size // 2), "one": 0}[tasks]
    with Lines() as told:
        error = message(lambda: _steps(world, layout, model, way, one, losses, more))
    return {"error": error, "lines": told.lines, "losses": losses}


def _steps(
    world: World, layout: Any, model: nn.Module, way: str, task: int, losses: list[float], more: Any
) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        late = model.kind == "heads in the loss"
        return squares(model.heads["ab"[task]](outputs) if late else outputs, targets)

    run = shoal.parallelize(
        model, torch.optim.SGD(trained, lr=0.1), loss, layout, world=world, precision="fp64",
        call="kwargs", **more,
    )  # fmt: skip
    for step in range(3):
        rows = slice((step * world.size + world.rank) * 4, (step * world.size + world.rank) * 4 + 4)
        inputs = {"x": X[rows], "task": torch.full((4,), task)}
        if way == "evaluation":
            losses.append(run.evaluate([(inputs, Y[rows])])["loss"])
            inputs["task"] = torch.zeros(4)
        if way == "own passes":
            for micro in run.micro_batches((inputs, Y[rows])):
                run.backward(squares(run.model(**micro.inputs), micro.targets).sum(), 12)
            losses.append(run.update().loss)
        else:
            losses.append(run.step((inputs, Y[rows])).loss)


def no_samples(world: World, layout: Any) -> dict[str, Any]:
    """An epoch of three micro-batches on two ranks, twice: one rank only joins."""
    run = shoal.parallelize(
        Net("heads").double(), lambda p: torch.optim.SGD(p, lr=0.1), squares, layout, world=world,
        precision="fp64", call="kwargs", batch=8, micro_batch=4,
    )  # fmt: skip
    data = [({"x": x, "task": torch.tensor(0)}, y) for x, y in zip(X[:12], Y[:12], strict=True)]
    with Lines() as told:
        for _ in range(2):
            for batch in run.loader(data):
                run.step(batch)
    return {"steps": run.step_count, "lines": told.lines}


# ---- settings of the optimizer


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.02}], lr=0.01)


def tensor_rates(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=torch.tensor(0.01), foreach=False)


def _set(group: int, key: str, value: Any) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[group][key] = value

    return change


def _fill(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.5)


CHANGES: dict[str, tuple[Any, Callable[[torch.optim.Optimizer], None]]] = {
    "lr of group 1": (two_groups, _set(1, "lr", 0.5)),
    "lr of group 0": (two_groups, _set(0, "lr", 0.5)),
    "weight_decay": (two_groups, _set(1, "weight_decay", 0.3)),
    "betas": (two_groups, _set(0, "betas", (0.8, 0.99))),
    "eps": (two_groups, _set(1, "eps", 1e-3)),
    "amsgrad": (two_groups, _set(1, "amsgrad", True)),
    "a new key": (two_groups, _set(1, "lr_scale", 0.3)),
    "tensor": (tensor_rates, _fill),
}


def settings(world: World, layout: str, change: str, who: str = "one", when: str = "") -> Any:
    """Two steps, a change of settings, two more: what was raised, after which step.

    who   "one": rank 1 changes them · "all" · when  "between": the halves of a step
    """
    make, act = CHANGES[change]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 3)).double()
    more = {"sample": (X[:4], Y[:4])} if layout in ("tp", "pp") else {}
    run = shoal.parallelize(model, make, squares, layout, world=world, precision="fp64", **more)
    data = run.program.data
    rows = slice(8 * data.rank, 8 * data.rank + 8)
    batch = (X[rows], Y[rows])

    def steps() -> None:
        for step in range(4):
            if step == 2 and when == "between":
                run.forward_backward(batch)
            if step == 2 and (who == "all" or world.rank == 1):
                act(run.optimizer)
            if step == 2 and when == "between":
                run.update()
            else:
                run.step(batch)

    with Lines() as told:
        error = message(steps)
    return {"error": error, "lines": told.lines, "steps": run.step_count}
