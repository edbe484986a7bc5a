"""What the tests of bf16 residual streams run on every member of a world."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shoal
from shoal.base.errors import PlanError
from shoal.fabric import World
from shoal.models.catalog import build
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.run import Run

VOCABULARY, SEQUENCE = 31, 8
SIZES = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 48}


def started(
    world: World, model: nn.Module, layout: Any, residual: str = "bf16", **more: Any
) -> Run:
    """A run in bf16 of two micro-batches a step."""
    return shoal.parallelize(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1),
        layout=layout,
        batch=4 * (world.size if isinstance(layout, str) else 1),
        micro_batch=2,
        precision="bf16",
        residual=residual,
        world=world,
        **more,
    )


def ended(run: Run) -> None:
    for undo in run.program.on_close:
        undo()


def sent(world: World, residual: str) -> dict[str, int]:
    """Bytes that the first of two stages sends in a step, as counted and as foreseen."""
    torch.manual_seed(0)
    model = build("llama", SIZES, vocabulary=VOCABULARY, sequence=SEQUENCE)
    batch = 2 * (torch.randint(0, VOCABULARY, (4, SEQUENCE)),)
    run = started(world, model, {"pp": 2}, residual, sample=batch)
    run.step(batch)  # in which the stages agree on forms
    counted: list[int] = []
    count = world.traffic.count

    def counting(kind: str, payload_bytes: int, degree: int, *axis: str) -> None:
        counted.extend([payload_bytes] * (kind == "send"))
        count(kind, payload_bytes, degree, *axis)

    world.traffic.count = counting  # type: ignore[method-assign]
    run.step(batch)
    del world.traffic.count
    assert run.program.travel is not None
    volume = run.program.travel()
    foreseen = volume.crossings[0].forward_bytes * 4 // volume.samples
    ended(run)
    return {"counted": sum(counted), "foreseen": foreseen}


class Adding(nn.Module):
    """A block that adds positions which it makes in fp32."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.up, self.down, self.wide = nn.Linear(8, 16), nn.Linear(16, 8), wide
        self.streams: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] to the same."""
        self.streams.append(str(x.dtype))
        if self.wide:
            x = x + torch.ones(8)
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Stack(nn.Module):
    """Two blocks."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding(wide) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] to the same."""
        for block in self.blocks:
            x = block(x)
        return x


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss per element."""
    return (outputs - targets) ** 2


def numbers(world: World) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank."""
    drawn = torch.randn(4, 8, generator=torch.Generator().manual_seed(world.rank))
    return drawn, drawn.flip(0)


def refused(world: World) -> str:
    """What is said of a block that mixes formats."""
    run = started(world, Stack(wide=True), "single", loss=squares)
    try:
        run.step(numbers(world))
    except PlanError as refusal:
        return str(refusal)
    finally:
        ended(run)
    return "ran"


def frozen(world: World, layout: str) -> dict[str, Any]:
    """A frozen layer: in which format it is kept, and the streams that its blocks see."""
    torch.manual_seed(0)
    model = Stack(wide=False)
    for block in model.blocks:
        block.up.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = started(world, model, layout, loss=squares)
    run.step(numbers(world))
    streams = [block.streams[0] for block in model.blocks]
    kept = run.state_dict()
    ended(run)
    still = {name: value for name, value in kept.items() if ".up." in name}
    return {
        "stream": streams,
        "kept": "".join({str(value.dtype) for value in still.values()}),
        "same": all(torch.equal(value.cpu(), before[name]) for name, value in still.items()),
    }


def without_blocks(world: World) -> list[str]:
    """What is said of a model that is no stack of blocks."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with mock.patch.object(MetricsRecorder, "notice") as notice:
        run = started(world, layers, "single", loss=squares)
    lines = [call.args[0] for call in notice.call_args_list]
    told = [line for line in lines if line.startswith("precision.residual")]
    run.step(numbers(world))
    ended(run)
    return told
