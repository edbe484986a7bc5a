"""The quick proof of a user's own loop, `parallelize(…, prove="auto")`, in a world of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import TensorDataset

import planted
import shoal
from guards import Lines
from habits.habit_sides import Chain
from right_scripts import Mixture, Net, X, Y, net, sgd, share, squares
from shoal.base.errors import ShoalError
from shoal.data.loading.sample_seeds import GENERATORS
from shoal.fabric import World
from shoal.models.catalog import build
from shoal.parallel import unit_visits
from shoal.proof.loop_proof import list_samples
from shoal.trainer import first_batch_proof


def attempt(
    world: World, loop: str, layout: str, folder: str, prove: str = "auto", bug: str = "nothing"
) -> dict[str, Any]:
    """Run a loop; return its error, the lines about a proof, its numbers and the generators."""
    torch.manual_seed(11)
    error, numbers = "", []
    cache = patch.dict(
        "os.environ", {"SHOAL_CACHE": str(Path(folder) / "cache"), "SHOAL_PROVE": "auto"}
    )
    joined = patch.object(unit_visits, "join_unit_forward", wraps=unit_visits.join_unit_forward)
    with Lines() as written, cache, planted.BUGS[bug](world), joined as joins:
        try:
            numbers = LOOPS[loop](world, layout, prove)
        except ShoalError as failure:
            error = f"{type(failure).__name__}: {failure}"
    return {
        "error": error,
        "lines": [line for line in written.lines if "proof: " in line],
        "others": [line for line in written.lines if "proof: " not in line],
        "numbers": numbers,
        "joins": joins.call_count,
        "drawn": torch.rand(3).tolist(),
        "states": [str(one.state())[:200] for one in GENERATORS],
    }


def run_steps(world: World, layout: str, prove: str, model: nn.Module, **more: Any) -> list[float]:
    run = shoal.parallelize(
        model, sgd(model.parameters()), squares, layout, world=world, prove=prove, **more
    )
    losses = [run.step(share(world, step)).loss for step in range(3)]
    return [*losses, *(float(one.sum()) for one in run.state_dict().values())]


def own_batches(world: World, layout: str, prove: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    return run_steps(world, layout, prove, model.double())


class ByTask(Net):
    """A head by the sign of a sample's first number: ranks' micro-batches take different ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head = int(x[0, 0] > 0)
        return super().forward(x)


def heads(world: World, layout: str, prove: str) -> list[float]:
    return run_steps(world, layout, prove, net(ByTask), guards="off")


def experts(world: World, layout: str, prove: str) -> list[float]:
    return run_steps(world, layout, prove, net(Mixture))


class Drops(Net):
    """One block of the trunk is left out, by a draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        dropped = int(torch.rand(()) * len(self.trunk))
        for number, block in enumerate(self.trunk):
            x = x if number == dropped else x + block(x)
        return self.heads[0](x)


def layerdrop(world: World, layout: str, prove: str) -> list[float]:
    return run_steps(world, layout, prove, net(Drops), guards="off")


def sorted_heads(world: World, layout: str, prove: str) -> list[float]:
    """A head for the last tenth of the samples of a dataset."""
    inputs = torch.cat([-torch.ones(180, 6), torch.ones(20, 6)]).double()
    model = net(ByTask)
    run = shoal.parallelize(
        model, sgd(model.parameters()), squares, layout, world=world, prove=prove, batch=8,
        micro_batch=2, guards="off",
    )  # fmt: skip
    batch = next(iter(run.loader(TensorDataset(inputs, inputs[:, :3]))))
    return [run.step(batch).loss]


HISTORY: list[float] = []


def counted(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A loss that keeps what it has returned, in a helper's global list."""
    total, count = squares(outputs, targets)
    keep(float(total))
    return total, count


def keep(value: float) -> None:
    HISTORY.append(value)


