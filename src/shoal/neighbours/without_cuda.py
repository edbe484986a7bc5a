"""Replace a script's `.cuda()`, `nccl` and `set_device` where no CUDA device is; reported once.

Importing it is enough, before the script's own lines:

tensor.cuda(), module.cuda()            stay where they are
torch.cuda.set_device(k), synchronize   nothing
tensor.to("cuda:0"), module.to(…)       stay; other arguments of `to` hold
torch.full(…, device="cuda"), randn, …  on the CPU
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
"""Function of torch.distributed: the script calls it, never this package."""
MAKERS = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
"""Functions of torch that make tensors on a `device`."""
_told: list[bool] = []


def install() -> None:
    """Replace the calls from now on; do nothing if a CUDA device exists, or at a second call."""
    if torch.cuda.is_available() or getattr(torch.cuda.set_device, "_shoal", False):
        return
    init, wrap = vars(dist)[JOIN], DistributedDataParallel.__init__

    def stay(self: Any, *_where: Any, **_how: Any) -> Any:
        _report_once()
        return self

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **named: Any) -> None:
        if backend is not None and "nccl" in backend:
            _report_once()
            backend = None if ":" in backend else "gloo"
        init(backend, *args, **named)

    @functools.wraps(wrap)
    def on_the_cpu(
        self: Any, module: nn.Module, device_ids: Any = None, *more: Any, **named: Any
    ) -> None:
        if device_ids is not None or named.get("output_device") is not None:
            _report_once()
        if all(p.device.type == "cpu" for p in module.parameters()):
            device_ids = None
            named.pop("output_device", None)
        wrap(self, module, device_ids, *more, **named)

    with torch.device("cpu"):  # torch lists its factories once, and must list the unwrapped ones
        torch.empty(0)
    for name in MAKERS:
        setattr(torch, name, _wrap_factory(getattr(torch, name)))
    set_device = _make_noop()
    set_device._shoal = True
    for owner, name, value in (
        (torch.Tensor, "cuda", stay),
        (nn.Module, "cuda", stay),
        (torch.Tensor, "to", _ignore_device(torch.Tensor.to)),
        (nn.Module, "to", _ignore_device(nn.Module.to)),
        (torch.cuda, "set_device", set_device),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "synchronize", _make_noop()),
        (torch.cuda, "reset_peak_memory_stats", _make_noop()),
        (dist, JOIN, init_process_group),
        (DistributedDataParallel, "__init__", on_the_cpu),
    ):
        setattr(owner, name, value)


def _make_noop() -> Any:
    """Return a new no-op function: torch's compiler needs a distinct one for each name."""

    def reported(*_args: Any) -> None:
        _report_once()

    return reported


def _ignore_device(to: Any) -> Any:
    """Wrap `to` so that it ignores a device that does not exist."""

    @functools.wraps(to)
    def moved(self: Any, *where: Any, **how: Any) -> Any:
        if not any(map(_is_cuda, (*where, *how.values()))):
            return to(self, *where, **how)
        _report_once()
        left = [one for one in where if not _is_cuda(one) and not isinstance(one, bool)]
        named = {name: one for name, one in how.items() if not _is_cuda(one)}
        return to(self, *left, **named) if left or "dtype" in named else self

    return moved


def _wrap_factory(make: Any) -> Any:
    """Wrap a tensor factory so that it ignores a device that does not exist."""

    @functools.wraps(make)
    def made(*args: Any, **how: Any) -> Any:
        if "device" in how and _is_cuda(how["device"]):
            _report_once()
            del how["device"]
        return make(*args, **how)

    return made


def _is_cuda(one: Any) -> bool:
    if isinstance(one, int) and not isinstance(one, bool):  # of a device, its number
        return True
    return isinstance(one, str | torch.device) and str(one).startswith("cuda")


def _report_once() -> None:
    if not _told:
        _told.append(True)
        logging.getLogger("shoal").warning(TOLD)


install()
