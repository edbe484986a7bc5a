"""Counts where the host waits for the device during a step: reads of values, and copies that wait."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.fabric import World
from shoal.models.llama import Llama
from shoal.models.loss import token_loss
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

ATEN = torch.ops.aten
BATCH = 8
READS = {
    ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.is_nonzero.default,
    ATEN.nonzero.default, ATEN.masked_select.default, ATEN._unique2.default,
    ATEN.repeat_interleave.Tensor,
}  # fmt: skip
"""Operations whose result, or its shape, the host must know."""

LISTED = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
"""Reads that are no operation where the tensor is the host's already."""

MADE = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
"""Values that the host writes: on a device a copy from memory that is not pinned, which waits."""

HOST = ("fabric/world.py", "torch/optim/")
"""Where numbers are the host's on any device: messages to other ranks, counts of steps."""

SHOAL = f"{Path(shoal.__file__).parent}/"


class Waits:
    """`with Waits(device) as waits:` lists them in `found`, by the line of source that asks.

    On the CPU nobody waits, but what would wait on a device is the same; only what is asked behind
    `device.type == "cpu"` comes on top. The calling thread alone is looked at.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: list[str] = []
        self.inside = False
        self.modes = (_Functions(self), _Operations(self))

    def __enter__(self) -> Waits:
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)

    def note(self, what: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        # Not `extract_stack`: it asks the disk about every frame's file, most kernel time here.
        frames = (
            (f.f_code.co_filename, number) for f, number in traceback.walk_stack(sys._getframe())
        )
        path, number = next(
            (path, number)
            for path, number in frames
            if path != __file__ and ("/torch/" not in path or "/optim/" in path)
        )
        if not any(place in path for place in HOST):
            line = linecache.getline(path, number).strip()
            self.found.append(f"{what} at {path.removeprefix(SHOAL)}:{number}: {line}")

    def lies_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type


class _Functions(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs = self.waits, kwargs or {}
        listed = func in LISTED and waits.lies_here(args[0])
        if listed:
            waits.note(func.__name__)
        waits.inside, before = waits.inside or listed, waits.inside
        out = func(*args, **kwargs)
        waits.inside = before
        # Without a `device` it is the host's own, and goes nowhere.
        goes = func is torch.Tensor.new_tensor or kwargs.get("device") is not None
        if func in MADE and goes and waits.lies_here(out):
            waits.note(func.__name__)
        return out


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs = self.waits, kwargs or {}
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if func in READS and waits.lies_here(tensors[0]):
            waits.note(func.name())
        out = func(*args, **kwargs)
        if func in (ATEN.copy_.default, ATEN._to_copy.default) and not waits.inside:
            ends = {tensors[-1].device.type, out.device.type}
            queued = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if len(ends) > 1 and not queued:
                waits.note(f"{func.name()} between {' and '.join(sorted(ends))}")
        return out


def written_out(run: Run, batch: Any) -> None:
    """A step of a loop that runs the model itself; a word over the store is a wait as well."""

    def asked(name: str) -> None:
        raise AssertionError(f"{name} waited for a word over the store")

    with patch.object(run.meeting, "_gather", asked):
        for micro in run.micro_batches(batch):
            run.backward(*token_loss(run.model(micro.inputs), micro.targets))
        run.update()


def steps(
    world: World, layout: Any, count: int, own_loop: bool = False, **settings: Any
) -> list[list[str]]:
    """What the host waited for in each of a run's first `count` steps; the first two are not watched."""
    torch.manual_seed(0)
    sample = torch.zeros(2, 12, dtype=torch.long)
    run = parallelize(
        lambda: Llama(vocabulary=67, sequence=12, dim=32, layers=2, heads=4, kv_heads=2, hidden=48),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        token_loss,
        layout=layout,
        batch=BATCH,
        micro_batch=2,
        clip=1.0,
        sample=(sample, sample),
        world=world,
        **settings,
    )
    torch.manual_seed(run.program.data.rank)
    ids = torch.randint(0, 67, (BATCH // run.program.data.size, 13))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    found = []
    for number in range(1, count + 1):
        waits = Waits(world.device)
        # The sums of a step are made as on a device: the host's own are read one by one.
        on_device = patch("shoal.trainer.step.optimizer_step.is_off_host", return_value=True)
        with on_device, waits if number > 2 else nullcontext():
            if own_loop:
                written_out(run, batch)
            else:
                run.step(batch)
        found.append(waits.found)
    for undo in run.program.on_close:
        undo()
    return found
