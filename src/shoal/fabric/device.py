"""Device of a process, its capabilities, and the communication backend of its tensors.

All differences between a CPU and an accelerator are in this module, so that other packages name no
vendor. It asks torch where possible (`torch.accelerator`, `torch.get_device_module`), for any
device that torch supports; NVIDIA's and AMD's devices are both `cuda`.

    tensors on the host      gloo, on every machine
    tensors on a device      the backend that torch names for it: NCCL (cuda), XCCL (xpu), …
    a group of a run with devices carries both: "cpu:gloo,cuda:nccl"

The generators of `random` and `numpy.random`, from which a pass on any device may draw, are here
beside those of devices.

Peaks are allocated bytes of the caching allocator, not reserved ones. A copy between host and
device overlaps with kernels only if the host memory is pinned.

Source    torch.accelerator, torch.distributed.init_process_group (`backend`), cudaHostRegister
Limits    Apple's `mps` has neither float64 nor collectives: there a run computes on the CPU
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from shoal.base.errors import PlanError
from shoal.fabric._torch import fused_optimizer_devices

HOST = torch.device("cpu")

UNUSED = ("mps",)
"""Accelerators that torch supports and that no run uses."""

HALF = (torch.float16, torch.bfloat16)


def accelerator_type() -> str | None:
    """Return torch's device type of this machine's accelerator; None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in UNUSED else found.type


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has its own memory and kernels: neither `cpu` nor `meta`."""
    return device.type not in ("cpu", "meta")


def pick_device(
    local_rank: int, local_size: int, devices: int, bound: bool, kind: str = "cuda"
) -> torch.device:
    """Return this process's GPU, or the CPU on a machine without one; never a mix on one machine.

    Args:
        devices: number of devices visible to this process.
        bound: the launcher made one device visible to each process.
        kind: torch's device type.

    Raises:
        PlanError: the machine has more processes than GPUs.

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
"""Environment variables that hide devices from a process."""


def select_local_device(local_rank: int, local_size: int, bound: bool) -> torch.device:
    """Select this process's device by its local rank, and make it the current device.

    Raises:
        PlanError: the machine has more processes than GPUs.
    """
    kind = accelerator_type()
    if kind is None:
        return HOST
    device = pick_device(local_rank, local_size, torch.accelerator.device_count(), bound, kind)
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index)
    return device


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device whose tensors a group sends: the accelerator if supported, else CPU."""
    kind = accelerator_type()
    if kind is not None and _backends_by_device_type(group).get(
        kind
    ) == dist.get_default_backend_for_device(kind):
        return torch.device(kind, torch.accelerator.current_device_index())
    return HOST


def size_of_group() -> int | None:
    """Return the number of processes of the group that the script has started; None without one."""
    return dist.get_world_size() if dist.is_initialized() else None


def process_group_backend(device: torch.device) -> str:
    """Return the `backend` of a process group: gloo for host tensors, plus the device's backend.

    >>> process_group_backend(torch.device("cpu")), process_group_backend(torch.device("cuda", 1))
    ('gloo', 'cpu:gloo,cuda:nccl')
    """
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def supports_host_tensors(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group accepts tensors in host memory, as all of Shoal's groups do."""
    return "cpu" in _backends_by_device_type(group)


def runs_messages_in_order(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return True if the group runs messages from this device one by one, in call order (NCCL).

    Such a group needs one communicator per direction, or a send waits behind a receive.

    Args:
        group: the process group; None: the default one.
        device: device of the messages.

    Returns:
        False for host tensors and on gloo, which run messages concurrently.
    """
    return is_accelerator(device) and _backends_by_device_type(group).get(device.type) not in (
        None,
        "gloo",
    )


def _backends_by_device_type(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backends of a group by device type."""
    told = dist.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in told.split(",") if ":" in pair)


@dataclass(frozen=True)
class DeviceCapabilities:
    """Capabilities of a device that plans and messages depend on; `lines` lists the missing ones.

    Attributes:
        bf16: matrix products in bfloat16.
        float64: float64 arithmetic, which proofs need.
        flash: torch's flash attention, in half formats.
        fused: optimizers with one kernel per step.
        pinned: copies to the host that overlap with compute.
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
"""Fallback for each missing capability: the table's row, and the words printed at start."""


