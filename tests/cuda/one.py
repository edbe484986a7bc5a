"""What one device computes: this machine's facts, equality with the CPU, checkpoints, the loss."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import shoal
from child import Sheet
from device import DEVICE, ON_GPU, SMALL, pick
from machine_case import TINY
from shoal.fabric import start_world
from shoal.machine.matmul import DTYPES, matmul_flops_per_s
from shoal.machine.measure import measure_machine, quick_sizes
from shoal.models.catalog import build


class Tokens:
    """Deterministic token samples with unequal numbers of ignored targets."""

    draws_nothing = True

    def __init__(self, vocabulary: int, sequence: int, samples: int = 64) -> None:
        self.vocabulary, self.sequence, self.samples = vocabulary, sequence, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.sequence + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[: index % 7] = -100
        return tokens[:-1], targets


def llama(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(1)
    return build("llama", {"dim": 64, "layers": 2, "dropout": dropout}, vocabulary=97, sequence=32)


def train(
    precision: str, device: torch.device, steps: int = 5, dropout: float = 0.0, **more: Any
) -> shoal.Run:
    """Some steps of a small Llama on a device."""
    world = start_world({})
    world.device = device
    run = shoal.parallelize(
        llama(dropout),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch=8,
        micro_batch=2,
        precision=precision,
        clip=1.0,
        world=world,
        **more,
    )
    loader = run.loader(Tokens(97, 32))
    while run.step_count < steps:
        for batch in loader:
            run.step(batch)
            if run.step_count == steps:
                break
    return run


def apart(ours: shoal.Run, theirs: shoal.Run) -> float:
    """Largest distance of a tensor, as a share of its norm."""
    pairs = zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True)
    return max(float((a.cpu() - b.cpu()).norm() / b.cpu().norm()) for (_, a), b in pairs)


def machine(sheet: Sheet) -> None:
    """Who is here, and how fast; nothing to fail but a missing GPU."""
    with sheet.row("device") as told:
        told["torch"], told["cuda"] = torch.__version__, torch.version.cuda
        assert torch.empty(1, device=DEVICE).device == DEVICE, (
            "checks compare devices as tensors do"
        )
        if ON_GPU:
            assert torch.cuda.is_available(), "torch sees no GPU"
            told["gpus"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
            told["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
            told["cudnn"] = torch.backends.cudnn.version()
            told["capability"] = list(torch.cuda.get_device_capability(0))
            if torch.distributed.is_nccl_available():
                told["nccl"] = list(torch.cuda.nccl.version())
    with tempfile.TemporaryDirectory() as cache:
        for precision in pick(list(DTYPES), ["fp32"]):
            with sheet.row(f"matrix rate in {precision}") as told:
                world = start_world()
                world.device = DEVICE
                told["flops_per_s"] = matmul_flops_per_s(world, precision, Path(cache))
        with sheet.row("facts for the planner") as told:
            world = start_world()
            world.device = DEVICE
            told.update(measure_machine(world, Path(cache), TINY if SMALL else quick_sizes(DEVICE)))
            assert told["kind"] == ("gpu" if ON_GPU else "cpu")


def correctness(sheet: Sheet) -> None:
    """Equality with the CPU in float64, repeated dropout, checkpoints, the loss head."""
    cpu = torch.device("cpu")
    with sheet.row("float64 equals the CPU") as told:
        told["difference"] = apart(train("fp64", DEVICE), train("fp64", cpu))
        assert told["difference"] < 1e-12
    with sheet.row("dropout repeats") as told:
        one, other = (train("fp32", DEVICE, dropout=0.1) for _ in range(2))
        told["difference"] = apart(one, other)
        assert told["difference"] < 1e-5
    with sheet.row("dropout repeats under recompute") as told:
        again = train("fp32", DEVICE, dropout=0.1, recompute="full")
        told["difference"] = apart(again, one)
        assert told["difference"] < 1e-5
    with sheet.row("save and restore give the same bits"), tempfile.TemporaryDirectory() as folder:
        run = train("fp32", DEVICE)
        run.save(folder)
        other = train("fp32", DEVICE, steps=2)
        assert other.restore(folder)
        assert apart(other, run) == 0.0
    with (
        sheet.row("a save beside training is what was there when it began"),
        tempfile.TemporaryDirectory() as folder,
    ):
        run = train("fp32", DEVICE, steps=3)
        kept = {name: t.detach().cpu().clone() for name, t in run.model.state_dict().items()}
        run.save(folder, wait=False)
        for batch in run.loader(Tokens(97, 32)):
            run.step(batch)
        run.save(folder, wait=True)
        other = train("fp32", cpu, steps=1)
        assert other.restore(folder, step=3)
        assert all(torch.equal(kept[name], t) for name, t in other.model.state_dict().items())
    with (
        sheet.row("a checkpoint of this device goes on on the CPU") as told,
        tempfile.TemporaryDirectory() as folder,
    ):
        run = train("fp64", DEVICE, steps=3)
        run.save(folder)
        other = train("fp64", cpu, steps=1)
        assert other.restore(folder)
        told["difference"] = apart(other, run)
        assert told["difference"] == 0.0
    with sheet.row("the loss head equals cross-entropy") as told:
        told["difference"] = loss_head()
        assert told["difference"] < 1e-10


def loss_head() -> float:
    """Gradients of the chunked loss against the plain one's, in float64."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device=DEVICE, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1000, 64, device=DEVICE, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 1000, (300,), device=DEVICE)
    targets[::3] = -100
    total, count = shoal.linear_cross_entropy(hidden, weight, targets, chunk_rows=64)
    ours = torch.autograd.grad(total, (hidden, weight))
    plain = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    theirs = torch.autograd.grad(plain, (hidden, weight))
    assert int(count) == 200
    assert torch.allclose(total, plain, rtol=1e-12)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
