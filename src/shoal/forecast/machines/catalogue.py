"""Data sheet values of accelerators and the links between them, with sources.

Devices   dense peaks in FLOP/s (never the figure "with sparsity", which is twice as high), fp32
          without TF32, as torch computes by default. One device is one torch device: one of the two
          dies of an MI250X
Memory    as the framework sees it, which is less than the product's name says
Ladder    a product of n FLOP reaches a share of the peak. A100: ≥ 128 GFLOP 0.95, ≥ 16 0.90,
          ≥ 1 0.60, below 0.10. Others: the same steps at products that take the same time, times
          0.75 / 0.95 from H100 on, which cannot hold the rated clock within their power; MI300X
          0.50, about 620 of 1307 TFLOP/s in independent measurements (recalled)
Links     the rate of a ring of all ranks, not the rated figure:
          NVLink 2, 3   136 and 227 GB/s on 8 devices · NVLink 4   320 GB/s (all-gather)
          xGMI          75 % of the rate, by protocol · others   the shares named below
Node      memory of its host, of the most common machine: DGX-1 512 GB, AWS
          p4d and p4de 1152 GiB, DGX H100 and H200 2 TB, DGX B200 2 TB, GB200 and GB300 NVL72 960 GB
          per tray of 4, Frontier 512 GB, Azure ND MI300X v5 1850 GiB, AWS g4dn.12xlarge and
          g5.12xlarge 192 GiB, GCP g2-standard-96 384 GiB (all recalled); others: not known
Sources   vendors' data sheets (V100, A100, H100, H200, Blackwell, L4, L40S, A10, T4; Ampere and Ada
          GeForce white papers; CDNA 2 and 3 white papers), peaks agree with torchtitan's table;
          ladder: Calculon (Isaev et al. 2023) for A100, torch's run-time estimator for 0.75;
          links: fits of measured NCCL all-reduces on one node, 1 MB to 1 GB (2 to 23 % off);
          xGMI: AMD's ROCm notes on RCCL, March 2025; latencies: the fits, NCCL's tuning tables
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.errors import PlanError, nearest_word
from shoal.base.estimates.cluster import Device, Link

GIB = 2.0**30
GBIT_BYTES = 1e9 / 8

CONTEXT_BYTES = 1.5 * GIB
"""CUDA context, kernels and communicators; observed 1 to 3 GB, growing with communicators."""

LAUNCH_S = 7e-6
"""Least time of one operation on a GPU: AutoParallel's floor."""

A100_FLOPS = 312e12
A100_LADDER = ((0.0, 0.10), (1e9, 0.60), (16e9, 0.90), (128e9, 0.95))

LINKS = {
    "nvlink2": Link("NVLink 2", 5.6e-6, 136e9, "busbw of 8 V100, fitted"),
    "nvlink3": Link("NVLink 3", 5.6e-6, 227e9, "busbw of 8 A100, fitted"),
    "nvlink4": Link("NVLink 4", 5.6e-6, 320e9, "all-gather of 8 H100"),
    "nvlink5": Link("NVLink 5", 5.6e-6, 640e9, "twice NVLink 4, as rated; not measured"),
    "nvlink-bridge4": Link("NVLink bridge", 5.6e-6, 210e9, "0.7 of 300 GB/s; pairs only"),
    "xgmi2": Link("xGMI", 8e-6, 75e9, "0.75 of 100 GB/s to the next dies"),
    "xgmi3": Link("xGMI 3", 8e-6, 336e9, "7 links of 48 GB/s"),
    "pcie3": Link("PCIe 3 x16", 1e-5, 10e9, "0.65 of 15.8 GB/s, assumed"),
    "pcie4": Link("PCIe 4 x16", 1e-5, 20e9, "0.65 of 31.5 GB/s, assumed"),
    "pcie5": Link("PCIe 5 x16", 1e-5, 41e9, "0.65 of 63 GB/s, assumed"),
}
"""Links inside a node, per rank and direction, when all ranks use them."""

