"""A layout: how many ways each axis of a run splits the work; a strategy is a name for one.

Axes, outermost (slowest link) first: islands · pp · dp_replicate · dp_shard · cp · tp. The product
of the degrees is the number of processes. A strategy name expands to degrees at once, so that
everything later multiplies degrees and nothing asks for names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shoal.base.errors import PlanError, one_of

AXES = ("islands", "pp", "dp_replicate", "dp_shard", "cp", "tp")

STRATEGIES = {
    "single": "one process",
    "ddp": "every process holds the whole model; gradients are summed",
}
"""Strategies that this version builds."""

PLANNED = (
    "dp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "cp", "ep", "pp", "gpipe", "afab",
    "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe", "3d", "local-sgd", "diloco",
    "streaming-diloco", "sparse-loco", "noloco", "fedavg", "fedprox", "fedopt", "scaffold",
    "branch-train-merge", "parameter-server",
)  # fmt: skip
"""Strategies of the vocabulary that are not built yet: naming one is a clear refusal."""


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis; all 1 is one process."""

    islands: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def processes(self) -> int:
        """World size: the product of all degrees.

        >>> Layout(dp_replicate=4).processes
        4
        """
        product = 1
        for degree in asdict(self).values():
            product *= degree
        return product

    @property
    def data_degree(self) -> int:
        """How many ranks draw different micro-batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def strategy(self) -> str:
        """The name of this layout in the vocabulary."""
        return "single" if self.processes == 1 else "ddp"

    def text(self) -> str:
        """As a person writes it: the strategy, then the degrees that are not 1.

        >>> Layout(dp_replicate=2).text()
        'ddp (dp_replicate = 2)'
        """
        degrees = ", ".join(f"{k} = {v}" for k, v in asdict(self).items() if v != 1)
        return f"{self.strategy} ({degrees})" if degrees else self.strategy


def expand(strategy: str, processes: int) -> Layout:
    """The degrees that a strategy name means on `processes` processes.

    Errors: PlanError for an unknown name, one that is not built yet, or an impossible size.

    >>> expand("ddp", 4).dp_replicate
    4
    """
    if strategy in PLANNED:
        raise PlanError(
            f"layout.strategy = {strategy}: not built in this version, which has "
            f"{', '.join(STRATEGIES)}; nearest: layout.strategy=ddp"
        )
    if strategy not in STRATEGIES:
        raise PlanError(one_of("layout.strategy", strategy, [*STRATEGIES, *PLANNED]))
    if strategy == "single":
        if processes != 1:
            raise PlanError(
                f"layout.strategy = single: is one process, got launch.processes = {processes}; "
                f"nearest legal: launch.processes=1, or layout.strategy=ddp"
            )
        return Layout()
    return Layout(dp_replicate=processes)


def check_degrees(degrees: dict[str, int], processes: int) -> Layout:
    """The layout with exactly these degrees; their product must be the number of processes.

    Errors: PlanError with the nearest legal choice, or for an axis that is not built yet.

    >>> check_degrees({"dp_replicate": 2}, 2).strategy
    'ddp'
    """
    for axis, degree in degrees.items():
        if axis not in AXES:
            raise PlanError(one_of("layout", axis, AXES))
        if degree > 1 and axis != "dp_replicate":
            raise PlanError(
                f"layout.{axis} = {degree}: not built in this version, which splits dp_replicate "
                f"only; nearest: layout.{axis}=1"
            )
    layout = Layout(**degrees)
    if layout.processes != processes:
        named = " × ".join(f"{k} {v}" for k, v in degrees.items())
        raise PlanError(
            f"layout: {named} = {layout.processes} processes, but launch.processes = {processes}; "
            f"nearest legal: layout.dp_replicate={processes}, or "
            f"launch.processes={layout.processes}"
        )
    return layout
