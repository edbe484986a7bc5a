"""`torch.cuda` in a torch without CUDA, answered by the simulated device.

Loaded once, right after torch, by `sitecustomize.py`. What `torch.cuda` does in Python over
C functions that this build lacks is set here; all else is torch's own.

    SIM_DEVICES=2 · SIM_MEMORY_BYTES=4294967296 · SIM_MODE=drawn|lazy|eager · SIM_SEED=0 · SIM_TICK_MS=5
    SIM_RACES=raise    at the second access | report: on stderr, and status 86 at exit | off
    SIM_UNPINNED=allow | refuse: an asynchronous copy whose host side is not pinned is an error
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import types

import torch

EXIT_STATUS = 86
LIBRARY = os.environ["SIM_LIBRARY"]
if torch.version.cuda:
    raise RuntimeError("this torch has CUDA of its own: nothing to simulate")

lib = ctypes.CDLL(LIBRARY)
for _name, _result, _arguments in (
    ("sim_seed", None, [ctypes.c_long]),
    ("sim_mode", None, [ctypes.c_char_p]),
    ("sim_digest", ctypes.c_uint64, []),
    ("sim_launches", ctypes.c_uint64, [ctypes.c_bool]),
    ("sim_foreign", None, [ctypes.c_char_p]),
    ("sim_untold", ctypes.c_size_t, []),
    ("sim_told", ctypes.c_size_t, []),
    ("sim_watch_host", None, []),
    ("sim_register", None, [ctypes.c_void_p, ctypes.c_size_t]),
    ("sim_unregister", None, [ctypes.c_void_p]),
    ("sim_limit", None, [ctypes.c_int, ctypes.c_size_t]),
    ("sim_snapshot", ctypes.c_char_p, []),
):
    getattr(lib, _name).restype = _result
    getattr(lib, _name).argtypes = _arguments

for _prefix in (
    os.path.dirname(torch.__file__),
    os.path.dirname(__file__),
    os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "typing_extensions.py"),
    sysconfig.get_path("stdlib"),
):  # frames of these files are no places for a report
    lib.sim_foreign(os.path.abspath(_prefix).encode())
lib.sim_watch_host()

DEVICES = int(os.environ.get("SIM_DEVICES", 2))
_limits = [int(os.environ.get("SIM_MEMORY_BYTES", 4 << 30))] * DEVICES


# ---- for tests ---------------------------------------------------------------------------------
def seed_schedule(seed: int) -> None:
    """Begin the drawn schedule anew."""
    lib.sim_seed(seed)


def set_mode(name: str) -> None:
    """eager, lazy or drawn, from now on."""
    lib.sim_mode(name.encode())


def order_of_work() -> int:
    """A digest of the order in which all work ran since the schedule began."""
    return lib.sim_digest()


def set_limit(device: int, limit_bytes: int) -> None:
    """The memory that a device has."""
    _limits[device] = limit_bytes
    lib.sim_limit(device, limit_bytes)


def counts() -> dict[str, int]:
    """Launches by operation; those that wait for their stream say so."""
    lines = (line.rsplit("\t", 1) for line in torch.ops.sim.counts().splitlines())
    return {name: int(times) for name, times in lines}


def launches() -> tuple[int, int]:
    """(kernels, copies and collectives launched so far, those that began before their launch returned)."""
    return lib.sim_launches(False), lib.sim_launches(True)


def races_told() -> int:
    """How many conflicts were raised or reported."""
    return lib.sim_told()


@atexit.register  # early, so it is among the last to run
def _verdict() -> None:
    if lib.sim_untold():
        sys.stdout.flush()
        sys.stderr.write(f"simulated device: {lib.sim_untold()} reports, see above\n")
        sys.stderr.flush()
        os._exit(EXIT_STATUS)


# ---- devices and streams --------------------------------------------------------------------------
def _index(device=None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return current_device() if device < 0 else device
    index = torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kw):
        if kw:
            return super().__new__(cls, **kw)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class _IsEvent(type):
    def __instancecheck__(cls, value) -> bool:
        return isinstance(value, torch.Event)


class Event(metaclass=_IsEvent):  # no subclass: torch.Event measures time to its own kind only
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return torch.Event(device="cuda", enable_timing=enable_timing)


def _stream(handle) -> Stream:
    return Stream(
        stream_id=handle.stream_id, device_index=handle.device_index, device_type=handle.device_type
    )


def synchronize(device=None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def current_stream(device=None) -> Stream:
    return _stream(torch._C._accelerator_getStream(_index(device)))


def default_stream(device=None) -> Stream:
    kind = torch._C._accelerator_getStream(0).device_type
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


# ---- memory ------------------------------------------------------------------------------------
_reset_peak = torch._C._accelerator_resetPeakStats
_reset_sums = torch._C._accelerator_resetAccumulatedStats


def _stats(device=None):
    return torch._C._accelerator_getDeviceStats(_index(device))


def mem_get_info(device=None) -> tuple[int, int]:
    total = _limits[_index(device)]
    return total - torch.cuda.memory_reserved(device), total


def memory_snapshot(*_, **__) -> list[dict]:
    segments: list[dict] = []
    for line in lib.sim_snapshot().decode().splitlines():
        kind, *rest = line.split()
        if kind == "S":
            number, address, total, on, small = map(int, rest)
            segments.append(
                {"device": number, "address": address, "total_size": total, "stream": on}
                | {"segment_type": "small" if small else "large", "blocks": []}
                | dict.fromkeys(("allocated_size", "active_size", "requested_size"), 0)
                | {"is_expandable": False}
            )
            continue
        address, size, asked, state = rest
        segment = segments[-1]
        block = {"address": int(address), "size": int(size), "requested_size": int(asked)}
        segment["blocks"].append(block | {"state": state})
        if state != "inactive":
            segment["active_size"] += int(size)
        if state == "active_allocated":
            segment["allocated_size"] += int(size)
            segment["requested_size"] += int(asked)
    return segments


def set_per_process_memory_fraction(fraction: float, device=None) -> None:
    set_limit(_index(device), int(_limits[_index(device)] * fraction))


_PROPERTIES = {"name": "simulated", "uuid": "0", "gcnArchName": "", "major": 9, "minor": 0}
_PROPERTIES |= {"multi_processor_count": 1, "warp_size": 32, "L2_cache_size": 0, "is_integrated": 0}


def get_device_properties(device=None):
    return types.SimpleNamespace(total_memory=_limits[_index(device)], **_PROPERTIES)


class _Runtime:
    """The few calls of libcudart in use."""

    class cudaError:
        success = 0

    @staticmethod
    def cudaHostRegister(address, size, flags):
        lib.sim_register(address, size)
        return 0

    @staticmethod
    def cudaHostUnregister(address):
        lib.sim_unregister(address)
        return 0

    cudaMemGetInfo = staticmethod(mem_get_info)


# ---- generators --------------------------------------------------------------------------------
default_generators = tuple(torch.ops.sim.default_generator(i) for i in range(DEVICES))


NAMES = {
    **{
        f.__name__: f
        for f in (
            *(current_device, set_device, _exchange_device, Stream, Event, synchronize),
            *(current_stream, default_stream, mem_get_info, memory_snapshot),
            *(set_per_process_memory_fraction, get_device_properties),
        )
    },
    "_maybe_exchange_device": _exchange_device,
    "default_generators": default_generators,
    "_initialized": True,
    **dict.fromkeys(("_is_compiled", "is_available", "is_initialized"), lambda: True),
    "_is_in_bad_fork": lambda: False,
    **dict.fromkeys(("_lazy_init", "init"), lambda: None),
    "_lazy_call": lambda function, **_: function(),
    "device_count": lambda: DEVICES,
    "set_stream": torch.accelerator.set_stream,
    "cudart": lambda: _Runtime,
    "memory_stats_as_nested_dict": _stats,
    "reset_peak_memory_stats": lambda device=None: _reset_peak(_index(device)),
    "reset_accumulated_memory_stats": lambda device=None: _reset_sums(_index(device)),
    "empty_cache": lambda: torch._C._accelerator_emptyCache(),
    "utilization": lambda device=None: 50,
    "is_bf16_supported": lambda *_, **__: True,
    "is_current_stream_capturing": lambda: False,
    "get_device_name": lambda device=None: "simulated",
    "get_device_capability": lambda device=None: (9, 0),
}
for _module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
    for _name, _value in NAMES.items():
        if _module is torch.cuda or hasattr(_module, _name):
            setattr(_module, _name, _value)
torch.cuda.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
torch._C._has_cuda = True
torch._C._nccl_version = lambda: 0  # asked for when a collective has failed
torch._C._nccl_version_suffix = lambda: b"simulated"
torch._C._cuda_getDeviceCount = lambda: DEVICES
torch._C._cuda_getDevice = current_device
torch._C._cuda_getCurrentRawStream = lambda index: 0
torch._C._cuda_exchangeDevice = torch._C._cuda_maybeExchangeDevice = _exchange_device

# ---- storages: torch's own need CUDA at compile time ---------------------------------------------
_resize, _new = torch.UntypedStorage.resize_, torch.UntypedStorage.__new__


def _resize_storage(self, size_bytes):
    if self.device.type != "cuda":
        return _resize(self, size_bytes)
    whole = torch.empty(0, dtype=torch.uint8, device=self.device)
    whole.set_(self)
    torch.ops.sim.resize_storage(whole, size_bytes)
    return self


def _new_storage(cls, *arguments, device=None, **kw):
    if device is not None and torch.device(device).type == "cuda":
        size_bytes = arguments[0] if arguments else 0
        return torch.empty(size_bytes, dtype=torch.uint8, device=device).untyped_storage()
    return _new(cls, *arguments, **kw, **({} if device is None else {"device": device}))


torch.UntypedStorage.resize_ = _resize_storage
torch.UntypedStorage.__new__ = _new_storage

# ---- collectives under NCCL's name ---------------------------------------------------------------
if torch.distributed.is_available():
    from torch.distributed import distributed_c10d

    _loader = importlib.machinery.ExtensionFileLoader("_simgpu_collectives", LIBRARY)
    _spec = importlib.util.spec_from_loader("_simgpu_collectives", _loader)
    _collectives = importlib.util.module_from_spec(_spec)
    _loader.exec_module(_collectives)

    class _IsBackend(type):
        def __instancecheck__(cls, value):
            return type(value) is torch._C._distributed_c10d.Backend

    class ProcessGroupNCCL(metaclass=_IsBackend):
        class Options:
            def __init__(self, is_high_priority_stream=False):
                self.is_high_priority_stream = is_high_priority_stream
                self._timeout = distributed_c10d.default_pg_timeout
                self.global_ranks_in_group, self.group_name = [], ""

        def __new__(cls, store, rank, size, options):
            gloo = torch.distributed.ProcessGroupGloo(store, rank, size, options._timeout)
            return _collectives.over(gloo)

    for _module in (torch.distributed, distributed_c10d):
        _module.ProcessGroupNCCL = ProcessGroupNCCL
        _module.is_nccl_available = lambda: True
    distributed_c10d._NCCL_AVAILABLE = True
