"""A layout: how many ways each axis of a run splits the work; a strategy is a name for one.

Axes, outermost (slowest link) first: islands · pp · dp_replicate · dp_shard · cp · tp. The product
of the degrees is the number of processes. A strategy name expands to degrees at once, so that
everything later multiplies degrees and nothing asks for names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError, one_of

AXES = ("islands", "pp", "dp_replicate", "dp_shard", "cp", "tp")

STRATEGIES = {
    "single": "one process",
    "dp": "one process, several threads or devices, each with a replica (for comparison)",
    "ddp": "every process holds the whole model; gradients are summed",
    "zero1": "ddp, with the optimizer's state split over the processes",
    "zero2": "zero1, with the summed gradients split as well",
    "zero3": "zero2, with the parameters split as well; the same as fsdp",
    "fsdp": "zero3",
    "hsdp": "groups of processes that hold one copy in shards, several copies",
}
"""Strategies that this version builds."""

PLANNED = (
    "tp", "cp", "ep", "pp", "gpipe", "afab",
    "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe", "3d", "local-sgd", "diloco",
    "streaming-diloco", "sparse-loco", "noloco", "fedavg", "fedprox", "fedopt", "scaffold",
    "branch-train-merge", "parameter-server",
)  # fmt: skip
"""Strategies of the vocabulary that are not built yet: naming one is a clear refusal."""

BUILT_AXES = ("dp_replicate", "dp_shard")
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis; all 1 is one process.

    zero      what is split over `dp_shard`: 0 nothing, 1 optimizer state, 2 gradients too,
              3 parameters too
    threads   replicas within one process (`dp`); no axis of the mesh
    """

    islands: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 0
    threads: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of every axis of the mesh, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def processes(self) -> int:
        """World size: the product of all degrees.

        >>> Layout(dp_replicate=4).processes
        4
        """
        return math.prod(self.degrees.values())

    @property
    def data_degree(self) -> int:
        """How many ranks draw different micro-batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def strategy(self) -> str:
        """The name of this layout in the vocabulary.

        >>> Layout(dp_shard=4, zero=3).strategy, Layout(dp_replicate=2, dp_shard=2, zero=3).strategy
        ('fsdp', 'hsdp')
        >>> Layout(pp=4, dp_replicate=2, tp=8).strategy, Layout(dp_shard=4, zero=3, tp=2).strategy
        ('3d', 'fsdp + tp')
        """
        if self.processes == 1:
            return "dp" if self.threads > 1 else "single"
        names = [axis for axis in ("pp", "cp", "tp") if self.degrees[axis] > 1]
        if not names:
            return self._data_strategy
        if self.data_degree > 1 and names == ["pp", "tp"]:
            return "3d"
        return " + ".join(([self._data_strategy] if self.data_degree > 1 else []) + names)

    @property
    def _data_strategy(self) -> str:
        """The name of what the data-parallel axes do."""
        if self.dp_shard == 1:
            return "ddp"
        if self.zero < 3:
            return f"zero{self.zero}"
        return "fsdp" if self.dp_replicate == 1 else "hsdp"

    def text(self) -> str:
        """As a person writes it: the strategy, then the degrees that are not 1.

        >>> Layout(dp_replicate=2).text(), Layout(threads=2).text()
        ('ddp (dp_replicate = 2)', 'dp (threads = 2)')
        """
        shown = {**self.degrees, "threads": self.threads}
        if self.strategy == "3d" and self.zero:
            shown["zero"] = self.zero
        degrees = ", ".join(f"{k} = {v}" for k, v in shown.items() if v != 1)
        return f"{self.strategy} ({degrees})" if degrees else self.strategy


def expand(strategy: str, processes: int, *, threads: int = 0, zero: int | None = None) -> Layout:
    """The degrees that a strategy name means on `processes` processes.

    threads   replicas of `dp`; 0: two · zero  a stage that the user gave beside the name
    Errors    PlanError for an unknown name, one that is not built yet, or an impossible size

    >>> expand("ddp", 4).dp_replicate, expand("zero2", 4).zero, expand("hsdp", 4).dp_shard
    (4, 2, 2)
    """
    if strategy in PLANNED:
        raise PlanError(
            f"layout.strategy = {strategy}: not built in this version, which has "
            f"{', '.join(STRATEGIES)}; nearest: layout.strategy=ddp"
        )
    if strategy not in STRATEGIES:
        raise PlanError(one_of("layout.strategy", strategy, [*STRATEGIES, *PLANNED]))
    stage = STAGES.get(strategy, 0)
    if zero is not None and zero != stage:
        names = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
        raise PlanError(
            f"layout.zero = {zero}: layout.strategy = {strategy} is stage {stage}; nearest: "
            f"layout.strategy={names.get(zero, 'zero1')}, or leave layout.zero out"
        )
    if threads and strategy != "dp":
        raise PlanError(
            f"layout.threads = {threads}: only layout.strategy=dp runs replicas in threads, "
            f"{strategy} has processes; nearest: launch.processes={threads}"
        )
    if strategy in ("single", "dp"):
        return _one_process(strategy, processes, threads)
    if processes == 1:
        return Layout()
    if strategy == "ddp":
        return Layout(dp_replicate=processes)
    if strategy != "hsdp":
        return Layout(dp_shard=processes, zero=stage)
    if processes % 2 or processes < 4:
        raise PlanError(
            f"layout.strategy = hsdp: is at least 2 × 2 processes, got launch.processes = "
            f"{processes}; nearest legal: launch.processes={max(4, processes // 4 * 4)}, or "
            f"layout.strategy=fsdp"
        )
    return Layout(dp_replicate=2, dp_shard=processes // 2, zero=3)


def _one_process(strategy: str, processes: int, threads: int) -> Layout:
    if processes != 1:
        raise PlanError(
            f"layout.strategy = {strategy}: is one process, got launch.processes = {processes}; "
            f"nearest legal: launch.processes=1, or layout.strategy=ddp"
        )
    return Layout(threads=threads or 2) if strategy == "dp" else Layout()


def check_degrees(degrees: dict[str, int], processes: int, zero: int | None = None) -> Layout:
    """The layout with exactly these degrees; their product must be the number of processes.

    zero     what `dp_shard` splits; default: everything (3)
    Errors   PlanError with the nearest legal choice, or for an axis that is not built yet

    >>> check_degrees({"dp_replicate": 2}, 2).strategy, check_degrees({"dp_shard": 2}, 2).strategy
    ('ddp', 'fsdp')
    """
    for axis, degree in degrees.items():
        if axis not in AXES:
            raise PlanError(one_of("layout", axis, AXES))
        if degree > 1 and axis not in BUILT_AXES:
            raise PlanError(
                f"layout.{axis} = {degree}: not built in this version, which splits "
                f"{' and '.join(BUILT_AXES)} only; nearest: layout.{axis}=1"
            )
    layout = Layout(**degrees)
    if layout.processes != processes:
        named = " × ".join(f"{k} {v}" for k, v in degrees.items())
        raise PlanError(
            f"layout: {named} = {layout.processes} processes, but launch.processes = {processes}; "
            f"nearest legal: layout.dp_replicate={processes}, or "
            f"launch.processes={layout.processes}"
        )
    return replace(layout, zero=_stage(layout, zero))


def planned_degrees(degrees: dict[str, int], processes: int, zero: int | None = None) -> Layout:
    """A layout to be planned: any axis of the vocabulary; data-parallel degrees left out follow.

    zero     what `dp_shard` splits; default: everything (3)
    Errors   PlanError where the degrees do not divide the processes

    >>> planned_degrees({"tp": 8, "pp": 4}, 128).dp_replicate
    4
    """
    for axis, degree in degrees.items():
        if degree < 1:
            raise PlanError(f"layout.{axis} = {degree}: at least 1; nearest: layout.{axis}=1")
    layout = Layout(**degrees)
    if "dp_replicate" not in degrees and processes % layout.processes == 0:
        layout = replace(layout, dp_replicate=processes // layout.processes)
    if layout.processes != processes:
        named = " × ".join(f"{k} {v}" for k, v in degrees.items())
        raise PlanError(
            f"layout: {named} = {layout.processes} devices, but there are {processes}; nearest "
            f"legal: leave layout.dp_replicate out, or degrees whose product divides {processes}"
        )
    return replace(layout, zero=_stage(layout, zero))


def _stage(layout: Layout, zero: int | None) -> int:
    """The stage that these degrees carry."""
    if zero is not None and zero not in (0, 1, 2, 3):
        raise PlanError(f"layout.zero = {zero}: a stage is 0, 1, 2 or 3; nearest: layout.zero=3")
    if layout.dp_shard == 1:
        if zero:
            raise PlanError(
                f"layout.zero = {zero}: splits over layout.dp_shard, which is 1; nearest: "
                f"layout.dp_shard={max(2, layout.dp_replicate)}"
            )
        return 0
    if zero == 0:
        raise PlanError(
            f"layout.zero = 0: splits nothing over layout.dp_shard = {layout.dp_shard}; nearest: "
            f"layout.zero=3, or layout.dp_replicate={layout.processes}"
        )
    if zero in (1, 2) and layout.dp_replicate > 1:
        raise PlanError(
            f"layout.zero = {zero}: carries dp_shard alone, got dp_replicate = "
            f"{layout.dp_replicate} × dp_shard = {layout.dp_shard}; nearest: layout.zero=3 (hsdp), "
            f"or layout.dp_shard={layout.processes}"
        )
    return 3 if zero is None else zero
