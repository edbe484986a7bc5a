"""Train a trial on one side and record the numbers that must agree; compare a layout's at once.

One process comes first: rank 0 stores its tensors, whole, in its record. The layout's are gathered
to rank 0 one by one, compared with those, and freed. Tensors that a diagnosis needs are gathered
once more and kept: gradients of the first step that is wrong, weights if any are.
Each rank's own view of its numbers and decisions is kept too, and a digest of all tensors that
should be equal everywhere: a rank that drifts alone is invisible from rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from shoal.fabric import World
from shoal.parallel.build.full_state import iterate_gradients, iterate_weights
from shoal.parallel.compare_weights import tensor_digest
from shoal.parallel.program import Program
from shoal.proof.distances import TensorDistances
from shoal.proof.equality_bounds import EqualityBounds
from shoal.proof.ownership_mismatch import (
    OwnershipMismatch,
    find_ownership_mismatches,
    find_unequal_ranks,
    is_model_parallel,
)
from shoal.proof.tensor_spill import OverlaidTensors, Tensors, TensorSpill
from shoal.proof.trajectory_record import StepRow, TrajectoryRecord
from shoal.proof.trial_side import Trial, TrialSide
from shoal.proof.verdict import compare_records, gradient_differs
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import StepResult
from shoal.wire.phases import iter_with_progress

T = TypeVar("T")
Named = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class ReferenceRecord:
    """Reference of a layout's side: one process's record, None on ranks other than 0."""

    expected: TrajectoryRecord | None
    bounds: EqualityBounds


def record_trial(
    side: TrialSide,
    trial: Trial,
    folder: Path | None = None,
    against: ReferenceRecord | None = None,
) -> TrajectoryRecord:
    """Train a trial on one side and record the numbers that must agree (collective).

    Args:
        folder: of files for tensors that exceed memory.
        against: compare step by step, and keep wrong tensors only; None: keep all.

    Returns:
        The record; ranks other than 0 get one without tensors.

    Raises:
        Exception: any of the trial's or the training's.
    """
    found = TrajectoryRecord(clip=side.clip, shelf=TensorSpill(folder))
    notes = (
        _FullRecorder(found) if against is None else _ComparingRecorder(found, against, side.world)
    )
    before = side.on_run

    def start_recording(label: str, run: Run) -> None:
        before(label, run)
        _describe_run(found, label, run)
        notes.start(_prefix_names(label, iterate_weights(run.program)))

    side.on_run = start_recording
    for label, result in iter_with_progress("steps", side.steps, trial(side)):
        found.rows.append(StepRow.of(label, result))
        notes.step(label, result, side.runs[label].program)
        if side.is_finished():
            break
    digests: dict[str, list[str]] = {}
    for label, run in side.runs.items():
        digests.update(_prefix_label(label, digest_replicas(run.program)))
    found.drift = find_unequal_ranks(side.world, digests)
    told = side.world.gather_json([asdict(row) for row in found.rows])
    found.rank_rows = [[StepRow(**row) for row in rows] for rows in told]
    notes.end(side.runs)
    side.on_run = before
    return found


@dataclass
class _FullRecorder:
    """Recorder that keeps every tensor."""

    found: TrajectoryRecord

    def __post_init__(self) -> None:
        self.found.start = self.begun = self.found.shelf.keep(())

    def start(self, named: Named) -> None:
        for name, tensor in named:
            self.begun.add(name, tensor)

    def step(self, label: str, result: StepResult, program: Program) -> None:
        self.found.gradients.append(
            self.found.shelf.keep(_gather_gradients(label, result, program))
        )
        self.found.apart.append({})

    def end(self, runs: Mapping[str, Run]) -> None:
        _store_final(self.found, runs)


class _ComparingRecorder:
    """Recorder that compares every tensor with one process's, and keeps those for a diagnosis."""

    def __init__(self, found: TrajectoryRecord, against: ReferenceRecord, world: World) -> None:
        self.found, self.world, self.bounds = found, world, against.bounds
        self.expected = against.expected or TrajectoryRecord()
        self.far = found.far = TensorDistances()
        self.begun: list[str] = []
        self.other = found.shelf.keep(())
        self.is_wrong = False  # a row was, and is kept

    def start(self, named: Named) -> None:
        expected = self.expected.start
        for name, tensor in named:
            self.begun.append(name)
            if name not in expected or not _have_same_bits(tensor, expected[name]):
                self.other.add(name, tensor)

    def step(self, label: str, result: StepResult, program: Program) -> None:
        found, number, gradients = self.found, len(self.found.gradients), self.expected.gradients
        named = _gather_gradients(label, result, program)
        expected = gradients[number] if number < len(gradients) else {}
        self.far.add_row(expected, named, self.bounds.is_judged(result.step))
        kept: Tensors = {}
        apart: dict[str, OwnershipMismatch] = {}
        if not self.is_wrong and self._broadcast_finding(
            number < len(gradients) and self._differs(number)
        ):
            self.is_wrong = True
            kept = found.shelf.keep(_gather_gradients(label, result, program))
            apart = (
                {} if result.skipped else _prefix_label(label, find_ownership_mismatches(program))
            )
        found.gradients.append(kept)
        found.apart.append(apart)

    def end(self, runs: Mapping[str, Run]) -> None:
        self.found.start = OverlaidTensors(tuple(self.begun), self.expected.start, self.other)
        self.far.end(self.expected.weights, self.expected.buffers, _gather_weights(runs))
        first = self.world.is_first
        if self._broadcast_finding(
            first and not compare_records(self.expected, self.found, self.bounds).equal
        ):
            _store_final(self.found, runs)

    def _differs(self, number: int) -> bool:
        return gradient_differs(self.expected, self.found, number, self.bounds)

    def _broadcast_finding(self, on_first: bool) -> bool:
        """Return rank 0's finding on every rank."""
        return bool(self.world.broadcast_json(on_first))


