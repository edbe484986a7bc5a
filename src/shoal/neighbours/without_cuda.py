"""Answers a script's `.cuda()`, `nccl` and `set_device` where no CUDA device is; told once.

Importing it is enough, before the script's own lines:

tensor.cuda(), module.cuda()            stay where they are
torch.cuda.set_device(k)                nothing
init_process_group(backend="nccl")      gloo
DistributedDataParallel(device_ids=…)   without them
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOLD = "no CUDA device is here: what the script moves there stays on the CPU, and nccl is gloo"
JOIN = "init_process_group"
"""Of torch.distributed: a script calls it, never this room."""
_told: list[bool] = []


def install() -> None:
    """Answer them from here on; nothing where a CUDA device is, or when done before."""
    if torch.cuda.is_available() or getattr(torch.cuda.set_device, "_shoal", False):
        return
    init, wrap = vars(dist)[JOIN], DistributedDataParallel.__init__

    def stay(self: Any, *_where: Any, **_how: Any) -> Any:
        _tell()
        return self

    def set_device(_device: Any) -> None:
        _tell()

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **named: Any) -> None:
        if backend is not None and "nccl" in backend:
            _tell()
            backend = None if ":" in backend else "gloo"
        init(backend, *args, **named)

    @functools.wraps(wrap)
    def on_the_cpu(
        self: Any, module: nn.Module, device_ids: Any = None, *more: Any, **named: Any
    ) -> None:
        if device_ids is not None or named.get("output_device") is not None:
            _tell()
        if all(p.device.type == "cpu" for p in module.parameters()):
            device_ids = None
            named.pop("output_device", None)
        wrap(self, module, device_ids, *more, **named)

    set_device._shoal = True  # type: ignore[attr-defined]  # a mark on a function
    for owner, name, value in (
        (torch.Tensor, "cuda", stay),
        (nn.Module, "cuda", stay),
        (torch.cuda, "set_device", set_device),
        (dist, JOIN, init_process_group),
        (DistributedDataParallel, "__init__", on_the_cpu),
    ):
        setattr(owner, name, value)


def _tell() -> None:
    if not _told:
        _told.append(True)
        logging.getLogger("shoal").warning(TOLD)


install()
