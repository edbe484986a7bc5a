"""Checks that run inside a world of processes: what must be refused, and in which words."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import shoal
from shoal.base.errors import ShoalError
from shoal.fabric import World, start_world
from shoal.trainer.passes.free_passes import FreePasses

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(24, 2, generator=torch.Generator().manual_seed(2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets) ** 2


def linear(seed: int = 0, outputs: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def share(world: World, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's own samples of a step that all ranks share."""
    first = world.rank * rows
    return INPUTS[first : first + rows], TARGETS[first : first + rows]


def run_of(world: World, model: Any, optimizer: Any = sgd, loss: Any = squares, **settings: Any):
    if "plan" not in settings and world.size > 1:
        settings.setdefault("layout", "ddp")  # of what auto takes rank 0 tells a line
    return shoal.parallelize(model, optimizer, loss, world=world, **settings)


def message(action: Callable[[], Any]) -> str:
    """The text of the ShoalError that `action` raises, with its class."""
    try:
        action()
    except ShoalError as failure:
        return f"{type(failure).__name__}: {failure}"
    return "nothing was raised"


def digest(module: nn.Module) -> str:
    total = hashlib.sha256()
    for tensor in module.state_dict().values():
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


class Lines(logging.Handler):
    """Collects what is told to the user."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Lines:
        logging.getLogger("shoal").addHandler(self)
        return self

    def __exit__(self, *what: object) -> None:
        logging.getLogger("shoal").removeHandler(self)


def gradient_replaced(world: World) -> list[str]:
    model = linear()

    def swap(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad.clone()

    model[0].weight.register_post_accumulate_grad_hook(swap)
    run = run_of(world, model)
    before = digest(model)
    told = message(lambda: run.step(share(world)))
    return [told, "same" if digest(model) == before else "moved"]


class Shared(nn.Module):
    """One layer, checkpointed twice: with use_reentrant its gradient arrives in two portions."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def backward_twice(world: World) -> list[str]:
    model = Shared(True)
    before = digest(model)
    told = message(lambda: run_of(world, model).step(share(world)))
    moved = "same" if digest(model) == before else "moved"
    good = Shared(False)
    run_of(world, good).step(share(world))
    return [told, moved, digest(good)]


def structures_differ(world: World) -> list[str]:
    wide = message(lambda: run_of(world, lambda: linear(outputs=2 + world.rank)))
    frozen = linear()
    frozen[0].bias.requires_grad_(world.rank == 0)
    strided = nn.Conv2d(3, 4, 3)
    if world.rank == 1:
        strided = strided.to(memory_format=torch.channels_last)
    return [wide, *(message(lambda m=m: run_of(world, m)) for m in (frozen, strided))]


def values_differ(world: World) -> dict[str, Any]:
    """Also in another memory format, which gloo cannot send as it lies."""
    torch.manual_seed(world.rank)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with torch.no_grad():
        conv.bias.copy_(torch.arange(4.0))
    with Lines() as told:
        run_of(world, conv)
    kept = conv.weight.is_contiguous(memory_format=torch.channels_last)
    return {"digest": digest(conv), "lines": told.lines, "kept": kept}


def unfrozen_later(world: World) -> list[str]:
    model = linear()
    model[0].weight.requires_grad_(False)
    run = run_of(world, model)
    run.step(share(world))
    model[0].weight.requires_grad_(True)
    return [message(lambda: run.step(share(world)))]


def mean_loss(world: World) -> list[str]:
    model = linear()
    before = digest(model)
    run = run_of(world, model, loss=lambda o, t: squares(o, t).mean())
    told = message(lambda: run.step(share(world)))
    return [told, "same" if digest(model) == before else "moved"]


