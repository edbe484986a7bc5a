"""Device and host of one's own for `--on 4x8xmygpu.toml`: figures that the catalogue lacks.

    memory_gib = 96                        # of one device, as its driver shows it
    memory_gb_per_s = 3000                 # bandwidth of that memory, as rated
    tflops = { bf16 = 400, fp32 = 60 }     # dense peaks of matrix products, by format
    inside = "nvlink4"                     # link in a node, or GB/s of one device and direction
    network = "ib"                         # between nodes: ib, roce or eth
    cards = 8                              # network cards of a node
    gbit_per_s = 400                       # rate of one card

    per_node = 8                           # may be left out, as all below: their usual values
    node_memory_gib = 2048                 # of the host: without it no verdict on host memory
    host_gb_per_s = 20                     # between a device and its host's memory
    disk_gb_per_s = 2
    efficiency = 0.75                      # share of the peak that the largest products reach

A file with `cores` is a host that trains on its cores: cores, memory_gib, network, cards and
gbit_per_s. Rates per core are then those of a machine that was not measured.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import PlanError, check_choice, nearest_word
from shoal.base.estimates.cluster import Link
from shoal.base.estimates.facts import MachineFacts
from shoal.forecast.machines.catalogue import (
    GIB,
    LINKS,
    NETWORKS,
    DeviceModel,
    rated_device,
)

DEVICE = ("memory_gib", "memory_gb_per_s", "tflops", "inside", "network", "cards", "gbit_per_s")
CORES = ("cores", "memory_gib", "network", "cards", "gbit_per_s")
"""Keys that a file must have, for a device and for a host's cores."""

OPTIONAL = {
    "name": "",
    "per_node": 8,
    "node_memory_gib": 0.0,
    "host_gb_per_s": 20.0,
    "disk_gb_per_s": 2.0,
    "efficiency": 0.75,
}
"""Keys that a device's file may leave out, and their values then."""

FORMATS = ("fp64", "fp32", "bf16", "fp16", "fp8")
INSIDE_LATENCY_S = 1e-5
EXAMPLES = {"tflops": "{ bf16 = 400, fp32 = 60 }", "inside": '"nvlink4"', "network": '"ib"'}


@dataclass(frozen=True)
class HostModel:
    """A host that trains on its cores: their number, its memory, and the cards of its network."""

    facts: MachineFacts
    network: tuple[str, int, float]


def read_device_file(path: Path) -> DeviceModel | HostModel:
    """Read the figures of a device and its node, or of a host's cores, from a TOML file.

    Raises:
        PlanError: no such file, no TOML, a key that is missing, unknown, or not a number above 0;
            names the key and the keys that a file needs.
    """
    reader = _FigureReader(path, _read_toml(path))
    network = (reader.choice("network", NETWORKS), reader.count("cards"), reader.rate("gbit_per_s"))
    memory_gib = reader.rate("memory_gib")
    if "cores" in reader.found:
        return HostModel(
            MachineFacts(reader.count("cores"), int(memory_gib * GIB), gpus=0), network
        )
    efficiency = reader.rate("efficiency")
    if efficiency > 1:
        raise reader.error("efficiency", "a share of the peak, at most 1; try: efficiency = 0.75")
    device = rated_device(
        reader.name(),
        memory_gib,
        reader.rate("memory_gb_per_s") / 1e3,
        reader.peaks(),
        top=efficiency,
        source=f"as given in {path.name}",
    )
    return DeviceModel(
        device,
        reader.inside(),
        reader.count("per_node"),
        network,
        host_bytes_per_s=reader.rate("host_gb_per_s") * 1e9,
        node_bytes=reader.rate("node_memory_gib") * GIB,
        disk_bytes_per_s=reader.rate("disk_gb_per_s") * 1e9,
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise PlanError(
            f"--on {path}: cannot be read ({failure.strerror}); a device file has {_keys(DEVICE)}"
        ) from failure
    except ValueError as failure:  # no TOML, or no UTF-8
        raise PlanError(f"--on {path}: is no TOML ({failure}); mend it there") from failure


def _keys(names: tuple[str, ...]) -> str:
    return ", ".join(names)


class _FigureReader:
    """Reader of one file's figures; its errors name the file, the key and the wanted value."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path, self.found = path, found
        needed = CORES if "cores" in found else DEVICE
        allowed = (*needed, *(() if "cores" in found else OPTIONAL))
        for key in found:
            if key not in allowed:
                close = nearest_word(key, allowed)
                raise self.error(
                    key, f"no such key; {f'try: {close}' if close else f'it has {_keys(allowed)}'}"
                )
        missing = [key for key in needed if key not in found]
        if missing:
            raise PlanError(
                f"--on {path}: {_keys(tuple(missing))} missing; the file needs {_keys(needed)}; "
                f"try: {missing[0]} = {EXAMPLES.get(missing[0], '8')}"
            )

    def error(self, key: str, text: str) -> PlanError:
        return PlanError(f"--on {self.path}: {key} = {self.found.get(key)!r}: {text}")

    def rate(self, key: str, found: Any = None) -> float:
        """Return a number above 0, or an optional key's default."""
        value = self.found.get(key, OPTIONAL.get(key)) if found is None else found
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or (value <= 0 and key in self.found):
            raise self.error(key, f"needs a number above 0; try: {key} = {EXAMPLES.get(key, '8')}")
        return float(value)

    def count(self, key: str) -> int:
        value = self.rate(key)
        if value != int(value):
            raise self.error(key, f"needs a whole number; try: {key} = {math.ceil(value)}")
        return int(value)

    def choice(self, key: str, allowed: dict[str, Link]) -> str:
        value = self.found[key]
        check_choice(f"--on {self.path}: {key}", value, allowed, kind=PlanError)
        return str(value)

    def name(self) -> str:
        value = self.found.get("name", self.path.stem)
        if not isinstance(value, str) or not value.strip():
            raise self.error("name", f'needs a text; try: name = "{self.path.stem}"')
        return value.strip()

    def inside(self) -> str | Link:
        """Return a link of the catalogue, or one with the file's own rate."""
        if isinstance(self.found["inside"], str):
            return self.choice("inside", LINKS)
        rate = self.rate("inside")
        name = f"{rate:g} GB/s in a node"
        return Link(name, INSIDE_LATENCY_S, rate * 1e9, f"as given in {self.path.name}")

    def peaks(self) -> dict[str, float]:
        """Return TFLOP/s by format; bf16 without a rate of its own takes fp32's, as on a V100."""
        found = self.found["tflops"]
        if (
            not isinstance(found, dict)
            or not {"bf16", "fp16"} & found.keys()
            or "fp32" not in found
        ):
            raise self.error(
                "tflops",
                f"needs fp32, and bf16 or fp16; it may have {_keys(FORMATS)}; "
                f"try: tflops = {EXAMPLES['tflops']}",
            )
        for key in found:
            check_choice(f"--on {self.path}: tflops", key, FORMATS, kind=PlanError)
        rates = {key: self.rate("tflops", value) for key, value in found.items()}
        return {"bf16": rates["fp32"], **rates}