@functools.cache
def get_device_capabilities(device: torch.device) -> DeviceCapabilities:
    """Return a device's capabilities, as torch reports them.

    >>> get_device_capabilities(torch.device("cpu"))
    DeviceCapabilities(bf16=True, float64=True, flash=True, fused=True, pinned=False)
    """
    kind = device.type
    if not is_accelerator(device):
        return DeviceCapabilities(fused=kind in fused_optimizer_devices(), pinned=False)
    module: Any = torch.get_device_module(device)
    tells_bf16 = getattr(module, "is_bf16_supported", None)
    return DeviceCapabilities(
        bf16=bool(tells_bf16()) if tells_bf16 is not None else False,
        float64=kind not in UNUSED,
        flash=_has_flash(device),
        fused=kind in fused_optimizer_devices(),
        pinned=kind == accelerator_type(),
    )


def _has_flash(device: torch.device) -> bool:
    """Return whether the device has flash attention: NVIDIA's compute capability 8.0 or newer."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def missing_capabilities_line(device: torch.device) -> str:
    """Return one line on an accelerator's missing capabilities; "" if none is missing."""
    if not is_accelerator(device):
        return ""
    able = get_device_capabilities(device)
    missing = [line for name, line in INSTEAD.items() if not getattr(able, name)]
    return f"{device_name(device)}: {'; '.join(missing)}" if missing else ""


def supports_flash(q: torch.Tensor) -> bool:
    """Return whether torch's flash kernel accepts queries [..., head_dim] as they are."""
    dim = q.shape[-1]
    return (
        q.dtype in HALF and dim % 8 == 0 and dim <= 256 and get_device_capabilities(q.device).flash
    )


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a device, or else torch's."""
    tells = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(tells(device)) if tells is not None else str(device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its queued work; does nothing on the CPU."""
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)


def record_event(device: torch.device) -> Any:
    """Record an event in a device's current stream, after the work queued so far."""
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def copy_numbers_to_device(device: torch.device, numbers: Sequence[float]) -> torch.Tensor:
    """Copy float64 numbers to a device, [numbers], without blocking the host."""
    return to_device(torch.tensor(numbers, dtype=torch.float64), device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device, without blocking the host on the device's queued work.

    From pageable memory the driver copies synchronously, when the stream reaches the copy. torch
    caches freed pinned memory, and reuses it after the copy from it is done.
    """
    if tensor.device.type == "cpu" and get_device_capabilities(device).pinned:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def device_generators(device: torch.device | None = None) -> list[torch.Generator]:
    """Return the random generators that passes on a device use, besides the CPU's.

    Args:
        device: None: all devices that this process has used.
    """
    kind = accelerator_type() if device is None else device.type
    if kind is None or kind in ("cpu", "meta"):
        return []
    module: Any = torch.get_device_module(kind)
    begun = getattr(module, "is_initialized", None)
    if begun is not None and not begun() and device is None:
        return []
    every = list(getattr(module, "default_generators", ()))
    return every if device is None else every[device.index or 0 :][:1]


def first_accelerator(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device of the first tensor on an accelerator; None if all are in host memory."""
    return next((t.device for t in tensors if is_accelerator(t.device)), None)


def peak_bytes(device: torch.device) -> int:
    """Return the peak bytes of tensors on a device since the start or `reset_peak_bytes`."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def reset_peak_bytes(device: torch.device) -> None:
    """Reset the peak to the bytes that tensors hold now."""
    torch.get_device_module(device).reset_peak_memory_stats(device)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that tensors hold on a device now."""
    return int(torch.get_device_module(device).memory_allocated(device))


def total_bytes(device: torch.device) -> int:
    """Return a device's memory in bytes."""
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def limit_bytes(device: torch.device, most: int) -> None:
    """Limit this process's device memory: its allocator raises out-of-memory above the limit."""
    share = min(1.0, most / total_bytes(device))
    torch.get_device_module(device).set_per_process_memory_fraction(share, device)


def allocation_count(device: torch.device) -> int:
    """Return the allocator's count of device allocations; 0 if it keeps no count."""
    if not is_accelerator(device):
        return 0
    return int(torch.get_device_module(device).memory_stats(device).get("num_device_alloc", 0))


def non_torch_bytes(device: torch.device) -> int:
    """Return the device bytes used outside the allocator: contexts, libraries, other processes."""
    module: Any = torch.get_device_module(device)
    torch.zeros(1, device=device)
    free, total = module.mem_get_info(device)
    return int(total - free - module.memory_reserved(device))


def empty_cache() -> None:
    """Release the allocator's unused reserved memory; does nothing without a device."""
    if accelerator_type() is not None:
        torch.accelerator.empty_cache()


def device_utilisation(device: torch.device) -> float | None:
    """Return the share (0–1) of the last sample period in which a kernel ran; None if unknown.

    Limits: needs NVIDIA's management library for Python (NVML); returns None without it.
    """
    if not is_accelerator(device):
        return None
    tells = getattr(torch.get_device_module(device), "utilization", None)
    if tells is None:
        return None
    try:
        return float(tells(device)) / 100
    except (RuntimeError, ImportError, ModuleNotFoundError):
        return None


def pin_host_memory(host: torch.Tensor, device: torch.device, owner: object) -> Any:
    """Pin existing host memory until the returned handle is called or `owner` is collected.

    torch's own pinned allocator rounds up to a power of two: up to twice the memory.

    Returns:
        None if the memory stays pageable: copies are then correct, but synchronous.
    """
    if device.type != "cuda":
        return None
    address = host.data_ptr()
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, host.numel() * host.element_size(), 0)) != 0:
        return None
    return weakref.finalize(owner, runtime.cudaHostUnregister, address)


