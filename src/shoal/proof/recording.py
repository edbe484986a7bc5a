"""Train a trial on one side and record the numbers that must agree; compare a layout's at once.

One process comes first: rank 0 stores its tensors, whole, in its record. The layout's are gathered
to rank 0 one by one, compared with those, and freed. Tensors that a diagnosis needs are gathered
once more and kept: gradients of the first step that is wrong, weights if any are.
Each rank's own view of its numbers and decisions is kept too, and a digest of all tensors that
should be equal everywhere: a rank that drifts alone is invisible from rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from shoal.fabric import World
from shoal.parallel.build.full_state import each_gradient, each_weight
from shoal.parallel.compare_weights import tensor_digest
from shoal.parallel.program import Program
from shoal.proof.distances import Distances
from shoal.proof.equality_bounds import Bounds
from shoal.proof.ownership_mismatch import Apart, divided, replicas_apart
from shoal.proof.tensor_spill import Chosen, Shelf, Tensors
from shoal.proof.trajectory_record import Record, Row
from shoal.proof.trial_side import Side, Trial
from shoal.proof.verdict import compare, gradient_differs
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import StepResult
from shoal.wire.phases import counting

T = TypeVar("T")
Named = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Against:
    """Reference of a layout's side: one process's record, None on ranks other than 0."""

    expected: Record | None
    bounds: Bounds


def record(
    side: Side, trial: Trial, folder: Path | None = None, against: Against | None = None
) -> Record:
    """Train a trial on one side and record the numbers that must agree (collective).

    Args:
        folder: of files for tensors that exceed memory.
        against: compare step by step, and keep wrong tensors only; None: keep all.

    Returns:
        The record; ranks other than 0 get one without tensors.

    Raises:
        Exception: any of the trial's or the training's.
    """
    found = Record(clip=side.clip, shelf=Shelf(folder))
    notes = _Whole(found) if against is None else _Compared(found, against, side.world)
    before = side.on_run

    def begin(label: str, run: Run) -> None:
        before(label, run)
        _describe(found, label, run)
        notes.start(_full(label, each_weight(run.program)))

    side.on_run = begin
    for label, result in counting("steps", side.steps, trial(side)):
        found.rows.append(Row.of(label, result))
        notes.step(label, result, side.runs[label].program)
        if side.finished():
            break
    digests: dict[str, list[str]] = {}
    for label, run in side.runs.items():
        digests.update(_labelled(label, replicated_digests(run.program)))
    found.drift = _differing(side.world, digests)
    told = side.world.gather_json([asdict(row) for row in found.rows])
    found.rank_rows = [[Row(**row) for row in rows] for rows in told]
    notes.end(side.runs)
    side.on_run = before
    return found


@dataclass
class _Whole:
    """Recorder that keeps every tensor."""

    found: Record

    def __post_init__(self) -> None:
        self.found.start = self.begun = self.found.shelf.keep(())

    def start(self, named: Named) -> None:
        for name, tensor in named:
            self.begun.put(name, tensor)

    def step(self, label: str, result: StepResult, program: Program) -> None:
        self.found.gradients.append(self.found.shelf.keep(_gradients(label, result, program)))
        self.found.apart.append({})

    def end(self, runs: Mapping[str, Run]) -> None:
        _keep_end(self.found, runs)


class _Compared:
    """Recorder that compares every tensor with one process's, and keeps those for a diagnosis."""

    def __init__(self, found: Record, against: Against, world: World) -> None:
        self.found, self.world, self.bounds = found, world, against.bounds
        self.expected = against.expected or Record()
        self.far = found.far = Distances()
        self.begun: list[str] = []
        self.other = found.shelf.keep(())
        self.is_wrong = False  # a row was, and is kept

    def start(self, named: Named) -> None:
        expected = self.expected.start
        for name, tensor in named:
            self.begun.append(name)
            if name not in expected or not _alike(tensor, expected[name]):
                self.other.put(name, tensor)

    def step(self, label: str, result: StepResult, program: Program) -> None:
        found, number, gradients = self.found, len(self.found.gradients), self.expected.gradients
        named = _gradients(label, result, program)
        expected = gradients[number] if number < len(gradients) else {}
        self.far.add_row(expected, named, self.bounds.is_judged(result.step))
        kept: Tensors = {}
        apart: dict[str, Apart] = {}
        if not self.is_wrong and self._tell(number < len(gradients) and self._differs(number)):
            self.is_wrong = True
            kept = found.shelf.keep(_gradients(label, result, program))
            apart = {} if result.skipped else _labelled(label, replicas_apart(program))
        found.gradients.append(kept)
        found.apart.append(apart)

    def end(self, runs: Mapping[str, Run]) -> None:
        self.found.start = Chosen(tuple(self.begun), self.expected.start, self.other)
        self.far.end(self.expected.weights, self.expected.buffers, _weights(runs))
        first = self.world.is_first
        if self._tell(first and not compare(self.expected, self.found, self.bounds).equal):
            _keep_end(self.found, runs)

    def _differs(self, number: int) -> bool:
        return gradient_differs(self.expected, self.found, number, self.bounds)

    def _tell(self, on_first: bool) -> bool:
        """Broadcast rank 0's finding."""
        return bool(self.world.broadcast_json(on_first))


def _gradients(label: str, result: StepResult, program: Program) -> Named:
    """Return a step's gradients on rank 0, as the optimizer saw them: none if it was skipped."""
    each, used = each_gradient(program)
    mine = ((n, tensor) for n, tensor in each if n in used and not result.skipped)
    return _full(label, mine)


def _weights(runs: Mapping[str, Run]) -> Named:
    """Return parameters and buffers of all runs, on rank 0."""
    for label, run in runs.items():
        yield from _full(label, each_weight(run.program))


def _keep_end(found: Record, runs: Mapping[str, Run]) -> None:
    """Store the final weights and buffers of a side."""
    weights, buffers = found.shelf.keep(()), found.shelf.keep(())
    parameters = {*found.trainable, *found.frozen}
    for name, tensor in _weights(runs):
        (weights if name in parameters else buffers).put(name, tensor)
    found.weights, found.buffers = weights, buffers


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both have the same bits."""
    return one.dtype == other.dtype and torch.equal(one.cpu(), other)


def replicated_digests(program: Program) -> dict[str, list[str]]:
    """Return [part, SHA-256] of this rank's tensors: equal parts must be equal on all ranks."""
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
    return dict(_full(label, named.items()))


def _full(label: str, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield the same values under the names that a record has for them."""
    return ((f"{label}/{name}" if label else name, value) for name, value in named)


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
    """Return names whose same part differs in bits between ranks: groups of ranks that agree."""
    total = hashlib.sha256(repr(list(digests.items())).encode()).hexdigest()
    if len(set(world.gather_json(total))) == 1:
        return {}
    seen: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, told in enumerate(world.gather_json(digests)):
        for name, (part, digest) in told.items():
            seen.setdefault((name, part), {}).setdefault(digest, []).append(rank)
    return {name: list(ranks.values()) for (name, _), ranks in seen.items() if len(ranks) > 1}
