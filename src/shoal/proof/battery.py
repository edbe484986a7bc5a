"""Battery of equality proofs: train a trial on a layout and in one process, compare both.

    rank 0   trains the twin, alone, on the same micro-batches (once per trajectory, then kept)
    others   wait at the store, not in a collective
    all      train the trial on the layout; rank 0 compares
    all      if a number differs and the model casts to a narrow dtype: both sides once more without
             these casts, since rounding would differ in right layouts too
    rank 0   if a number still differs: the twin once more, its weights changed in their last bits.
             A difference of the same size is rounding that the model amplifies: not proven
    rank 0   finds the cause of a difference that stays; all get the same report

Trajectories: plain SGD with momentum, whose every step must agree, and AdamW, which hides factors
in gradients from its weights but not from its gradients, and runs the sharded optimizer state.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.base import errors
from shoal.base.errors import ConfigError, ShoalError
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.parallel.mutated_weights import MutatedWeightsError
from shoal.proof.diagnosis.causes import explain_difference
from shoal.proof.diagnosis.evidence import CauseTest, Evidence, OnRun
from shoal.proof.equality_bounds import AS_IS, bounds_for, bounds_with_casts
from shoal.proof.recording import ReferenceRecord, record_trial
from shoal.proof.reduced_model import least_blocks
from shoal.proof.reference_limits import (
    CannotProveError,
    NoFloat64Error,
    ProofResources,
    TimeBudget,
    check_resources,
    failure_reason,
    find_collective,
    is_dtype_failure,
    run_on_all_ranks,
)
from shoal.proof.report import (
    SMOOTH,
    Report,
    format_first_difference,
    format_float32_note,
    is_within_rounding,
    largest_difference,
    make_verdict,
    trajectory_json,
)
from shoal.proof.trajectory_record import TrajectoryRecord
from shoal.proof.trial_side import Trial, TrialSide
from shoal.proof.verdict import compare_records
from shoal.trace.isolation.collective_ban import forbid_collectives
from shoal.trace.isolation.lifted_casts import LiftedCasts, format_casts
from shoal.trainer.step.call_contract import BuildOptimizer
from shoal.wire.phases import NOWHERE, phase, record_step_part

SGD = "sgd"

OPTIMIZERS: dict[str, BuildOptimizer] = {
    SGD: lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
"""Optimizers of a full proof. Steps are small, so that no model amplifies rounding much."""

ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ShoalError)
}

NOTHING_MOVED = "no step of the one process moved anything: no valid target, or numbers not finite"


@dataclass
class Battery:
    """Proofs of one trial on any number of layouts; keeps the reference runs' records.

    Attributes:
        trial: makes and trains the runs, the same on both sides.
        optimizers: trajectories by name; "sgd" is judged at every step, others at step 1 and the
            end.
        steps: of each run and trajectory.
        clip: largest gradient norm.
        budget_s: for the twin.
        inside: causes that are tried before the product's own: our tests name the mistakes that
            they plant inside Shoal, which no user could mend.
        by_blocks: use one block of each kind and the model's ends only (reduced_model.py).
        folder: of files for tensors that exceed memory; None: the system's for temporary ones.
    """

    trial: Trial
    optimizers: Mapping[str, BuildOptimizer] = field(default_factory=lambda: dict(OPTIMIZERS))
    steps: int = 5
    clip: float = 0.5
    precision: str = "fp64"
    seed: int = 3
    budget_s: float | None = None
    inside: Sequence[CauseTest] = ()
    by_blocks: bool = False
    folder: Path | None = None
    twins: dict[str, TrajectoryRecord] = field(default_factory=dict)

    def prove(
        self,
        world: World,
        layout: str | Mapping[str, Any],
        policies: Mapping[str, Any] | None = None,
    ) -> Report:
        """Compare `layout` on `world` with one process; every rank of the world calls it.

        Args:
            policies: more arguments of `shoal.parallelize` on the layout's side: recompute, …

        Returns:
            The report, equal on all ranks.

        Raises:
            ShoalError: training itself would be refused; never for a difference.
        """
        began_s = time.perf_counter()
        trajectories: list[Report] = []
        text, why, said = layout if isinstance(layout, str) else "auto", "", list[str]()
        try:
            for name in self.optimizers:
                blocks = least_blocks(layout) if self.by_blocks else 0
                ask = _ProofTask(world, layout, name, policies or {}, blocks=blocks)
                told, text = self._judge(ask, said)
                trajectories.append(told)
                # A next layout may want it again; files of large models would fill the disk.
                large = [key for key, twin in self.twins.items() if twin.shelf.file is not None]
                for key in large:
                    del self.twins[key]
        except CannotProveError as failure:
            why, trajectories = str(failure), []
            if isinstance(failure, NoFloat64Error) and self.precision == "fp64":
                narrow = replace(self, precision="fp32", twins={})
                why += f"; {format_float32_note(narrow.prove(world, layout, policies))}"
        return {
            **make_verdict(trajectories, why),
            "said": list(dict.fromkeys(said)),
            "layout": text,
            "processes": world.size,
            "precision": self.precision,
            "by_blocks": self.by_blocks,
            "steps": self.steps,
            "clip": self.clip,
            "device": world.device.type,
            "seconds": time.perf_counter() - began_s,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "trajectories": trajectories,
        }

    def twin(self, name: str, device: torch.device) -> TrajectoryRecord:
        """Return the record of one process on a trajectory; it is computed once.

        Raises:
            CannotProveError, ForbiddenCollective: the twin cannot run; or the exception of the
            trial.
        """
        return self._record_reference(_ProofTask(_single_process_world(device), "single", name))

    @phase("one process")
    def _record_reference(self, ask: _ProofTask) -> TrajectoryRecord:
        if ask.record_name not in self.twins:
            alone_ask = replace(
                ask, world=_single_process_world(ask.world.device), layout="single", policies={}
            )
            side = self._make_side(alone_ask)
            clock = TimeBudget(self.budget_s, self.steps)
            room = ProofResources.of(ask.world, ask.layout, self.steps, self.folder)
            side.on_run = lambda label, run: check_resources(run, room)

            def timed(of: TrialSide) -> Any:
                steps = iter(self.trial(of))
                while True:
                    # A collective in a first step would wait for ever: nobody else computes now.
                    begins = not of.runs or any(not run.step_count for run in of.runs.values())
                    with forbid_collectives() if begins else nullcontext():
                        told = next(steps, None)
                    if told is None:
                        return
                    yield told
                    clock.step()

            self.twins[ask.record_name] = _record_side(
                side, ask.lifted, lambda: record_trial(side, timed, self.folder)
            )
        return self.twins[ask.record_name]

    def _judge(self, ask: _ProofTask, said: list[str]) -> tuple[Report, str]:
        """Return (one trajectory's report, the layout's text); add changes of the model to `said`.

        Raises:
            CannotProveError: on every rank: the twin cannot run.
            ShoalError: training itself would be refused.
        """
        self._prepare_reference(ask)
        lifted = replace(ask, lifted=True)
        try:
            got, text, done = self._on_layout(ask)
        except MutatedWeightsError as failure:
            if not failure.is_cast or self.precision != "fp64":
                raise
            said.append(f"{self._prepare_reference(lifted)}, of its weights too, lifted")
            wide, text, _ = run_on_all_ranks(ask.world, partial(self._on_layout, lifted))
            return self._add_cause(lifted, wide, self._compare_on_all(lifted, wide)), text
        said += done
        told = self._compare_on_all(ask, got)
        if told["equal"] or self.precision != "fp64":
            return self._add_cause(ask, got, told), text
        try:
            casts = self._prepare_reference(lifted)
            again = (
                run_on_all_ranks(ask.world, partial(self._on_layout, lifted))[0] if casts else None
            )
        except (CannotProveError, ShoalError) as failure:
            raise CannotProveError(
                "the model casts to a narrower format on its way, both sides are "
                f"{largest_difference(told)} "
                f"apart, and without its casts it does not run: {failure}"
            ) from failure
        if again is None:
            return self._add_cause(ask, got, told), text
        exact = self._compare_on_all(lifted, again)
        if not exact["equal"]:
            said.append(f"{casts} lifted")
            return self._add_cause(lifted, again, exact), text
        if not told["within"]:
            raise CannotProveError(
                f"with {casts} lifted it computes what one process computes "
                f"({largest_difference(exact)}), but with them both sides are "
                f"{largest_difference(told)} apart, more than "
                f"{AS_IS:.0e}: its casts blow rounding up"
            )
        said.append(
            f"{casts} lifted; as they are: {largest_difference(told)} apart, {AS_IS:.0e} is allowed"
        )
        return {**exact, "as_is": told["largest"]}, text

    def _prepare_reference(self, ask: _ProofTask) -> str:
        """Record the reference run on rank 0; the other ranks wait at the store.

        Returns:
            Lines of the model's own casts that were lifted, empty where none was.

        Raises:
            CannotProveError: on every rank; or a user's error, of its own class.
        """
        why = ask.world.broadcast_json(ask.world.run_local_first(partial(self._try_reference, ask)))
        if why["error"]:
            failure = ERRORS.get(why["error"], ConfigError)(why["reason"])
            for note in why["notes"]:
                failure.add_note(note)
            raise failure
        if why["reason"]:
            raise (NoFloat64Error if why["format"] else CannotProveError)(why["reason"])
        return str(why["casts"])

    def _on_layout(self, ask: _ProofTask) -> tuple[TrajectoryRecord, str, list[str]]:
        """Return (the layout's record, its text, changes of the model); every rank calls it."""
        side = self._make_side(ask)
        text: list[str] = []
        side.on_run = lambda label, run: text.append(run.plan.layout.text())
        expected = self.twins[ask.record_name] if ask.world.is_first else None
        against = ReferenceRecord(expected, bounds_for(self.precision, ask.name))
        got = _record_side(
            side, ask.lifted, lambda: record_trial(side, self.trial, self.folder, against)
        )
        return got, text[0], side.said

    def _make_side(self, ask: _ProofTask) -> TrialSide:
        record_step_part(
            NOWHERE
        )  # earlier steps are over, and building the next model may take longer
        return TrialSide(
            ask.world,
            ask.layout,
            self.optimizers[ask.name],
            self.steps,
            precision=self.precision,
            clip=self.clip,
            seed=self.seed,
            policies=ask.policies,
            jitter=ask.jitter,
            blocks=ask.blocks,
        )

    def _try_reference(self, ask: _ProofTask) -> dict[str, Any]:
        """Record the reference run on rank 0; return a failure's reason and a user error's class.

        The failure is a message, not an exception, since every rank must go on, or fail, in the
        same way.
        """
        world = ask.world
        answer = {"reason": "", "error": "", "notes": [], "casts": "", "format": False}
        if world.is_first:
            try:
                twin = self._record_reference(ask)
                answer["casts"] = format_casts(twin.casts)
                if not any(row.grad_norm and not row.skipped for row in twin.rows):
                    answer["reason"] = NOTHING_MOVED
            except ShoalError as failure:
                if find_collective(failure):  # a builder's exception arrives as the user's error
                    return {**answer, "reason": failure_reason(failure)}
                notes = list(getattr(failure, "__notes__", ()))
                answer |= {"reason": str(failure), "error": type(failure).__name__, "notes": notes}
            except Exception as failure:
                answer["reason"] = failure_reason(failure)
                answer["format"] = is_dtype_failure(failure)
        return answer

    def _compare_on_all(self, ask: _ProofTask, got: TrajectoryRecord) -> Report:
        """Run `_compare` on rank 0, and broadcast the report."""
        found = ask.world.run_local_first(partial(self._compare, ask, got))
        return ask.world.broadcast_json(found)

    def _compare(self, ask: _ProofTask, got: TrajectoryRecord) -> Report | None:
        """Return the report on a trajectory: equality and distances, without a cause."""
        if not ask.world.is_first:
            return None
        expected = self.twins[ask.record_name]
        bounds = bounds_for(self.precision, ask.name)
        found = compare_records(expected, got, bounds)
        told = trajectory_json(ask.name, expected, got, found, bounds)
        told["smooth"] = all(d.what in SMOOTH for d in found.differences)
        told["within"] = compare_records(expected, got, bounds_with_casts(ask.name)).equal
        return told

    def _add_cause(self, ask: _ProofTask, got: TrajectoryRecord, told: Report) -> Report:
        """Return the report with the cause of the difference; may run the reference again.

        Raises:
            CannotProveError: rounding alone changes this model's numbers as much.
        """
        if told["equal"]:
            return told
        rounding = ask.world.broadcast_json(
            ask.world.run_local_first(partial(self._measure_rounding, ask))
        )
        if told["smooth"] and rounding and is_within_rounding(told, rounding):
            raise CannotProveError(
                f"rounding: a change of its weights in their last bits takes this model as far "
                f"({ask.name}: {format_first_difference(told['first'])})"
            )
        clue = ask.world.run_local_first(partial(self._find_cause, ask, got))
        return {**told, "cause": ask.world.broadcast_json(clue)}

    def _measure_rounding(self, ask: _ProofTask) -> Report | None:
        """Return the reference's change after a change of weights in their last bits, or None."""
        if not ask.world.is_first or self.precision != "fp64":
            return None
        other = replace(ask, jitter=True)
        bounds = bounds_for(self.precision, ask.name)
        try:
            one, two = self._record_reference(ask), self._record_reference(other)
        except Exception:  # a proven difference must be reported
            return None
        return trajectory_json(ask.name, one, two, compare_records(one, two, bounds), bounds)

    def _find_cause(self, ask: _ProofTask, got: TrajectoryRecord) -> dict[str, Any] | None:
        if not ask.world.is_first:
            return None
        expected = self.twins[ask.record_name]
        comparison = compare_records(expected, got, bounds_for(self.precision, ask.name))
        evidence = Evidence(expected, got, comparison, partial(self._rerun_reference, ask))
        with LiftedCasts() if ask.lifted else nullcontext():
            clue = explain_difference(evidence, self.inside)
        return {**asdict(clue), "text": clue.text()}

    def _rerun_reference(self, ask: _ProofTask, at: tuple[str, int], watch: OnRun) -> None:
        """Train the reference once more up to a step.

        Args:
            at: label and number of the step.
            watch: called with every run as it is made.
        """
        label, step = at
        one = replace(
            ask,
            world=_single_process_world(ask.world.device),
            layout="single",
            policies={},
            lifted=False,
        )
        side = replace(self._make_side(replace(one, jitter=False)), steps=step)
        side.on_run = watch
        try:
            for told, result in self.trial(side):
                if (told, result.step) == (label, step):
                    break
        finally:
            side.release()


@dataclass(frozen=True)
class _ProofTask:
    """Task of the battery: one trajectory on one layout.

    Attributes:
        name: of the trajectory.
        policies: more arguments of `shoal.parallelize`.
        lifted: whether the model's own casts are.
        jitter: whether weights change in their last bits.
        blocks: of a kind that a cut model keeps at least; 0: the whole.
    """

    world: World
    layout: str | Mapping[str, Any]
    name: str
    policies: Mapping[str, Any] = field(default_factory=dict)
    lifted: bool = False
    jitter: bool = False
    blocks: int = 0

    @property
    def record_name(self) -> str:
        """Return the name of the reference run's record."""
        cut = f", {self.blocks} blocks" if self.blocks else ""
        return f"{self.name}{', lifted' * self.lifted}{', jittered' * self.jitter}{cut}"


def _single_process_world(device: torch.device) -> World:
    """Return a world of one process."""
    return World(ProcessInfo(), device, None)


def _record_side(
    side: TrialSide, lifted: bool, work: Callable[[], TrajectoryRecord]
) -> TrajectoryRecord:
    """Return a side's record, with the casts that were lifted; release the models."""
    lift = LiftedCasts() if lifted else None
    try:
        with lift or nullcontext():
            found = work()
    finally:
        side.release()
        gc.collect()  # a run and its hooks refer to each other; the other side needs the memory
    found.casts = tuple(sorted(lift.lifted)) if lift else ()
    return found