def _twister_view(address: int) -> Any:
    """Return a view of a Mersenne Twister's words and position in memory; `.raw`: bytes now."""
    return (ctypes.c_char * PythonGenerator.SIZE).from_address(address)


class PythonGenerator:
    """Generator of `random`: by its Mersenne Twister in memory under CPython, else by its state.

    `random.getstate` takes 9 µs, twice a step; the bytes take 0.3. In CPython they follow the
    object's head: the place, then 624 words.
    """

    SIZE = 4 + 624 * 4

    def __init__(self) -> None:
        self._twister: Any = getattr(random, "_inst", None)
        words, place = random.getstate()[1][:-1], random.getstate()[1][-1]
        is_ours = type(self._twister) is random.Random and self._twister.__sizeof__() >= self.SIZE
        self._seen: Any = None
        if is_ours:
            self._seen = _twister_view(id(self._twister) + object.__basicsize__)
        self._is_raw = is_ours and struct.unpack("i624I", self._seen.raw) == (place, *words)

    def state(self) -> Hashable:
        """Return the twister's bytes and the stored normal number, or `random.getstate`."""
        if self._is_raw:
            return self._seen.raw, self._twister.gauss_next
        return random.getstate()

    def restore(self, state: Any) -> None:
        """Restore a state that `state` returned."""
        if self._is_raw:
            self._seen.raw, self._twister.gauss_next = state
        else:
            random.setstate(state)

    def seed(self, digest: bytes) -> None:
        """Seed from the digest as one integer."""
        random.seed(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class _NumpyState:
    """State of numpy's generator, compared by its text."""

    text: str
    state: Any = field(compare=False)

    @staticmethod
    def of_numpy() -> _NumpyState:
        state = np.random.get_state(legacy=False)
        return _NumpyState(repr(state), state)


class NumpyGenerator:
    """Generator of `numpy.random`: by its Mersenne Twister in memory if possible, else by state.

    numpy takes 20 µs to return its state and 0.4 µs to return the address of the twister's 624
    words and place. The rest of the state is a normal number that a draw may have stored for the
    next one.
    """

    def __init__(self) -> None:
        self._known, self._seeded = b"", cast("bytes | None", None)
        self._is_all = False
        self._bits: Any = None
        self._seen: Any = None

    def state(self) -> Hashable:
        """Return the twister's bytes, or the whole state."""
        if (raw := self._read_twister()) is None:
            return _NumpyState.of_numpy()
        if raw != self._known:
            # Whoever leaves a normal number has moved the twister.
            self._known, self._is_all = raw, not np.random.get_state(legacy=False)["has_gauss"]
        return raw if self._is_all else _NumpyState.of_numpy()

    def restore(self, state: Any) -> None:
        """Restore a state that `state` returned."""
        if isinstance(state, _NumpyState):
            np.random.set_state(state.state)
            return
        if self._seeded and self._read_twister() == self._seeded:  # nothing was drawn since
            self._seen.raw = state
            return
        words, place = (
            np.frombuffer(state[:-4], dtype=np.uint32),
            int.from_bytes(state[-4:], "little"),
        )
        np.random.set_state(("MT19937", words, place, 0, 0.0))

    def seed(self, digest: bytes) -> None:
        """Seed from two words of the digest."""
        np.random.seed(np.frombuffer(digest, dtype="<u4"))

    def seed_number(self, number: int) -> None:
        """Seed from an integer below 2**32; if nothing is drawn then, `restore` takes 0.5 µs."""
        np.random.seed(number)
        self._seeded = self._read_twister()

    def _read_twister(self) -> bytes | None:
        """Return the bytes of numpy's Mersenne Twister; None for another bit generator."""
        bits: Any = np.random.mtrand._rand._bit_generator
        if bits is not self._bits:
            if type(bits) is not np.random.MT19937:
                return None
            self._bits, self._seen = bits, _twister_view(bits.ctypes.state_address)
        raw: bytes = self._seen.raw
        return raw