def stacked_experts(world: World, layout: str, prove: str) -> list[float]:
    """Experts in one tensor, of which each rank has a part that user code sees as the whole."""
    sizes = {"dim": 16, "layers": 1, "heads": 2, "experts": 4, "hidden": 8}
    model = build("moe", sizes, vocabulary=11, sequence=6)
    rows = torch.arange(64 * 7).reshape(64, 7) % 11
    run = shoal.parallelize(
        model, sgd(model.parameters()), layout={"dp_replicate": 2, layout: 2}, world=world,
        prove=prove, batch=8, micro_batch=2, sample=(rows[:2, :-1], rows[:2, 1:]),
    )  # fmt: skip
    batch = next(iter(run.loader(TensorDataset(rows[:, :-1], rows[:, 1:]))))
    return [run.step(batch).loss]


def counted_calls(world: World, layout: str, prove: str) -> list[float]:
    HISTORY.clear()
    model = net()
    run = shoal.parallelize(
        model, sgd(model.parameters()), counted, layout, world=world, prove=prove
    )
    run.step(share(world, 0))
    return list(HISTORY)


def loss_of_the_model(world: World, layout: str, prove: str) -> list[float]:
    """The loss reads a weight of the model, which trains."""
    model = net()
    weight = model.into.weight

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        total, count = squares(outputs, targets)
        return total + 0.1 * count * weight.square().sum(), count

    run = shoal.parallelize(model, sgd(model.parameters()), loss, layout, world=world, prove=prove)
    return [run.step(share(world, step)).loss for step in range(2)]


def compared_samples(world: World, layout: str, prove: str) -> list[float]:
    """The loss couples the samples of a micro-batch, which the user has said."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return squares(outputs / outputs.abs().mean(), targets)

    model = net()
    run = shoal.parallelize(
        model, sgd(model.parameters()), loss, layout, world=world, prove=prove, coupled=True
    )
    return [run.step(share(world, 0)).loss]


def written_out(world: World, layout: str, prove: str) -> list[float]:
    model = net()
    run = shoal.parallelize(model, sgd(model.parameters()), layout=layout, world=world, prove=prove)
    losses = []
    for step in range(2):
        for micro in run.micro_batches(share(world, step)):
            total, count = squares(run.model(micro.inputs), micro.targets.to(micro.inputs))
            run.backward(total, count)
        losses.append(run.update().loss)
    return losses


def split_written_out(world: World, layout: str, prove: str) -> list[float]:
    """The same where each rank has a part of a weight, which the loop never reads."""
    model = net(Chain)
    run = shoal.parallelize(
        model, sgd(model.parameters()), layout=layout, world=world, prove=prove, micro_batch=2,
        batch=4, sample=(X[:2], Y[:2]),
    )  # fmt: skip
    for micro in run.micro_batches((X[:4], Y[:4])):
        run.backward(*squares(run.model(micro.inputs), micro.targets))
    return [run.update().loss]


def large(world: World, layout: str, prove: str) -> list[float]:
    """The copies have no room."""
    with patch.object(first_batch_proof, "MEMORY_SHARE", 0.0):
        return run_steps(world, layout, prove, net())


def batch_of_another_run(world: World, layout: str, prove: str) -> list[float]:
    """Two models train on the batches of one run's loader, as a GAN's; a rank may have no sample."""
    first, second = net(), net()
    data = [(torch.randn(6).double(), torch.randn(3).double()) for _ in range(4)]
    runs = [
        shoal.parallelize(
            one, sgd(one.parameters()), squares, layout, world=world, prove=prove, batch=8,
            micro_batch=4,
        )
        for one in (first, second)
    ]  # fmt: skip
    return [run.step(batch).loss for batch in runs[0].loader(data) for run in reversed(runs)]


def odd_batch(world: World) -> str:
    """Rank 1's batch cannot be cut: the error that all ranks raise."""
    model = net()
    run = shoal.parallelize(model, sgd(model.parameters()), squares, "ddp", world=world)
    try:
        list_samples(run, share(world, 0) if world.rank == 0 else object())
    except ShoalError as failure:
        return str(failure)
    return ""


LOOPS: dict[str, Callable[[World, str, str], list[float]]] = {
    one.__name__: one
    for one in (
        own_batches,
        heads,
        experts,
        layerdrop,
        sorted_heads,
        stacked_experts,
        counted_calls,
        loss_of_the_model,
        compared_samples,
        written_out,
        split_written_out,
        large,
        batch_of_another_run,
    )
}