NETWORKS = {
    "ib": Link("InfiniBand", 1.4e-5, 0.92, "NCCL's hop; share of the line rate, assumed"),
    "roce": Link("RoCE", 1.8e-5, 0.88, "share of the line rate, assumed"),
    "eth": Link("Ethernet (TCP)", 5e-5, 0.80, "share of the line rate, assumed"),
}
"""Networks between nodes: latency of a hop and the share (`bytes_per_s`) of the line rate."""


@dataclass(frozen=True)
class DeviceModel:
    """One row of the catalogue: a device and the usual node around it.

    Attributes:
        inside: key of LINKS, or a link of the user's.
        per_node: devices of a usual node.
        network: (key of NETWORKS, cards per node, Gbit/s of each).
        domain: devices that NVLink joins, if they are more than a node.
        host_bytes_per_s: between a device and its host's memory.
        node_bytes: memory of a usual node of `per_node` devices; 0: nodes differ too much.
        disk_bytes_per_s: of a node.
    """

    device: Device
    inside: str | Link
    per_node: int
    network: tuple[str, int, float]
    domain: int = 0
    host_bytes_per_s: float = 20e9
    node_bytes: float = 0.0
    disk_bytes_per_s: float = 2e9

    @property
    def inside_link(self) -> Link:
        """Link between the devices of a node."""
        return self.inside if isinstance(self.inside, Link) else LINKS[self.inside]


def _ladder(flops_per_s: float, top: float) -> tuple[tuple[float, float], ...]:
    """Return a device's rates (FLOP, share of peak), scaled from the A100's at equal times."""
    scale = flops_per_s / A100_FLOPS
    return tuple((flop * scale, share * top / 0.95) for flop, share in A100_LADDER)


def rated_device(
    name: str,
    shown_gib: float,
    terabytes_per_s: float,
    teraflops: dict[str, float],
    *,
    top: float = 0.95,
    source: str = "",
) -> Device:
    """Return a GPU from the figures of its data sheet.

    Args:
        shown_gib: memory that its driver shows.
        terabytes_per_s: bandwidth of that memory, as rated.
        teraflops: dense peaks of matrix products by format; bf16 or fp16 among them.
        top: share of the peak that the largest products reach.
    """
    peak = teraflops.get("bf16") or teraflops["fp16"]
    return Device(
        name=name,
        memory_bytes=shown_gib * GIB,
        matrix_flops_per_s={kind: value * 1e12 for kind, value in teraflops.items()},
        stream_bytes_per_s=terabytes_per_s * 1e12 * 0.9,
        ladder=_ladder(peak * 1e12, top),
        reserved_bytes=CONTEXT_BYTES,
        launch_s=LAUNCH_S,
        source=source or f"{name.split('-')[0]} data sheet",
    )


