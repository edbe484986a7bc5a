"""Whether weights or optimizer state changed in memory between updates, or differ over replicas.

A bit that memory flips, or a product that a core gets wrong, is no error for anybody: the run goes
on with other weights, writes them into every checkpoint, and ranks that ought to hold the same do
not. So every tensor's bytes are summed as whole numbers when an update is over:

    at rest     summed again before the next update, and before a save, they must be the same; each
                rank sees that for itself, whoever else holds the tensor. Every single bit is seen
    replicas    ranks that hold the same must have the same sums: a wrong product, or message

What was found travels in the step's one all-reduce, so no rank makes an update that one must not
make. A look reads all bytes twice; where that is more than a hundredth of a step it is made at
every k-th only. What user code writes is known by torch's counters of writes, or is done on all
ranks.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from shoal.base.plans.placement import Placement
from shoal.fabric.device import is_accelerator, synchronize
from shoal.parallel._torch import writes
from shoal.parallel.program import Program
from shoal.trainer.guards.checksums import WEIGHT, Checksums, Key, Look, here
from shoal.trainer.metrics_recorder import Recorder
from shoal.trainer.step.step_vector import Group, Invariant, InvariantCheck, StepNumbers

if TYPE_CHECKING:
    from shoal.optim.average import WeightAverage

SHARE, TIMES = 0.005, 15
"""Of a step that looks may take: what they do to caches costs the step as much again, so it is a
hundredth in all (benchmarks/guards.py) · looks of which the median counts: the fastest one finds
everything in caches."""

Axes = tuple[tuple[str, ...], tuple[int, ...]]
"""Over which axes ranks hold the same, and in which stages of a pipeline, () for one's own."""


