"""The battery: a trial on a layout and in one process, compared; tests and users call the same.

    rank 0   trains the twin, alone, on the same micro-batches (once per trajectory, then kept)
    others   wait at the store, not in a collective
    all      train the trial on the layout; rank 0 compares, and finds the cause of a difference
    all      get the same report

Trajectories: plain SGD with momentum, whose every step must agree, and AdamW, which hides factors
in gradients from its weights but not from its gradients, and runs the sharded optimizer state.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from shoal.base import errors
from shoal.base.errors import ConfigError, ShoalError
from shoal.fabric import World
from shoal.fabric.place import Place
from shoal.trainer.proof.atoms import Atoms, watch_micro_batches
from shoal.trainer.proof.bounds import Bounds, bounds_for
from shoal.trainer.proof.causes import explain
from shoal.trainer.proof.clue import Clue
from shoal.trainer.proof.limits import CannotProve, Clock, check_memory, reason
from shoal.trainer.proof.record import Record, record
from shoal.trainer.proof.side import Side, Trial
from shoal.trainer.proof.verdict import Comparison, compare
from shoal.trainer.run import Run
from shoal.trainer.settings import BuildOptimizer

SGD = "sgd"

OPTIMIZERS: dict[str, BuildOptimizer] = {
    SGD: lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
"""The trajectories of a full proof. Steps are small, so that no model blows rounding errors up."""

ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ShoalError)
}

Report = dict[str, Any]
"""JSON: verdict (equal, different, not proven), reason, cause, layout, processes, precision,
steps, seconds, versions, and per trajectory its bounds, rows and parameters."""

NOTHING_MOVED = "no step of the one process moved anything: no valid target, or numbers not finite"


@dataclass
class Battery:
    """Proves one trial on any number of layouts; keeps the twin's records between them.

    trial       makes and trains the runs, the same on both sides
    optimizers  trajectories by name; "sgd" is judged at every step, others at step 1 and the end
    steps       of each run and trajectory · clip  largest gradient norm · budget_s  for the twin
    """

    trial: Trial
    optimizers: Mapping[str, BuildOptimizer] = field(default_factory=lambda: dict(OPTIMIZERS))
    steps: int = 5
    clip: float = 0.5
    precision: str = "fp64"
    seed: int = 3
    budget_s: float | None = None
    twins: dict[str, Record] = field(default_factory=dict)

    def prove(
        self,
        world: World,
        layout: str | Mapping[str, Any],
        policies: Mapping[str, Any] | None = None,
    ) -> Report:
        """Compare `layout` on `world` with one process; every rank of the world calls it.

        policies   more arguments of `shoal.parallelize` on the layout's side: recompute, …
        Gives    the report, equal on all ranks
        Errors   ShoalError where training itself would be refused; never for a difference
        """
        began_s = time.perf_counter()
        trajectories: list[Report] = []
        text = layout if isinstance(layout, str) else "auto"
        for name in self.optimizers:
            # Others wait at the store meanwhile: what one process does may take long.
            why = world.broadcast_json(world.local_first(partial(self._try_twin, world, name)))
            if why["error"]:
                failure = ERRORS.get(why["error"], ConfigError)(why["reason"])
                for note in why["notes"]:
                    failure.add_note(note)
                raise failure
            if why["reason"]:
                return self._report("not proven", why["reason"], text, world, [], began_s)
            side = self._side(world, layout, name, policies)
            got = record(side, self.trial)
            text = next(iter(side.runs.values())).plan.layout.text()
            side.release()
            # The others wait at the store again: a cause may need the twin once more.
            compare_here = partial(self._compare, world, name, got)
            trajectories.append(world.broadcast_json(world.local_first(compare_here)))
        equal = all(t["equal"] for t in trajectories)
        verdict = "equal" if equal else "different"
        return self._report(verdict, "", text, world, trajectories, began_s)

    def twin(self, name: str, device: torch.device, beside: int = 0) -> Record:
        """What one process computes on a trajectory; computed once.

        beside   processes of the layout on this machine, which need memory too
        Errors: CannotProve, or whatever the trial raises.
        """
        if name not in self.twins:
            side = self._side(World(Place(), device, None), "single", name)
            clock = Clock(self.budget_s, self.steps)
            side.on_run = lambda label, run: check_memory(run, self.steps, beside)

            def timed(of: Side) -> Any:
                for told in self.trial(of):
                    yield told
                    clock.step()

            self.twins[name] = record(side, timed)
            side.release()
        return self.twins[name]

    def atoms(self, name: str, device: torch.device, at: tuple[str, int], ranks: int) -> Atoms:
        """Gradients of every micro-batch of one step, from the twin, run again up to it.

        at   label and number of the step
        """
        label, step = at
        found = Atoms(ranks)
        side = replace(self._side(World(Place(), device, None), "single", name), steps=step)

        def watch(of: str, run: Run) -> None:
            if of == label:
                watch_micro_batches(run, label, step, found)

        side.on_run = watch
        for told, result in self.trial(side):
            if (told, result.step) == at:
                break
        side.release()
        return found

    def _side(
        self,
        world: World,
        layout: str | Mapping[str, Any],
        name: str,
        policies: Mapping[str, Any] | None = None,
    ) -> Side:
        return Side(
            world,
            layout,
            self.optimizers[name],
            self.steps,
            precision=self.precision,
            clip=self.clip,
            seed=self.seed,
            policies=policies or {},
        )

    def _try_twin(self, world: World, name: str) -> dict[str, Any]:
        """Make the twin's record on rank 0; why it cannot be had, and the class of a user's error.

        Told as a message, since every rank must go on, or fail, in the same way.
        """
        answer: dict[str, Any] = {"reason": "", "error": "", "notes": []}
        if world.is_first:
            try:
                rows = self.twin(name, world.device, beside=world.local_size).rows
                if not any(row.grad_norm and not row.skipped for row in rows):
                    answer["reason"] = NOTHING_MOVED
            except ShoalError as failure:
                notes = list(getattr(failure, "__notes__", ()))
                told = {"reason": str(failure), "error": type(failure).__name__, "notes": notes}
                answer.update(told)
            except Exception as failure:
                answer["reason"] = reason(failure)
        return answer

    def _compare(self, world: World, name: str, got: Record) -> Report | None:
        if not world.is_first:
            return None
        expected = self.twins[name]
        bounds = bounds_for(self.precision, name)
        comparison = compare(expected, got, bounds)
        clue = None
        if not comparison.equal:
            try:
                atoms = self._atoms(world, name, got, comparison)
            except Exception:  # a difference that is proven must be told, with less of a cause
                atoms = None
            clue = explain(expected, got, comparison, atoms)
        return _trajectory(name, expected, got, comparison, bounds, clue)

    def _atoms(self, world: World, name: str, got: Record, comparison: Comparison) -> Atoms | None:
        kinds = ("gradient", "used", "gradient norm")
        rows = [d.row for d in comparison.differences if d.what in kinds]
        if not rows:
            return None
        row = self.twins[name].rows[min(rows)]
        try:
            return self.atoms(name, world.device, (row.label, row.step), got.degree)
        except (CannotProve, MemoryError, torch.OutOfMemoryError):
            return None

    def _report(
        self,
        verdict: str,
        why: str,
        layout: str,
        world: World,
        trajectories: list[Report],
        began_s: float,
    ) -> Report:
        wrong = [t for t in trajectories if not t["equal"]]
        return {
            "verdict": verdict,
            "reason": why,
            "cause": wrong[0]["cause"] if wrong else None,
            "layout": layout,
            "processes": world.size,
            "precision": self.precision,
            "steps": self.steps,
            "clip": self.clip,
            "device": world.device.type,
            "seconds": time.perf_counter() - began_s,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "trajectories": trajectories,
        }


def _trajectory(
    name: str,
    expected: Record,
    got: Record,
    comparison: Comparison,
    bounds: Bounds,
    clue: Clue | None,
) -> Report:
    """The JSON of one trajectory; numbers that are not finite become null."""
    first = comparison.first
    return {
        "optimizer": name,
        "equal": comparison.equal,
        "bounds": {k: _finite(v) for k, v in asdict(bounds).items()},
        "largest": {
            "loss": _finite(comparison.largest_loss),
            "gradient_norm": _finite(comparison.largest_norm),
            "gradient": _finite(max((p.gradient for p in comparison.parameters), default=0.0)),
            "weights": _finite(max((p.weights for p in comparison.parameters), default=0.0)),
        },
        "rows": [
            {
                "label": ours.label,
                "step": ours.step,
                "targets": ours.targets,
                "loss": [ours.loss, theirs.loss],
                "grad_norm": [ours.grad_norm, theirs.grad_norm],
            }
            for ours, theirs in zip(expected.rows, got.rows, strict=False)
        ],
        "parameters": [
            {**asdict(p), "gradient": _finite(p.gradient), "weights": _finite(p.weights)}
            for p in comparison.parameters
        ],
        "first": None
        if first is None
        else {**asdict(first), "size": _finite(first.size), "bound": _finite(first.bound)},
        "cause": None if clue is None else {**asdict(clue), "text": clue.text()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