# fp16 and bf16 with fp32 accumulation; V100 and T4 have no bf16 units: their fp32 rate
_V100 = {"fp64": 7.8, "fp32": 15.7, "bf16": 15.7, "fp16": 125.0}
_A100 = {"fp64": 9.7, "fp32": 19.5, "bf16": 312.0, "fp16": 312.0}
_H100 = {"fp64": 34.0, "fp32": 67.0, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_H100_PCIE = {"fp64": 26.0, "fp32": 51.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0}
_B200 = {"fp64": 37.0, "fp32": 75.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_GB200 = {"fp64": 40.0, "fp32": 80.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}
_GB300 = {"fp64": 1.3, "fp32": 80.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}
_MI250X = {"fp64": 47.9, "fp32": 47.9, "bf16": 191.5, "fp16": 191.5}
_MI300X = {"fp64": 81.7, "fp32": 163.4, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}
_L4 = {"fp64": 0.47, "fp32": 30.3, "bf16": 121.0, "fp16": 121.0, "fp8": 242.0}
_L40S = {"fp64": 1.4, "fp32": 91.6, "bf16": 362.0, "fp16": 362.0, "fp8": 733.0}
_A10 = {"fp64": 0.97, "fp32": 31.2, "bf16": 125.0, "fp16": 125.0}
_T4 = {"fp64": 0.25, "fp32": 8.1, "bf16": 8.1, "fp16": 65.0}
_3090 = {"fp64": 0.56, "fp32": 35.6, "bf16": 71.0, "fp16": 71.0}
_4090 = {"fp64": 1.3, "fp32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}

_IB100, _IB200, _IB400 = ("ib", 4, 100.0), ("ib", 8, 200.0), ("ib", 8, 400.0)


def _rows() -> tuple[DeviceModel, ...]:
    v16 = rated_device("V100-16GB", 15.77, 0.9, _V100)
    v32 = rated_device("V100-32GB", 31.74, 0.9, _V100)
    a40 = rated_device("A100-40GB", 39.39, 1.555, _A100)
    a80 = rated_device("A100-80GB", 79.15, 2.039, _A100)
    a40_pcie = rated_device("A100-PCIe-40GB", 39.39, 1.555, _A100)
    a80_pcie = rated_device("A100-PCIe-80GB", 79.15, 1.935, _A100)
    h80 = rated_device("H100-80GB", 79.11, 3.35, _H100, top=0.75)
    h80_pcie = rated_device("H100-PCIe-80GB", 79.11, 2.039, _H100_PCIE, top=0.75)
    hbm2e = "torchtitan's machines, 95 GiB shown; 500 W, HBM2e"
    h96 = rated_device("H100-96GB", 95.0, 2.4, _H100, top=0.75, source=hbm2e)
    h200 = rated_device("H200-141GB", 139.8, 4.8, _H100, top=0.75)
    b200 = rated_device("B200-180GB", 178.3, 7.7, _B200, top=0.75)
    gb200 = rated_device("GB200-186GB", 184.0, 8.0, _GB200, top=0.75)
    gb300 = rated_device("GB300-288GB", 275.0, 8.0, _GB300, top=0.75)
    mi250 = rated_device("MI250X-64GB", 63.98, 1.6, _MI250X, top=0.75)
    mi300 = rated_device("MI300X-192GB", 191.5, 5.3, _MI300X, top=0.50)
    return (
        DeviceModel(v16, "nvlink2", 8, _IB100, host_bytes_per_s=12e9, node_bytes=512e9),
        DeviceModel(v32, "nvlink2", 8, _IB100, host_bytes_per_s=12e9, node_bytes=512e9),
        DeviceModel(a40, "nvlink3", 8, _IB200, node_bytes=1152 * GIB),
        DeviceModel(a80, "nvlink3", 8, _IB200, node_bytes=1152 * GIB),
        DeviceModel(a40_pcie, "pcie4", 8, ("ib", 2, 200.0)),
        DeviceModel(a80_pcie, "pcie4", 8, ("ib", 2, 200.0)),
        DeviceModel(h80, "nvlink4", 8, _IB400, host_bytes_per_s=50e9, node_bytes=2e12),
        DeviceModel(h80_pcie, "pcie5", 8, ("ib", 2, 400.0), host_bytes_per_s=50e9),
        DeviceModel(h96, "nvlink4", 8, _IB400, host_bytes_per_s=50e9),
        DeviceModel(h200, "nvlink4", 8, _IB400, host_bytes_per_s=50e9, node_bytes=2e12),
        DeviceModel(b200, "nvlink5", 8, _IB400, host_bytes_per_s=50e9, node_bytes=2e12),
        DeviceModel(gb200, "nvlink5", 4, ("ib", 4, 400.0), 72, 200e9, 960e9),
        DeviceModel(gb300, "nvlink5", 4, ("ib", 4, 800.0), 72, 200e9, 960e9),
        DeviceModel(mi250, "xgmi2", 8, ("ib", 4, 200.0), node_bytes=512e9),
        DeviceModel(mi300, "xgmi3", 8, _IB400, host_bytes_per_s=50e9, node_bytes=1850 * GIB),
        DeviceModel(
            rated_device("L4-24GB", 22.0, 0.3, _L4),
            "pcie4",
            8,
            ("eth", 1, 100.0),
            node_bytes=384 * GIB,
        ),
        DeviceModel(rated_device("L40S-48GB", 44.4, 0.864, _L40S), "pcie4", 8, ("eth", 1, 100.0)),
        DeviceModel(
            rated_device("A10-24GB", 22.1, 0.6, _A10),
            "pcie4",
            4,
            ("eth", 1, 100.0),
            node_bytes=192 * GIB,
        ),
        DeviceModel(
            rated_device("T4-16GB", 14.6, 0.32, _T4),
            "pcie3",
            4,
            ("eth", 1, 50.0),
            node_bytes=192 * GIB,
        ),
        DeviceModel(
            rated_device("RTX3090-24GB", 23.69, 0.936, _3090), "pcie4", 4, ("eth", 1, 10.0)
        ),
        DeviceModel(
            rated_device("RTX4090-24GB", 23.64, 1.008, _4090), "pcie4", 4, ("eth", 1, 10.0)
        ),
    )


CATALOGUE = {row.device.name: row for row in _rows()}
"""Rows by name; `get_device_model` also accepts a name without memory or with "SXM"."""

_USUAL = {
    "V100": "V100-32GB",
    "A100": "A100-80GB",
    "A100PCIE": "A100-PCIe-80GB",
    "H100": "H100-80GB",
}
"""Memory of a device if its name states none and there are several."""


_NO_MATTER = (
    *("GEFORCE", "TESLA", "NVIDIA", "AMD", "INSTINCT", "HBM3E", "HBM3", "HBM2E", "HBM2"),
    *("SXM2", "SXM3", "SXM4", "SXM5", "SXM"),
)


def _device_key(name: str) -> str:
    """Return the letters and digits that identify a device: "NVIDIA A100-SXM4-80GB" → "A10080".

    >>> _device_key("NVIDIA A100-SXM4-80GB"), _device_key("rtx 4090"), _device_key("H100-pcie")
    ('A10080', 'RTX4090', 'H100PCIE')
    """
    text = name.upper()
    for word in _NO_MATTER:
        text = text.replace(word, "")
    return "".join(letter for letter in text if letter.isalnum()).removesuffix("GB")


def _family(name: str) -> str:
    return name.rsplit("-", 1)[0]


def _spellings() -> dict[str, str]:
    """Return every spelling of a device → its name in the catalogue."""
    known: dict[str, str] = {}
    for name in CATALOGUE:
        bare = _family(name)
        known.setdefault(_device_key(bare), _USUAL.get(_device_key(bare), name))
        known.setdefault(_device_key(bare).removeprefix("RTX"), name)
        known[_device_key(name)] = name
    return known


_KNOWN = _spellings()


def get_device_model(name: str, where: str = "--on") -> DeviceModel:
    """Look up the catalogue's row for a device name, in any usual spelling.

    Raises:
        PlanError: unknown device; names the nearest one.

    >>> get_device_model("h100").device.name, get_device_model("A100-SXM4-40GB").device.name
    ('H100-80GB', 'A100-40GB')
    """
    plain = _device_key(name)
    if plain in _KNOWN:
        return CATALOGUE[_KNOWN[plain]]
    close = _KNOWN.get(nearest_word(plain, _KNOWN) or "")
    hint = f"; try: {close}" if close else ""
    families = ", ".join(dict.fromkeys(_family(key) for key in CATALOGUE))
    raise PlanError(
        f'{where}: "{name}" is no device of the catalogue ({families}){hint or "; try: "}'
        f"{', or ' if hint else ''}a file of its figures, as in 8x{name.replace(' ', '-')}.toml"
    )


def network_link(kind: str, cards: int, gbit_per_s: float, per_node: int) -> Link:
    """Return the link of one of `per_node` ranks that all use their node's network cards.

    Args:
        kind: ib, roce or eth.
        cards: per node.
        gbit_per_s: line rate of each.

    >>> network_link("ib", 8, 400, 8).bytes_per_s / 1e9
    46.0
    """
    family = NETWORKS[kind]
    rate = family.bytes_per_s * cards * gbit_per_s * GBIT_BYTES / per_node
    name = f"{family.name} {cards}×{gbit_per_s:g} Gbit/s"
    return Link(name, family.latency_s, rate, family.source)
