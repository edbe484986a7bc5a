"""Devices: which one a process computes on, what it can do, and which backend carries its tensors.

Whatever differs between a CPU and an accelerator is asked here, so that other rooms spell no
vendor's name. torch answers where it can (`torch.accelerator`, `torch.get_device_module`), for any
device that it knows; NVIDIA's and AMD's are both `cuda` to torch.

    tensors on the host      gloo, on every machine
    tensors on a device      the backend that torch names for it: NCCL (cuda), XCCL (xpu), …
    a group of a run with devices carries both: "cpu:gloo,cuda:nccl"

Peaks are the caching allocator's: what tensors held, not what it keeps. A copy between host and
device goes on beside kernels only if the host's side is pinned, so that its pages stay in place.

Source    torch.accelerator, torch.distributed.init_process_group (`backend`), cudaHostRegister
Limits    Apple's `mps` has neither float64 nor collectives: there a run computes on the CPU
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.errors import PlanError
from shoal.fabric._torch import fused_optimizer_devices

HOST = torch.device("cpu")

UNUSED = ("mps",)
"""Accelerators that torch knows and no run uses."""

HALF = (torch.float16, torch.bfloat16)


def accelerator() -> str | None:
    """Returns torch's name of this machine's kind of accelerator; None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in UNUSED else found.type


def is_accelerator(device: torch.device) -> bool:
    """Whether memory and kernels are a device's own: neither the host's nor shapes alone."""
    return device.type not in ("cpu", "meta")


def pick_device(
    local_rank: int, local_size: int, devices: int, bound: bool, kind: str = "cuda"
) -> torch.device:
    """This process's GPU, or the CPU where the machine has none; never a mix on one machine.

    Args:
        devices: how many this process sees.
        bound: the launcher gave each process one of its own.
        kind: torch's name of them.

    Raises:
        PlanError: for more processes than GPUs.

    >>> pick_device(1, 2, devices=4, bound=False), pick_device(0, 1, devices=0, bound=False)
    (device(type='cuda', index=1), device(type='cpu'))
    """
    if devices == 0:
        return HOST
    if local_size <= devices:
        return torch.device(kind, local_rank)
    if devices == 1 and bound:
        return torch.device(kind, 0)
    hide = HIDES.get(kind)
    raise PlanError(
        f"launch.processes = {local_size}: this machine shows {devices} "
        f"GPU{'s' if devices > 1 else ''}; try: launch.processes={devices}"
        f"{f', or {hide}= to train on the CPU' if hide else ''}"
    )


HIDES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""What hides devices from a process."""


def own_device(local_rank: int, local_size: int, bound: bool) -> torch.device:
    """This process's device by its number on the machine, made the current one.

    Raises:
        as `pick_device`.
    """
    kind = accelerator()
    if kind is None:
        return HOST
    device = pick_device(local_rank, local_size, torch.accelerator.device_count(), bound, kind)
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index)
    return device


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a group that exists can send from: with a device's own backend that, else the CPU."""
    kind = accelerator()
    if kind is not None and _carried(group).get(kind) == dist.get_default_backend_for_device(kind):
        return torch.device(kind, torch.accelerator.current_device_index())
    return HOST


def backends(device: torch.device) -> str:
    """What a process group is made with: host tensors over gloo, a device's over its own backend.

    >>> backends(torch.device("cpu")), backends(torch.device("cuda", 1))
    ('gloo', 'cpu:gloo,cuda:nccl')
    """
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def carries_host_tensors(group: dist.ProcessGroup | None) -> bool:
    """Whether a group takes tensors in host memory, as all that Shoal makes do."""
    return "cpu" in _carried(group)


