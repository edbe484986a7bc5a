"""Numbers of a record by name, and those of host, ranks and devices, which every sink gets.

train/…       each step's row: loss, norm, rate, seconds, communication, wait for data, memory
validation/…  each validation
host/…        rank 0's machine and process, every 10 s
ranks/…       wait of the ranks for each other, if the watchdog records it, every 10 s
devices/…     utilisation, memory, power, temperature of the run's GPUs, if recorded, every 10 s
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.runlog.damaged_lines import is_number
from shoal.base.runlog.log_tails import find_worst_rank, read_devices, read_rank_medians

CURVES = (
    *("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "data_wait_s", "comm_exposed_s"),
    *("gpu_utilisation", "peak_memory_bytes", "loss_scale"),
)
"""Keys of a step's row that are drawn."""
DEVICE_KEYS = ("utilisation", "memory_used_bytes", "power_w", "temperature_c")
HOST_S = 10.0
"""Seconds between two readings of host, ranks and devices."""
TAIL_BYTES = 1 << 16
"""Bytes of rank records of one reading."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record to draw, by name: train/loss, train/NAME, validation/NAME.

    Args:
        record: of rank 0; {} for other ranks and for records without finite numbers.
    """
    kind = {"step": "train", "validated": "validation"}.get(str(record.get("event")))
    if kind is None or record.get("rank") != 0:
        return {}
    keys = CURVES if kind == "train" else ("loss", "accuracy")
    found = {key: record.get(key) for key in keys} | dict(record.get("metrics") or {})
    return {
        f"{kind}/{name}": float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


class ScalarSink:
    """Base of the sinks: calls `write` with the numbers of each record that has some, on rank 0.

    Args:
        folder: a run folder, or a folder in one.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._read_s = -math.inf

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Write a record."""
        values = scalars(record)
        if not values:
            return
        now_s = time.monotonic()
        if record["event"] == "step" and now_s - self._read_s >= HOST_S:
            self._read_s = now_s
            values |= read_host() | read_ranks_and_devices(self.folder)
        self.write(int(record["step"]), values)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the numbers of a step or a validation.

        Args:
            step: its number; smaller than the last one after a resume or a rewind.
            values: by name.
        """
        raise NotImplementedError


def read_host() -> dict[str, float]:
    """Return memory and processor use of this machine, and memory of this process."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "host/memory_used_bytes": float(memory.total - memory.available),
        "host/process_memory_bytes": float(psutil.Process().memory_info().rss),
        "host/cpu_utilisation": psutil.cpu_percent(None) / 100,
    }


def read_ranks_and_devices(folder: Path) -> dict[str, float]:
    """Return the ranks' waits and the devices' state that a run folder has; {} without records.

    Args:
        folder: the run folder, or a folder in one.
    """
    values: dict[str, float] = {}
    for path in (folder, folder.parent):
        ranks, devices = read_rank_medians(path, TAIL_BYTES), read_devices(path)
        if ranks:
            waits_s = [one.wait_s for one in ranks]
            values |= {"ranks/wait_s_min": min(waits_s), "ranks/wait_s_max": max(waits_s)}
        if (worst := find_worst_rank(ranks)) is not None:
            values |= {"ranks/worst_rank": float(worst[0]), "ranks/lateness_s": worst[1]}
        for key in DEVICE_KEYS:
            if numbers := [float(one[key]) for one in devices if is_number(one.get(key))]:
                values |= {f"devices/{key}_min": min(numbers), f"devices/{key}_max": max(numbers)}
        if values:
            break
    return values


def require_package(package: str, sink: str, extra: str = "sinks") -> None:
    """Raise if a library is not installed, without importing it.

    Raises:
        ConfigError: the library is not installed.
    """
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        raise missing_package(package, sink, extra)


def missing_package(package: str, sink: str, extra: str = "sinks") -> ConfigError:
    """Return the error for a library that is not installed."""
    return ConfigError(
        f"shoal.sinks.{sink}: needs {package}, which is not installed; try: "
        f"pip install 'shoal[{extra}]'"
    )