def poison_on_one_rank(world: World) -> dict[str, Any]:
    """Rank 1's own share holds a NaN: every rank skips, with all state as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    run = run_of(world, model)
    run.step(share(world))
    before = digest(model)
    momentum = [s["momentum_buffer"].clone() for s in run.optimizer.state.values()]
    x, y = share(world)
    if world.rank == 1:
        x = x * float("nan")
    result = run.step((x, y))
    still = all(
        torch.equal(a, s["momentum_buffer"])
        for a, s in zip(momentum, run.optimizer.state.values(), strict=True)
    )
    same = digest(model) == before
    run.step(share(world))
    return {"skipped": result.skipped, "still": still, "same": same, "end": digest(model)}


def channels_last(world: World) -> list[float]:
    """Three fused AdamW steps on weights in channels_last order; rank 0 also knows the truth."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(
            memory_format=torch.channels_last
        )

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05, fused=True)

    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    model, twin = net(), net()
    run = run_of(world, model, adamw)
    plain = adamw(twin.parameters())
    rows = 8 // world.size
    mine = slice(world.rank * rows, (world.rank + 1) * rows)
    for _ in range(3):
        run.step((images[mine], TARGETS[:8][mine]))
        plain.zero_grad()
        F.mse_loss(twin(images), TARGETS[:8]).backward()
        plain.step()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return [float((a - b).abs().max()) for a, b in pairs]


class Averages(nn.Module):
    """Keeps a moving average of its inputs, as users do by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.layer(x - self.average) * self.constant


def loose_buffer(world: World) -> dict[str, Any]:
    with Lines() as told:
        model = Averages()
        run = run_of(world, model)
        for _ in range(3):
            run.step(share(world))
    x, _ = (INPUTS[:4], TARGETS[:4])
    expected = torch.zeros(4)
    for _ in range(3):
        expected = 0.9 * expected + 0.1 * x.mean(0)
    return {
        "digest": digest(model),
        "right": torch.allclose(model.average, expected),
        "lines": told.lines,
    }


def frozen_statistics(world: World) -> dict[str, Any]:
    """One BatchNorm trains, one is in evaluation mode; both must stay equal on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2)
    )
    model[3].eval()
    run = run_of(world, model)
    for _ in range(3):
        run.step(share(world))
    return {
        "digest": digest(model),
        "calls": [int(model[k].num_batches_tracked) for k in (1, 3)],
        "mean": model[3].running_mean.tolist(),
    }


def a_forward_pass_more(world: World) -> dict[str, Any]:
    """A loop that asks nobody; rank 0 runs the model once more before each update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    run = run_of(world, model)
    x, y = share(world)
    for _ in range(2):
        run.begin_step(None)
        run.step_state.written = passes = FreePasses(
            run.program, run.step_count, run.scale, run.collect_flags
        )
        loss = ((passes.forward(x) - y) ** 2).sum(1).mean()
        passes.backward(loss, share=1.0, last=True)
        if world.rank == 0:
            passes.forward(x)
        run.update()
    return {"digest": digest(model), "calls": int(model[1].num_batches_tracked)}


def gan(world: World, out: str = "") -> list[list[float]]:
    """A GAN whose ranks hold halves of the same batches; the losses of every step."""
    torch.manual_seed(1)
    make = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def judged(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    judging = run_of(world, judge, adam, judged, precision="fp64")
    making = run_of(world, make, adam, lambda o, labels: judged(judge(o), labels), precision="fp64")
    rows = 24 // world.size
    mine = slice(world.rank * rows, (world.rank + 1) * rows)
    noise, real = INPUTS[mine].double(), TARGETS[mine].double()
    ones, zeros = (torch.full((rows, 1), float(v), dtype=torch.float64) for v in (1, 0))
    told = []
    for _ in range(5):
        with torch.no_grad():
            fakes = make(noise)
        first = judging.step((torch.cat([real, fakes]), torch.cat([ones, zeros])))
        second = making.step((noise, ones))
        told.append([first.loss, second.loss, first.grad_norm, second.grad_norm])
    return told


def evaluation(world: World) -> dict[str, float]:
    """23 samples over several ranks: a padded tail would be counted twice."""

    class Rows:
        def __len__(self) -> int:
            return 23

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return INPUTS[index], TARGETS[index]

    run = run_of(world, linear(), batch=8, micro_batch=2, precision="fp64")
    return run.evaluate(Rows(), {"bias": lambda o, t: o - t})


def plain_after_close(world: World) -> list[Any]:
    """Hooks and gradient views are gone; the world itself stays, as other checks need it."""
    model = linear()
    run = run_of(world, model)
    run.step(share(world))
    for undo in run.program.on_close:
        undo()
    hooks = [bool(p._post_accumulate_grad_hooks) for p in model.parameters()]
    return [hooks, [p.grad is None for p in model.parameters()]]


def movement(world: World) -> list[str]:
    """An optimizer that steps over its own copies is found on every rank."""

    class Hoarder(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Moves nothing that the model has."""

    run = run_of(world, linear(), lambda p: Hoarder(p, lr=0.1))
    return [message(lambda: run.step(share(world)))]


