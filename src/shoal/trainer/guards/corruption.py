"""Detect silent corruption of weights and optimizer state, at rest in memory or between replicas.

A bit that memory flips, or a product that a core gets wrong, raises no error. The run goes on with
other weights, writes them into every checkpoint, and replicas no longer agree. So every tensor's
bytes are summed as integers when an update is over:

    at rest     summed again before the next update, and before a save, they must be the same; each
                rank checks this on its own. Every flip of a single bit is found
    replicas    ranks that hold the same must have the same sums; else a product or a message was
                wrong

The findings are part of the step's one all-reduce, so all ranks skip the update that one must not
make. A check reads all bytes twice; if that is more than a hundredth of a step, only every k-th
step has one. Writes of user code show in torch's write counters, or happen on all ranks.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from shoal.base.plans.placement import Placement, find_lowest_copies
from shoal.fabric.device import is_accelerator, synchronize
from shoal.parallel._torch import version_counter
from shoal.parallel.program import Program
from shoal.trainer.guards import reports
from shoal.trainer.guards.checksums import WEIGHT, ChecksumReader, ChecksumSnapshot, Key, local_part
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step.step_vector import Invariant, InvariantCheck, InvariantGroup, StepNumbers

if TYPE_CHECKING:
    from shoal.optim.average import WeightAverage

SHARE, TIMES = 0.005, 15
"""Share of a step that checks may take. Their effect on caches costs as much again, so it is a
hundredth in all (benchmarks/guards.py) · number of checks of which the median counts: the
fastest one finds all data in caches.
"""

Axes = tuple[tuple[str, ...], tuple[int, ...]]
"""Axes over which ranks hold the same tensor, and the pipeline stages that do, () for one stage."""


class CorruptionCheck:
    """Check of this rank's weights, optimizer state and averages for silent corruption.

    Attributes:
        every: steps from one check to the next, the same on all ranks.
        told: the notice about a user's own uncounted writes was printed.
    """

    def __init__(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        recorder: MetricsRecorder,
    ) -> None:
        self.program, self.optimizer, self.average = program, optimizer, average
        self.recorder, self.mode = recorder, program.plan.drift
        self.on = self.mode != "off" and not program.plan.states_in_files  # a disk is not memory
        self.every, self.told = 1, False
        self.taken: ChecksumSnapshot | None = None
        self._next, self._looks = 0, 0
        self._bits = ChecksumReader()
        self._costs_s, self._step_s = deque[float](maxlen=TIMES), math.inf
        self._before_s = self._spent_s = 0.0
        self.kinds = (
            sorted({self.replica_axes(*one) for one in self._placement_rows()}) if self.on else []
        )
        self._kinds_of: tuple[list[Key], list[list[int]]] = ([], [[] for _ in self.kinds])
        self.groups = [
            find_lowest_copies(program.plan.layout, program.world.size, *kind)
            for kind in self.kinds
        ]
        rank = program.world.rank
        members = ([r for r, first in enumerate(g) if first == g[rank]] for g in self.groups)
        self._own_groups = [InvariantGroup(ranks, rank) for ranks in members]
        self._folds_now: list[int] = []

    def record_checksums(self, step: int) -> None:
        """Compute checksums after the update of a step, or after a state was loaded."""
        self.taken = None
        if not self.on or step < self._next:
            return
        began_s = self._clock()
        tensors = self._collect_tensors()
        held = list(tensors.values())
        self._bits.keep(held)
        marks = [(version_counter(one), (one.data_ptr(), one.nbytes)) for one in held]
        self.taken = ChecksumSnapshot(step, tensors, self._bits.sums(held), marks)
        self._spent_s = self._clock() - began_s

    def discard_checksums(self, *, soon: bool = True) -> None:
        """Discard the checksums after an allowed write.

        Args:
            soon: the next update is followed by a check; False: that of the step when one is due,
                for writes each few steps, which would make most checks.
        """
        self.taken, self._next = None, 0 if soon else self._next

    def sums(self) -> list[float]:
        """Compute checksums again if a check is due: [changed tensors, steps to the next check]."""
        now_s, before_s = time.perf_counter(), self._before_s
        self._before_s = now_s
        if before_s:
            self._step_s = min(self._step_s, now_s - before_s)
        self._folds_now = []
        if self.taken is None:
            return [0.0, 0.0]
        began_s = self._clock()
        self._compare(self.taken)
        self._folds_now = self._replica_hashes(self.taken, self.taken.sums.read())
        if self._looks < 2 or not is_accelerator(self.program.world.device):
            self._costs_s.append(self._spent_s + self._clock() - began_s)
        self._looks += 1
        cost_s = median(self._costs_s)
        every = 1 if self.mode == "every" else math.ceil(cost_s / SHARE / self._step_s)
        return [float(len(self.taken.changed)), float(min(max(1, every), 2**20))]

    def invariants(self) -> list[Invariant]:
        """Return values that must be equal on replicas after this check; call `sums` before."""
        return [
            Invariant(f"held alike {number}", fold, self._own_groups[number])
            for number, fold in enumerate(self._folds_now)
        ]

    def agree(self, numbers: StepNumbers, *, alone: bool = False) -> None:
        """Check the findings of all ranks.

        Args:
            numbers: of the step, with `sums` and `invariants` of all ranks.
            alone: report only certain bit flips; the rest comes later.

        Raises:
            ClusterError: a tensor changed in memory, or differs between replicas; on all ranks.
        """
        look = self.taken
        if look is None:
            return
        changed, every = numbers.sums("drift")
        self.every = max(1, math.ceil(every / self.program.world.size))  # ranks check together
        self._next = look.step + self.every
        if changed:
            reports.corruption_report.raise_memory_corruption(self, look, alone=alone)
        if not alone:
            self._compare_replicas(look, numbers.invariants)
            self.taken = None

    def check_before_save(self, step: int) -> None:
        """Check all tensors before a checkpoint is written; every rank calls it.

        Raises:
            ClusterError: a tensor that the checkpoint would hold is damaged; on all ranks.
        """
        if not self.on:
            return
        look = self.taken or self.compute_snapshot(step)
        if self.taken is not None:
            self._compare(look)
        self._folds_now = self._replica_hashes(look, look.now)
        own = [Invariant("changed", len(look.changed), None), *self.invariants()]
        found = InvariantCheck(own, [1.0], self.program.world.gather_json)  # 1.0: always compare
        if any(found.by_rank("changed")):
            reports.corruption_report.raise_memory_corruption(self, look)
        self._compare_replicas(look, found)

    def replica_axes(self, row: Placement, what: str) -> Axes:
        """Return the axes and stages over which ranks hold the same weight, or its state."""
        zero_parts = row.data == "states" and what != WEIGHT
        over = {"whole": row.data_axes, "rows": row.data_axes[:1], "states": row.data_axes}
        axes = () if zero_parts else over[row.data]
        axes += tuple(a for a in ("cp", "tp") if a in row.sum_over and not (a == "tp" and row.cut))
        stages = row.stages if "pp" in row.sum_over and not zero_parts else ()
        return axes, stages

    def _placement_rows(self) -> list[tuple[Placement, str]]:
        rows = [row for row in self.program.plan.placements if not row.is_buffer]
        return [(row, what) for row in rows for what in (WEIGHT, "")]

    def _collect_tensors(self) -> dict[Key, torch.Tensor]:
        program = self.program
        found: dict[Key, torch.Tensor] = {}
        if program.plan.layout.zero < 3:
            found = {(WEIGHT, name): p for name, p in program.parameters.items()}
        found |= {(WEIGHT, name): local_part(p) for name, p in program.frozen.items()}
        for name, one in program.local.items():
            stepped = one.parameter
            whole = found.get((WEIGHT, name))
            if whole is None:
                found[WEIGHT, name] = stepped
            elif not _is_view_of(stepped, whole):
                found["master", name] = stepped
            for key, value in self.optimizer.state.get(stepped, {}).items():
                if isinstance(value, torch.Tensor):
                    found[key, name] = local_part(value)
        averages = self.average.tensors() if self.average else {}
        return found | {("average", name): one for name, one in averages.items()}

    def compute_snapshot(self, step: int) -> ChecksumSnapshot:
        """Return checksums of the present tensors, compared with none."""
        tensors = self._collect_tensors()
        sums = self._bits.sums(list(tensors.values()))
        return ChecksumSnapshot(step, tensors, sums, [], sums.read())

    def _compare(self, look: ChecksumSnapshot) -> None:
        """Compute checksums again, and note tensors that changed although nothing wrote them."""
        held = list(look.tensors.values())
        before = look.sums.read()
        look.now = self._bits.sums(held).read()
        look.changed = [
            place
            for place in (look.now != before).nonzero()[0].tolist()
            if look.marks[place]
            == (version_counter(held[place]), (held[place].data_ptr(), held[place].nbytes))
        ]

    def _replica_hashes(self, look: ChecksumSnapshot, sums: Any) -> list[int]:
        """Return, for each kind of sharding, a 48-bit hash that must be equal within its group."""
        places = self.indices_by_kind(look)
        return [
            int.from_bytes(hashlib.blake2b(sums[one].tobytes(), digest_size=6).digest())
            if (one := places[number])
            else 0
            for number in range(len(self.kinds))
        ]

    def indices_by_kind(self, look: ChecksumSnapshot) -> list[list[int]]:
        """Return, for each kind of sharding, the indices of its tensors."""
        rows, numbers = self.program.rows, {kind: n for n, kind in enumerate(self.kinds)}
        found: list[list[int]] = [[] for _ in self.kinds]
        if (keys := list(look.tensors)) == self._kinds_of[0]:
            return self._kinds_of[1]
        self._kinds_of = keys, found
        for place, (what, name) in enumerate(look.tensors):
            found[numbers[self.replica_axes(rows[name], what)]].append(place)
        return found

    def _compare_replicas(self, look: ChecksumSnapshot, found: InvariantCheck) -> None:
        for number in range(len(self.kinds)):
            if found.differs(f"held alike {number}"):
                reports.corruption_report.raise_replica_mismatch(self, look, number)

    def _clock(self) -> float:
        """Return the present time in seconds; for ranks on the CPU, this thread's processor time.

        On a device, only the first checks are timed with its kernels, and later ones do not wait.
        """
        if self._looks < 2 and is_accelerator(self.program.world.device):
            synchronize(self.program.world.device)
        waits = is_accelerator(self.program.world.device)
        return time.perf_counter() if waits else time.thread_time()


def _is_view_of(part: torch.Tensor, whole: torch.Tensor) -> bool:
    begins = part.data_ptr() - whole.data_ptr()
    return begins >= 0 and begins + part.nbytes <= whole.nbytes