class CorruptionCheck:
    """Looks at what a run holds on this rank.

    Attributes:
        every: steps from one look to the next, the same on all ranks.
        told: a user's own writes were told of.
    """

    def __init__(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        recorder: Recorder,
    ) -> None:
        self.program, self.optimizer, self.average = program, optimizer, average
        self.recorder, self.mode = recorder, program.plan.drift
        self.on = self.mode != "off" and not program.plan.states_in_files  # a disk is not memory
        self.every, self.told = 1, False
        self.taken: Look | None = None
        self._next, self._looks = 0, 0
        self._bits = Checksums()
        self._costs_s, self._step_s = deque[float](maxlen=TIMES), math.inf
        self._before_s = self._spent_s = 0.0
        self.kinds = sorted({self.held_over(*one) for one in self._rows()}) if self.on else []
        self._kinds_of: tuple[list[Key], list[list[int]]] = ([], [[] for _ in self.kinds])
        self.groups = [_groups(program, kind) for kind in self.kinds]
        rank = program.world.rank
        members = ([r for r, first in enumerate(g) if first == g[rank]] for g in self.groups)
        self._own_groups = [Group(ranks, rank) for ranks in members]
        self._folds_now: list[int] = []

    def take(self, step: int) -> None:
        """The update of a step is over, or another state was loaded: sum what there is now."""
        self.taken = None
        if not self.on or step < self._next:
            return
        began_s = self._clock()
        tensors = self._tensors()
        held = list(tensors.values())
        self._bits.keep(held)
        marks = [(writes(one), (one.data_ptr(), one.nbytes)) for one in held]
        self.taken = Look(step, tensors, self._bits.sums(held), marks)
        self._spent_s = self._clock() - began_s

    def forget(self) -> None:
        """Somebody who may write weights did; the next update is followed by a look."""
        self.taken, self._next = None, 0

    def sums(self) -> list[float]:
        """Look again where a look is due: [tensors that changed, steps to the next look]."""
        now_s, before_s = time.perf_counter(), self._before_s
        self._before_s = now_s
        if before_s:
            self._step_s = min(self._step_s, now_s - before_s)
        self._folds_now = []
        if self.taken is None:
            return [0.0, 0.0]
        began_s = self._clock()
        self._compare(self.taken)
        self._folds_now = self._folds(self.taken, self.taken.sums.read())
        if self._looks < 2 or not is_accelerator(self.program.world.device):
            self._costs_s.append(self._spent_s + self._clock() - began_s)
        self._looks += 1
        cost_s = median(self._costs_s)
        every = 1 if self.mode == "every" else math.ceil(cost_s / SHARE / self._step_s)
        return [float(len(self.taken.changed)), float(min(max(1, every), 2**20))]

    def invariants(self) -> list[Invariant]:
        """Return what replicas must have in common after this look; call `sums` before."""
        return [
            Invariant(f"held alike {number}", fold, self._own_groups[number])
            for number, fold in enumerate(self._folds_now)
        ]

    def agree(self, numbers: StepNumbers, *, alone: bool = False) -> None:
        """Look at what all ranks said.

        Args:
            numbers: of the step, with `sums` and `invariants` of all ranks.
            alone: look only for what can be nothing but a flipped bit; the rest comes later.

        Raises:
            ClusterError: on all ranks, for what changed in memory, or differs.
        """
        look = self.taken
        if look is None:
            return
        changed, every = numbers.sums("drift")
        self.every = max(1, math.ceil(every / self.program.world.size))  # ranks look together
        self._next = look.step + self.every
        if changed:
            from shoal.trainer.guards.reports.corruption_report import changed_at_rest

            changed_at_rest(self, look, alone=alone)
        if not alone:
            self._compare_replicas(look, numbers.invariants)
            self.taken = None

    def before_save(self, step: int) -> None:
        """A checkpoint is about to be written; every rank calls it.

        Errors: ClusterError, on all ranks, if anything that it would hold is damaged
        """
        if not self.on:
            return
        look = self.taken or self.look_now(step)
        if self.taken is not None:
            self._compare(look)
        self._folds_now = self._folds(look, look.now)
        own = [Invariant("changed", len(look.changed), None), *self.invariants()]
        found = InvariantCheck(own, [1.0], self.program.world.gather_json)  # 1: who holds what
        if any(found.by_rank("changed")):
            from shoal.trainer.guards.reports.corruption_report import changed_at_rest

            changed_at_rest(self, look)
        self._compare_replicas(look, found)

    def held_over(self, row: Placement, what: str) -> Axes:
        """Over which axes ranks hold the same of a parameter's weight, or of its state."""
        zero_parts = row.data == "states" and what != WEIGHT
        over = {"whole": row.data_axes, "rows": row.data_axes[:1], "states": row.data_axes}
        axes = () if zero_parts else over[row.data]
        axes += tuple(a for a in ("cp", "tp") if a in row.sum_over and not (a == "tp" and row.cut))
        stages = row.stages if "pp" in row.sum_over and not zero_parts else ()
        return axes, stages

    def _rows(self) -> list[tuple[Placement, str]]:
        rows = [row for row in self.program.plan.placements if not row.is_buffer]
        return [(row, what) for row in rows for what in (WEIGHT, "")]

    def _tensors(self) -> dict[Key, torch.Tensor]:
        program = self.program
        found: dict[Key, torch.Tensor] = {}
        if program.plan.layout.zero < 3:
            found = {(WEIGHT, name): p for name, p in program.parameters.items()}
        found |= {(WEIGHT, name): here(p) for name, p in program.frozen.items()}
        for name, one in program.local.items():
            stepped = one.parameter
            whole = found.get((WEIGHT, name))
            if whole is None:
                found[WEIGHT, name] = stepped
            elif not _inside(stepped, whole):
                found["master", name] = stepped
            for key, value in self.optimizer.state.get(stepped, {}).items():
                if isinstance(value, torch.Tensor):
                    found[key, name] = here(value)
        averages = self.average.tensors() if self.average else {}
        return found | {("average", name): one for name, one in averages.items()}

    def look_now(self, step: int) -> Look:
        """Sum what is held now, and compare it with nothing."""
        tensors = self._tensors()
        sums = self._bits.sums(list(tensors.values()))
        return Look(step, tensors, sums, [], sums.read())

    def _compare(self, look: Look) -> None:
        """Sum again; which tensors are other than they were, though they are where they were."""
        held = list(look.tensors.values())
        before = look.sums.read()
        look.now = self._bits.sums(held).read()
        look.changed = [
            place
            for place in (look.now != before).nonzero()[0].tolist()
            if look.marks[place]
            == (writes(held[place]), (held[place].data_ptr(), held[place].nbytes))
        ]

    def _folds(self, look: Look, sums: Any) -> list[int]:
        """For each kind one number of 48 bits that ranks of a group must have in common."""
        places = self.places(look)
        return [
            int.from_bytes(hashlib.blake2b(sums[one].tobytes(), digest_size=6).digest())
            if (one := places[number])
            else 0
            for number in range(len(self.kinds))
        ]

    def places(self, look: Look) -> list[list[int]]:
        """For each kind, places of the tensors of a look that are held so."""
        rows, numbers = self.program.rows, {kind: n for n, kind in enumerate(self.kinds)}
        found: list[list[int]] = [[] for _ in self.kinds]
        if (keys := list(look.tensors)) == self._kinds_of[0]:
            return self._kinds_of[1]
        self._kinds_of = keys, found
        for place, (what, name) in enumerate(look.tensors):
            found[numbers[self.held_over(rows[name], what)]].append(place)
        return found

    def _compare_replicas(self, look: Look, found: InvariantCheck) -> None:
        for number in range(len(self.kinds)):
            if found.differs(f"held alike {number}"):
                from shoal.trainer.guards.reports.corruption_report import replicas_differ

                replicas_differ(self, look, number)

    def _clock(self) -> float:
        """Now, on the host by this thread's processor seconds: nobody else's turn is a cost.

        What a device does of a look is measured in the first ones, not waited for later.
        """
        if self._looks < 2 and is_accelerator(self.program.world.device):
            synchronize(self.program.world.device)
        waits = is_accelerator(self.program.world.device)
        return time.perf_counter() if waits else time.thread_time()


def _inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    begins = part.data_ptr() - whole.data_ptr()
    return begins >= 0 and begins + part.nbytes <= whole.nbytes


def _groups(program: Program, kind: Axes) -> list[int]:
    """For every rank the lowest of those that hold the same as it."""
    axes, stages = kind
    layout = program.plan.layout
    experts = any(axis.startswith("expert") for axis in axes)
    grid = layout.expert_degrees if experts else layout.degrees
    firsts: dict[tuple[Any, ...], int] = {}
    found = []
    for rank in range(program.world.size):
        at = layout.at(rank)
        place = tuple(at[axis] for axis in grid if axis not in axes and axis != "pp")
        stage: Any = "shared" if at.get("pp", 0) in stages else at.get("pp", 0)
        found.append(firsts.setdefault((place, stage), rank))
    return found
