"""What one side computed: losses, norms, the gradients of every step, and where it ended.

Rank 0 keeps the tensors, whole and on the CPU; the other ranks take part in gathering them. Each
rank's own view of its numbers and decisions is kept too, and a digest of all it holds that should
be equal everywhere: a rank that drifts alone is invisible from rank 0.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shoal.base.layout import Layout
from shoal.base.phases import counting
from shoal.base.placement import Placement
from shoal.fabric import World
from shoal.parallel.compare_weights import tensor_digest
from shoal.parallel.full_state import gather_gradients, gather_weights
from shoal.parallel.program import Program
from shoal.proof.ownership import Apart, divided, replicas_apart
from shoal.proof.side import Side, Trial
from shoal.trainer.run import Run
from shoal.trainer.step import StepResult

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One step of one run: what `run.step` told. Numbers that are not finite are None."""

    label: str
    step: int
    loss: float | None
    grad_norm: float | None
    targets: float
    skipped: bool

    @staticmethod
    def of(label: str, result: StepResult) -> Row:
        """The row of a step's result."""
        loss, norm = (v if math.isfinite(v) else None for v in (result.loss, result.grad_norm))
        return Row(label, result.step, loss, norm, float(result.targets), result.skipped)


@dataclass
class Record:
    """Everything that must agree; names of a labelled run are `label/name`.

    rows             every step of every run, in the order in which they were taken
    gradients        for each row the mean gradient, clipped, as the optimizer saw it; a parameter
                     that nothing used is missing
    start, weights   parameters (start: buffers too) before the first and after the last step
    buffers          after the last step
    rank_rows        rows as each rank saw them · drift  tensors that differ between ranks: groups
                     of ranks that agree
    trainable        their names, in the module's order · frozen  those that must not move
    tied             second name → first name · buckets  names that travel together, in order
    clip             largest gradient norm · layout  of the side
    held             placement of every trainable parameter, where ranks share one model's work
    experts          parameters that are stacks of experts, where those are dealt out
    apart            for each row, parameters whose holders have different gradients
    casts            lines of code whose casts to a narrower format were lifted
    """

    rows: list[Row] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    start: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    rank_rows: list[list[Row]] = field(default_factory=list)
    drift: dict[str, list[list[int]]] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    buckets: list[list[str]] = field(default_factory=list)
    clip: float = 0.0
    layout: Layout = field(default_factory=Layout)
    held: dict[str, Placement] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    apart: list[dict[str, Apart]] = field(default_factory=list)
    casts: tuple[str, ...] = ()


def record(side: Side, trial: Trial) -> Record:
    """Train a trial on one side and keep what must agree; every rank of the side calls it.

    Gives    the record; ranks other than 0 get one without tensors
    Errors   whatever the trial or the training raises
    """
    found = Record(clip=side.clip)
    before = side.on_run

    def begin(label: str, run: Run) -> None:
        before(label, run)
        _describe(found, label, run)
        found.start.update(_labelled(label, gather_weights(run.program, only_first=True)))

    side.on_run = begin
    for label, result in counting("steps", side.steps, trial(side)):
        gradients, used = gather_gradients(side.runs[label].program, only_first=True)
        mine = {name: gradients[name] for name in gradients if name in used}
        found.rows.append(Row.of(label, result))
        found.gradients.append({} if result.skipped else _labelled(label, mine))
        apart = {} if result.skipped else replicas_apart(side.runs[label].program)
        found.apart.append(_labelled(label, apart))
        if side.finished():
            break
    digests: dict[str, list[str]] = {}
    for label, run in side.runs.items():
        found.weights.update(_labelled(label, gather_weights(run.program, only_first=True)))
        digests.update(_labelled(label, replicated_digests(run.program)))
    parameters = {*found.trainable, *found.frozen}
    for name in [n for n in found.weights if n not in parameters]:
        found.buffers[name] = found.weights.pop(name)
    found.drift = _differing(side.world, digests)
    told = side.world.gather_json([asdict(row) for row in found.rows])
    found.rank_rows = [[Row(**row) for row in rows] for rows in told]
    side.on_run = before
    return found


def replicated_digests(program: Program) -> dict[str, list[str]]:
    """[which part, SHA-256] of what this rank holds: equal parts must be equal on all ranks."""
    tensors = [*program.module.named_parameters(), *program.module.named_buffers()]
    found = {}
    for name, tensor in tensors:
        if hasattr(tensor, "to_local") or tensor.is_meta:  # in `parts`, or another stage's
            continue
        part = str(program.place(name).slices) if name in program.cuts else ""
        found[name] = [part, tensor_digest(tensor)]
    for name, (tensor, shard) in program.parts.items():
        if shard.slices:
            found[name] = [str(shard.slices), tensor_digest(tensor)]
    return found


def _labelled(label: str, named: dict[str, Any]) -> dict[str, Any]:
    return {f"{label}/{name}" if label else name: value for name, value in named.items()}


def _describe(found: Record, label: str, run: Run) -> None:
    program = run.program

    def full(name: str) -> str:
        return f"{label}/{name}" if label else name

    found.trainable += [full(name) for name in program.names]
    still = run.world.gather_json(list(program.frozen))
    found.frozen += [full(name) for name in dict.fromkeys(n for told in still for n in told)]
    found.tied |= {full(second): full(first) for second, first in program.aliases.items()}
    found.layout = run.plan.layout
    if divided(program):
        found.held |= _labelled(label, {name: program.rows[name] for name in program.names})
    found.experts += [full(name) for name, cut in program.cuts.items() if cut.axis == "ep"]
    found.buckets += [[full(name) for name in bucket.names] for bucket in run.plan.buckets]


def _differing(world: World, digests: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """Names of which two ranks hold the same part with other bits: groups of ranks that agree."""
    total = hashlib.sha256(repr(list(digests.items())).encode()).hexdigest()
    if len(set(world.gather_json(total))) == 1:
        return {}
    seen: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, told in enumerate(world.gather_json(digests)):
        for name, (part, digest) in told.items():
            seen.setdefault((name, part), {}).setdefault(digest, []).append(rank)
    return {name: list(ranks.values()) for (name, _), ranks in seen.items() if len(ranks) > 1}