def _gather_gradients(label: str, result: StepResult, program: Program) -> Named:
    """Gather a step's gradients on rank 0 as the optimizer saw them (collective).

    Args:
        label: prefix of the names, for a trial of several runs.
        result: result of the step.
        program: the run's program.

    Returns:
        (name, whole gradient) of each used parameter on rank 0; none for a skipped step.
    """
    each, used = iterate_gradients(program)
    mine = ((n, tensor) for n, tensor in each if n in used and not result.skipped)
    return _prefix_names(label, mine)


def _gather_weights(runs: Mapping[str, Run]) -> Named:
    """Gather the whole parameters and buffers of all runs on rank 0, one by one (collective)."""
    for label, run in runs.items():
        yield from _prefix_names(label, iterate_weights(run.program))


def _store_final(found: TrajectoryRecord, runs: Mapping[str, Run]) -> None:
    """Store the final weights and buffers of a side."""
    weights, buffers = found.shelf.keep(()), found.shelf.keep(())
    parameters = {*found.trainable, *found.frozen}
    for name, tensor in _gather_weights(runs):
        (weights if name in parameters else buffers).add(name, tensor)
    found.weights, found.buffers = weights, buffers


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if dtype and all elements of two tensors are equal."""
    return one.dtype == other.dtype and torch.equal(one.cpu(), other)


def digest_replicas(program: Program) -> dict[str, list[str]]:
    """Return [part, SHA-256] of this rank's tensors: equal parts must be equal on all ranks."""
    tensors = [*program.module.named_parameters(), *program.module.named_buffers()]
    found = {}
    for name, tensor in tensors:
        if hasattr(tensor, "to_local") or tensor.is_meta:  # in `parts`, or another stage's
            continue
        part = str(program.shard_of(name).slices) if name in program.cuts else ""
        found[name] = [part, tensor_digest(tensor)]
    for name, (tensor, shard) in program.parts.items():
        if shard.slices:
            found[name] = [str(shard.slices), tensor_digest(tensor)]
    return found


def _prefix_label(label: str, named: dict[str, Any]) -> dict[str, Any]:
    return dict(_prefix_names(label, named.items()))


def _prefix_names(label: str, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield the items with the label and a slash before their names; unchanged without label."""
    return ((f"{label}/{name}" if label else name, value) for name, value in named)


def _describe_run(found: TrajectoryRecord, label: str, run: Run) -> None:
    program = run.program

    def full(name: str) -> str:
        return f"{label}/{name}" if label else name

    found.trainable += [full(name) for name in program.names]
    still = run.world.gather_json(list(program.frozen))
    found.frozen += [full(name) for name in dict.fromkeys(n for told in still for n in told)]
    found.tied |= {full(second): full(first) for second, first in program.aliases.items()}
    found.layout = run.plan.layout
    if is_model_parallel(program):
        found.held |= _prefix_label(label, {name: program.rows[name] for name in program.names})
    found.experts += [full(name) for name, cut in program.cuts.items() if cut.axis == "ep"]
    found.buckets += [[full(name) for name in bucket.names] for bucket in run.plan.buckets]
