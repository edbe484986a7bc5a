"""Compare buffers over ranks that user code writes between the first steps.

    model.mean.lerp_(x.mean(0), 0.1)     in the loop, by this rank's own samples

Each rank then trains another model, and nothing fails. Buffers that the forward pass changes are
set to those of one rank after each step; the ones that a loop changes are not. A rank's own queue
is legal, so a difference is one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.parallel.program import Program
from shoal.trainer.guards import reports
from shoal.trainer.guards.checksums import fingerprint
from shoal.trainer.guards.guard import Guard
from shoal.trainer.step.step_vector import Invariant, InvariantGroup, StepNumbers

STEPS = 4
"""First steps that are compared."""
NAME = "written buffers"


class WrittenBuffersGuard(Guard):
    """Guard against buffers that the loop of each rank writes for itself.

    Args:
        program: the run's; its buffers are whole on every rank.
        notice: prints a line, by rank 0.
    """

    def __init__(self, program: Program, notice: Callable[[str], None]) -> None:
        self.program, self.notice = program, notice
        self._everyone = InvariantGroup(range(program.world.size), program.world.rank)
        self._marks, self._written, self._is_named = self._read_marks(), list[str](), False

    def _read_marks(self) -> dict[str, tuple[int, int]]:
        return reports.model_notices.mark_buffers(self.program.module)

    def due(self, step: int) -> bool:
        """Return True in the first steps."""
        return step <= STEPS

    def before(self, step: int, batch: Any) -> None:
        """Note which buffers were written since the last step."""
        now = self._read_marks()
        self._written = [name for name, mark in now.items() if self._marks.get(name) != mark]

    def invariants(self, step: int) -> Sequence[Invariant]:
        """Return a checksum of the written buffers; 0 if there are none."""
        if not step:
            return ()
        buffers = dict(self.program.module.named_buffers())
        written = [buffers[name] for name in self._written if name in buffers]
        return [Invariant(NAME, fingerprint(written, whole=True) if written else 0, self._everyone)]

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Print a line, once, if ranks wrote other numbers."""
        if step and not self._is_named and numbers.invariants.differs(NAME):
            self._is_named = True
            self.notice(reports.model_notices.written_buffers_line(self._written))

    def updated(self, step: int, *, skipped: bool) -> None:
        """Note the buffers after a step."""
        self._marks = self._read_marks()
