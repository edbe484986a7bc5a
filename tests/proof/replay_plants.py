"""Planted divergences of runs of a small model of a user's own: what moves first, and when.

A reproducible plant is another run, whose steps repeat as often as they are asked for. A transient
one is a run that met a fault of its moment, or another environment: its steps do not repeat here.
`tests/proof/replays.py` trains them all and checks what `shoal replay` names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from shoal.data.loading.sample_order import samples_at

SAMPLES, BATCH, FAULT_STEP = 64, 8, 6
FAULTY = "layers.1.up.weight"
"""The weight in which bits are flipped, and whose gradient a layout loses."""
MODULE = "plants.py"
GELU = 'APPROXIMATION = "none"'
SOURCE = '''"""A model, its data, and the faults that are planted in them."""
import json
import os
import pathlib
import signal

import torch
import torch.distributed as dist
from torch import nn

PLANT = os.environ.get("PLANT", "")
APPROXIMATION = "none"


class LostHalf(torch.autograd.Function):
    """A layout bug: the second rank adds half of its gradient."""

    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        second = dist.is_initialized() and dist.get_rank() == 1
        return 0.5 * gradient if second else gradient


class Block(nn.Module):
    def __init__(self, width, norm_first, loses):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_first, self.loses = norm_first, loses

    def forward(self, x):
        y = self.norm(x) if self.norm_first else x
        weight = LostHalf.apply(self.up.weight) if self.loses else self.up.weight
        y = nn.functional.linear(y, weight, self.up.bias)
        y = x + self.down(nn.functional.gelu(y, approximate=APPROXIMATION))
        return y if self.norm_first else self.norm(y)


class Net(nn.Module):
    def __init__(self, width=32, norm_first=True, loses=False, draws=0):
        super().__init__()
        self.entry = nn.Linear(400, width)
        self.drop, self.draws = nn.Dropout(0.1), draws
        self.layers = nn.ModuleList(Block(width, norm_first, loses and at == 1) for at in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.entry(x)
        torch.rand(self.draws)  # moves the stream of the mask
        x = self.drop(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(**words):
    return Net(**words)


def rows():
    keys = torch.Generator().manual_seed(5)
    return [(torch.randn(400, generator=keys), torch.tensor(n % 5)) for n in range(64)]


def rows_in_another_order():
    found = rows()
    one, two = json.loads(pathlib.Path("swapped.json").read_text())
    found[one], found[two] = found[two], found[one]
    return found


def rows_of_file():
    scales = json.loads(pathlib.Path("scales.json").read_text())
    return [(x * scale, y) for (x, y), scale in zip(rows(), scales, strict=True)]


def flip(tensor):
    bits = tensor.detach().view(torch.int32)
    bits[3, 5] ^= 1 << 24
    return None


if PLANT == "torch":
    torch.__version__ = torch.torch_version.TorchVersion("2.12.1+cpu")
if PLANT in ("weight", "gradient", "stop"):
    from shoal.trainer.run import Run

    right = Run.step

    def step(run, *values, **named):
        if PLANT == "stop" and run.step_count == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if PLANT == "stop" or run.step_count != 5:
            return right(run, *values, **named)
        weight = run.program.parameters["layers.1.up.weight"]
        if PLANT == "weight":
            flip(weight)
            return right(run, *values, **named)
        handle = weight.register_hook(flip)
        try:
            return right(run, *values, **named)
        finally:
            handle.remove()

    Run.step = step
'''


@dataclass(frozen=True)
class Plant:
    """A planted divergence.

    Attributes:
        words: settings of the planted run.
        step, kind, tensor: what must be named; of a transient plant kind is one of statistics.jsonl
            or of a record. "": any tensor.
        key: beginning of a key that must be named as different; "": none.
        environ: environment variables of the planted run.
        environ_now: those of its replays; threads would be the run's otherwise.
        by_record: tensors come from a record that was made with the run, not from statistics.jsonl.
        changes_source: the run stops after its fourth step, goes on with a changed source, and the
            source is changed back afterwards.
    """

    words: tuple[str, ...] = ()
    step: int = 1
    kind: str = ""
    tensor: str = ""
    key: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    environ_now: dict[str, str] = field(default_factory=dict)
    by_record: bool = False
    changes_source: bool = False


COMMON = (
    "model.build=plants:build", "data.source=plants:rows", "data.validation=0", "train.steps=12",
    f"train.batch={BATCH}", "train.micro_batch=4", "train.prove=off", "train.guards=off",
    "checkpoint.every=4", "checkpoint.keep=9", "optimizer.warmup_steps=1", "layout.strategy=single",
    "launch.processes=1",
)  # fmt: skip
DDP = ("layout.strategy=ddp", "launch.processes=2")
REPRODUCIBLE: dict[str, Plant] = {
    "data order": Plant(
        ("data.source=plants:rows_in_another_order",), 4, "forward", "entry", "data.source"
    ),
    "flag": Plant(("model.norm_first=false",), 1, "forward", "layers.0", "model.norm_first"),
    "dropout key": Plant(("model.draws=1",), 1, "forward", "drop", "model.draws"),
    "layout bug": Plant((*DDP, "model.loses=true"), 1, "gradients", FAULTY, "layout.strategy"),
    "changed source": Plant((), 1, "forward", "layers.0", f"source of {MODULE}", by_record=True),
}
# Other vector instructions draw other last bits of the first weights.
TRANSIENT: dict[str, Plant] = {
    "bit of a weight": Plant(
        ("train.statistics=1",), FAULT_STEP, "weight_norm", FAULTY, "", {"PLANT": "weight"}
    ),
    "bit of a gradient": Plant(
        ("train.statistics=1",), FAULT_STEP, "gradient_norm", FAULTY, "", {"PLANT": "gradient"}
    ),
    "another torch": Plant(
        (), 1, "weights before", "", "version of torch", {"PLANT": "torch", "ATEN_CPU_CAPABILITY": "default"},
        by_record=True,
    ),
    "other threads": Plant(
        (), 1, "", "", "threads", {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"},
        by_record=True,
    ),
    "another processor": Plant(
        (), 1, "weights before", "", "vector instructions", {"ATEN_CPU_CAPABILITY": "default"},
        by_record=True,
    ),
    "a file that changed back": Plant(
        ("data.source=plants:rows_of_file", "train.statistics=1"), FAULT_STEP, "activation_rms"
    ),
    "a source that changed back": Plant(
        ("train.statistics=1",), 5, "activation_rms", "layers.0", f"source of {MODULE}",
        {"PLANT": "stop"}, changes_source=True,
    ),
}  # fmt: skip


def indices_of_step(step: int) -> list[int]:
    """Return the samples of a step of the first epoch, by their number in the data."""
    _, found = samples_at((step - 1) * BATCH, step * BATCH, SAMPLES, seed=0)
    return [int(one) for one in found]


def change_source(here: Path) -> None:
    """Change the module: another approximation of GELU."""
    (here / MODULE).write_text(SOURCE.replace(GELU, GELU.replace("none", "tanh")))


def write_files(here: Path) -> None:
    """Write the module and its data into a working folder.

    Two samples are swapped: the first step that meets one of them is the fourth. One is scaled.
    """
    (here / MODULE).write_text(SOURCE)
    (here / "swapped.json").write_text(json.dumps([indices_of_step(4)[2], indices_of_step(7)[1]]))
    write_scales(here, 1.0)


def write_scales(here: Path, scale: float) -> None:
    """Write the scales of all samples; that of a sample of the faulty step is chosen."""
    scales = [1.0] * SAMPLES
    scales[indices_of_step(FAULT_STEP)[3]] = scale
    (here / "scales.json").write_text(json.dumps(scales))
