"""A cluster as plain numbers: compute and memory of a device, latency and bandwidth of links.

A rank is one device. A link's figures are those of one rank when all ranks of a group use it at
once. So a collective over n ranks of M bytes takes rounds · latency + bytes sent / bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One accelerator, or the cores of one process.

    Attributes:
        matrix_flops_per_s: dense peak by number format: fp64 fp32 bf16 fp16 fp8.
        ladder: (FLOP of one product, share of that peak reached), ascending; () = as rated.
        ladders: the same by format, for formats that have their own (see `ladder_of`).
        stream_bytes_per_s: bandwidth of its memory.
        memory_bytes: memory that one rank may use.
        stream_ladder: (bytes of one tensor, bytes per second), ascending: caches; () = as above.
        reserved_bytes: of these, the bytes of context, libraries and communicators outside the
            tensors.
        launch_s: least seconds of one operation.
        kind: gpu or cpu.
        source: source of the figures.

    Between two rungs of a ladder values are interpolated.
    """

    name: str
    memory_bytes: float
    matrix_flops_per_s: dict[str, float]
    stream_bytes_per_s: float
    ladder: tuple[tuple[float, float], ...] = ()
    reserved_bytes: float = 0.0
    launch_s: float = 0.0
    kind: str = "gpu"
    source: str = ""
    ladders: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    stream_ladder: tuple[tuple[float, float], ...] = ()

    def ladder_of(self, number: str) -> tuple[tuple[float, float], ...]:
        """Return a format's rates: (FLOP of a matrix product, share of peak), ascending; () = peak.

        >>> Device("d", 1, {"bf16": 1.0}, 1, ladders={"bf16": ((1e6, 0.5),)}).ladder_of("bf16")
        ((1000000.0, 0.5),)
        """
        return self.ladders.get(number, self.ladder)


@dataclass(frozen=True)
class Link:
    """A link as seen by one rank while all ranks of its group use it.

    Attributes:
        latency_s: seconds per message.
        bytes_per_s: in each direction.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    source: str = ""


@dataclass(frozen=True)
class Calibration:
    """Constants of a machine type that are measured or fitted, never those of one model.

    Attributes:
        efficiency: by term of the step time (matrix, elementwise, tensor, …;
            forecast/time/step_time.py): seconds measured per second of plain arithmetic, so above 1
            is slower; an absent term counts as 1, one such as tensor_across first as the one
            without its ending.
        constants_s: seconds per block, micro_batch and step (absent: 0), and per operation and
            operation_backward.
        allocator: reserved / allocated bytes of the caching allocator; 1 on a GPU: not measured.
        source: source of the figures, with their error.
        time_error: largest relative error of nine of ten predicted steps; 0: not known.
    """

    efficiency: dict[str, float] = field(default_factory=dict)
    constants_s: dict[str, float] = field(default_factory=dict)
    allocator: float = 1.0
    source: str = ""
    time_error: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal nodes of `per_node` equal devices each, and the links between them.

    Attributes:
        device: one of them.
        inside: link within a node.
        across: link between nodes, as one rank sees it.
        groups: further parts of a mixed cluster, each a Cluster.
        islands, between: number of such clusters joined by a slow link, and that link; `devices`
            counts one cluster.
        host_bytes_per_s: bandwidth between a device and its host's memory.
        disk_bytes_per_s: write bandwidth of the disk; 0: not known.
        node_memory_bytes: host memory of one node, which its ranks share; 0: not known.
    """

    device: Device
    nodes: int
    per_node: int
    inside: Link
    across: Link
    groups: tuple[Cluster, ...] = ()
    islands: int = 1
    between: Link | None = None
    calibration: Calibration = Calibration()
    host_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    name: str = ""
    node_memory_bytes: float = 0.0

    @property
    def devices(self) -> int:
        """Number of devices of one island.

        >>> link = Link("wire", 1e-5, 1e9)
        >>> Cluster(Device("d", 2**30, {}, 1e9), 2, 8, link, link).devices
        16
        """
        return self.nodes * self.per_node + sum(group.devices for group in self.groups)
