"""Record of one side: losses, norms, the gradients of every step, and the final weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.proof.distances import TensorDistances
from shoal.proof.ownership_mismatch import OwnershipMismatch
from shoal.proof.tensor_spill import Tensors, TensorSpill
from shoal.trainer.step.optimizer_step import StepResult


@dataclass(frozen=True)
class StepRow:
    """One step of one run: the result of `run.step`. Numbers that are not finite are None."""

    label: str
    step: int
    loss: float | None
    grad_norm: float | None
    targets: float
    skipped: bool

    @staticmethod
    def of(label: str, result: StepResult) -> StepRow:
        """Return the row of a step's result."""
        loss, norm = (v if math.isfinite(v) else None for v in (result.loss, result.grad_norm))
        return StepRow(label, result.step, loss, norm, float(result.targets), result.skipped)


@dataclass
class TrajectoryRecord:
    """All numbers that must agree; names of a labelled run are `label/name`.

    Attributes:
        rows: every step of every run, in the order in which they were taken.
        gradients: for each row the mean gradient, clipped, as the optimizer saw it; a parameter
            that nothing used is missing. Of a layout: in its first wrong row alone.
        start, weights: parameters (start: buffers too) before the first and after the last step; of
            a layout whose every number is right: none after it.
        buffers: after the last step, as weights.
        far: of a layout: distances of its tensors from those of one process.
        rank_rows: rows of each rank.
        drift: tensors that differ between ranks: groups of ranks that agree.
        trainable: their names, in the module's order.
        frozen: those that must not move.
        tied: second name → first name.
        buckets: names that are reduced together, in order.
        clip: largest gradient norm.
        layout: of the side.
        held: placement of every trainable parameter, where ranks share one model's work.
        experts: parameters that are stacks of experts, where those are distributed over ranks.
        apart: for each row as in gradients, parameters whose holders have different ones.
        casts: lines of code whose casts to a narrower format were lifted.
        shelf: where the tensors are stored.
    """

    rows: list[StepRow] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    start: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    rank_rows: list[list[StepRow]] = field(default_factory=list)
    drift: dict[str, list[list[int]]] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    buckets: list[list[str]] = field(default_factory=list)
    clip: float = 0.0
    layout: Layout = field(default_factory=Layout)
    held: dict[str, Placement] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    apart: list[dict[str, OwnershipMismatch]] = field(default_factory=list)
    casts: tuple[str, ...] = ()
    far: TensorDistances | None = None
    shelf: TensorSpill = field(default_factory=TensorSpill)