def runs_in_queues(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether messages of a device run one after another per communicator, as NCCL's do."""
    return is_accelerator(device) and _carried(group).get(device.type) not in (None, "gloo")


def _carried(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Backend by kind of device."""
    told = dist.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in told.split(",") if ":" in pair)


@dataclass(frozen=True)
class Abilities:
    """What a device can do that plans and messages ask about; `lines` says what is missing.

    Attributes:
        bf16: products in bfloat16.
        float64: proofs.
        flash: torch's flash attention, in half formats.
        fused: optimizers in one kernel.
        pinned: copies to the host that compute does not wait for.
    """

    bf16: bool = True
    float64: bool = True
    flash: bool = True
    fused: bool = True
    pinned: bool = True


INSTEAD = {
    "bf16": "no bf16: precision.compute = auto means fp32",
    "float64": "no float64: shoal prove needs the CPU",
    "flash": "no flash attention: memory-efficient kernels or matrix products",
    "fused": "no fused optimizers: one kernel per operation",
    "pinned": "no pinned memory: copies to the host are waited for",
}
"""What a device without an ability does instead: the row of the table, and the words at start."""


@functools.cache
def abilities(device: torch.device) -> Abilities:
    """What a device can do, as torch says.

    >>> abilities(torch.device("cpu"))
    Abilities(bf16=True, float64=True, flash=True, fused=True, pinned=False)
    """
    kind = device.type
    if not is_accelerator(device):
        return Abilities(fused=kind in fused_optimizer_devices(), pinned=False)
    module: Any = torch.get_device_module(device)
    tells_bf16 = getattr(module, "is_bf16_supported", None)
    return Abilities(
        bf16=bool(tells_bf16()) if tells_bf16 is not None else False,
        float64=kind not in UNUSED,
        flash=_has_flash(device),
        fused=kind in fused_optimizer_devices(),
        pinned=kind == accelerator(),
    )


def _has_flash(device: torch.device) -> bool:
    """Compute capability 8.0 and newer among NVIDIA's; of others none is known to give the sums."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def what_is_missing(device: torch.device) -> str:
    """One line on what an accelerator cannot do, for the start of a run; "" if it can do all."""
    if not is_accelerator(device):
        return ""
    able = abilities(device)
    missing = [line for name, line in INSTEAD.items() if not getattr(able, name)]
    return f"{device_name(device)}: {'; '.join(missing)}" if missing else ""


def takes_flash(q: torch.Tensor) -> bool:
    """Whether torch's flash kernel of a device takes queries [..., head_dim] as they are."""
    dim = q.shape[-1]
    return q.dtype in HALF and dim % 8 == 0 and dim <= 256 and abilities(q.device).flash


def device_name(device: torch.device) -> str:
    """What the vendor calls a device, or torch's name of it."""
    tells = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(tells(device)) if tells is not None else str(device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what was queued; nothing to do on the CPU."""
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)


def recorded_event(device: torch.device) -> Any:
    """An event in a device's current stream, after what was queued so far."""
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def numbers_on(device: torch.device, numbers: Sequence[float]) -> torch.Tensor:
    """float64 numbers on a device, [numbers], without the host waiting for the copy."""
    return to_device(torch.tensor(numbers, dtype=torch.float64), device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device, without the host waiting for what the device still has to do.

    From memory that is not pinned the driver copies at once, when the stream has come so far. torch
    keeps pinned memory that was let go, and lends it again when the copy from it is over.
    """
    if tensor.device.type == "cpu" and abilities(device).pinned:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def device_generators(device: torch.device | None = None) -> list[torch.Generator]:
    """The generators that passes on a device draw from, besides the CPU's.

    Args:
        device: None: of all that this process has begun to use.
    """
    kind = accelerator() if device is None else device.type
    if kind is None or kind in ("cpu", "meta"):
        return []
    module: Any = torch.get_device_module(kind)
    begun = getattr(module, "is_initialized", None)
    if begun is not None and not begun() and device is None:
        return []
    every = list(getattr(module, "default_generators", ()))
    return every if device is None else every[device.index or 0 :][:1]


def first_accelerator(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of the first tensor that lies on one; None if all are the host's."""
    return next((t.device for t in tensors if is_accelerator(t.device)), None)


def peak_bytes(device: torch.device) -> int:
    """Most bytes that tensors held on a device since the start, or since `forget_peak_bytes`."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def forget_peak_bytes(device: torch.device) -> None:
    """Count the peak from what is held now."""
    torch.get_device_module(device).reset_peak_memory_stats(device)


def held_bytes(device: torch.device) -> int:
    """What tensors hold on a device now."""
    return int(torch.get_device_module(device).memory_allocated(device))


def total_bytes(device: torch.device) -> int:
    """A device's memory."""
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def limit_bytes(device: torch.device, most: int) -> None:
    """Let this process hold no more of a device's memory: its allocator refuses then."""
    share = min(1.0, most / total_bytes(device))
    torch.get_device_module(device).set_per_process_memory_fraction(share, device)


def times_asked(device: torch.device) -> int:
    """How often the allocator has asked a device for memory; 0 where it does not count that."""
    if not is_accelerator(device):
        return 0
    return int(torch.get_device_module(device).memory_stats(device).get("num_device_alloc", 0))


def outside_bytes(device: torch.device) -> int:
    """What is taken on a device beside the allocator: contexts, libraries, other processes."""
    module: Any = torch.get_device_module(device)
    torch.zeros(1, device=device)
    free, total = module.mem_get_info(device)
    return int(total - free - module.memory_reserved(device))


def give_back_unused() -> None:
    """Return what the allocator keeps and no tensor holds; nothing to do without a device."""
    if accelerator() is not None:
        torch.accelerator.empty_cache()


def utilisation(device: torch.device) -> float | None:
    """Returns the share of the last sample period a device ran a kernel, 0–1; None if unknown.

    Limits: needs NVIDIA's management library for Python; without it the answer is None too.
    """
    tells = getattr(torch.get_device_module(device), "utilization", None)
    if not is_accelerator(device) or tells is None:
        return None
    try:
        return float(tells(device)) / 100
    except (RuntimeError, ImportError, ModuleNotFoundError):
        return None


def pin(host: torch.Tensor, device: torch.device, owner: object) -> Any:
    """Pin host memory that exists, until the handle that is returned is called or `owner` goes.

    torch's own pinned allocator rounds up to a power of two: up to twice the memory.

    Returns:
        None where it stays pageable: copies are then right, and waited for.
    """
    if device.type != "cuda":
        return None
    address = host.data_ptr()
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, host.numel() * host.element_size(), 0)) != 0:
        return None
    return weakref.finalize(owner, runtime.cudaHostUnregister, address)