PIPES = {"pp": 2, "dp_replicate": 2}


def sync_batch_norm(world: World, layout: Any, how: str) -> list[float]:
    """Weights and buffers after steps of 64 samples and of 5, of which some ranks have none."""
    torch.manual_seed(3)
    plain = how == "plain"
    traced = layout in ("tp", PIPES)  # a plain average reads a number, which a trace cannot
    average = 0.1 if traced else None
    model: nn.Module = nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=average), nn.Tanh()),
        nn.Linear(8, 2),
    ).double()
    if how == "class":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    drawn = torch.Generator().manual_seed(1)
    rows = torch.randn(69, 8, generator=drawn, dtype=torch.float64)
    data = TensorDataset(rows[:, :6], rows[:, 6:])
    more = {} if plain else {"sync_batch_norm": how == "argument"}
    run = shoal.parallelize(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda o, y: ((o - y).square().sum(), o.numel()),
        "single" if plain else layout,
        batch=64,
        micro_batch=64 if plain or layout == "tp" else 32 if layout == PIPES else 64 // world.size,
        precision="fp64",
        world=start_world({}) if plain else world,
        sample=(rows[:8, :6], rows[:8, 6:]) if layout in ("tp", PIPES) else None,
        **more,
    )
    for _ in range(2):
        for batch in run.loader(data):
            run.step(batch)
    found = [one.double().flatten() for one in run.state_dict().values()]
    return torch.cat(found).tolist()


def prepared_by_one(world: World, folder: str) -> list[bool]:
    """Rank 0 takes its time; whether it was done when this rank began."""
    done = Path(folder) / "done"
    began: list[bool] = []

    def work() -> None:
        began.append(done.exists())
        if world.rank == 0:
            time.sleep(0.4)
            done.touch()

    world.run_local_first(work)
    return began


class Noisy(nn.Module):
    """A block that draws from `random` and, by a function, from numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * (random.random() + numpy_draw())


def numpy_draw() -> float:
    return float(np.random.rand())


class NoisyChain(nn.Module):
    """Blocks that draw, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy() for _ in range(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return self.head(x)


def host_draws(world: World, layout: str, recompute: str = "none") -> list[float]:
    """Losses and weights of three steps; the user's own draws go on where they were."""
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(24, 6).double(), torch.randn(24, 2).double())
    run = run_of(
        world, NoisyChain().double(), layout=layout, batch=8, micro_batch=2, precision="fp64",
        sample=data[:2], recompute=recompute,
    )  # fmt: skip
    random.seed(3)
    found = [run.step(batch).loss for batch in run.loader(data)]
    found.append(random.random())
    return found + torch.cat([w.flatten() for w in run.state_dict().values()]).tolist()


def unlike_buffers(world: World, folder: str) -> list[str]:
    """Rank 1 alone validates in training mode; lines of two saves."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with Lines() as heard:
        run = run_of(world, model, folder=folder)
        run.step(share(world))
        run.save(wait=True)
        before = len(heard.lines)
        if world.rank == 1:
            with torch.no_grad():
                run.model(INPUTS)
        run.save(wait=True)
        run.save(wait=True)
        run.checkpoint_saver.close()
    if run.lease is not None:
        run.lease.release()
    assert not any("is another on rank" in line for line in heard.lines[:before])
    return [line for line in heard.lines if "is another on rank" in line]


def synchronised_proof(world: World) -> str:
    """Why a proof of such a model gives no verdict."""
    from shoal.proof.reference_limits import CannotProveError
    from shoal.proof.trial_side import TrialSide

    side = TrialSide(world, "ddp", sgd, steps=1)
    try:
        side.parallelize(lambda: nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8)), squares)
    except CannotProveError as failure:
        return str(failure)
    return "proven"
