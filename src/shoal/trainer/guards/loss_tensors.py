"""Compare the tensors of a loss over ranks that a script writes between the first steps.

    log_alpha.backward(); own.step()     a temperature that each rank tunes by its own samples

A loss that refers to it weighs samples otherwise on each rank, and nothing fails. At the start all
tensors of the loss are compared; here those that were written since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.parallel.program import Program
from shoal.trainer.guards.checksums import fingerprint
from shoal.trainer.guards.guard import Guard
from shoal.trainer.guards.loss_trial import unlike_tensor_line
from shoal.trainer.step.step_vector import Invariant, InvariantGroup, StepNumbers

STEPS = 4
"""First steps that are compared."""
NAME = "tensors of the loss"


class LossTensorsGuard(Guard):
    """Guard against tensors of the loss that the loop of each rank writes for itself.

    Args:
        program: the run's.
        tensors: of the loss, by name.
        notice: prints a line, by rank 0.
    """

    def __init__(
        self, program: Program, tensors: dict[str, torch.Tensor], notice: Callable[[str], None]
    ) -> None:
        # Of a tensor on a device the host would wait for the numbers.
        self.tensors = {name: one for name, one in tensors.items() if one.is_cpu}
        self.notice = notice
        self._everyone = InvariantGroup(range(program.world.size), program.world.rank)
        self._versions = {name: one._version for name, one in self.tensors.items()}
        self._is_named = False

    def due(self, step: int) -> bool:
        """Return True in the first steps."""
        return step <= STEPS

    def _list_written(self) -> list[str]:
        return [n for n, one in self.tensors.items() if one._version != self._versions[n]]

    def invariants(self, step: int) -> Sequence[Invariant]:
        """Return a checksum of the written tensors; 0 if there are none."""
        if step < 2:
            return ()
        written = [self.tensors[name].detach() for name in self._list_written()]
        value = fingerprint(written, whole=True) if written else 0
        return [Invariant(NAME, value, self._everyone)]

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Print a line, once, if ranks wrote other numbers."""
        if step > 1 and not self._is_named and numbers.invariants.differs(NAME):
            self._is_named = True
            self.notice(unlike_tensor_line(next(iter(self._list_written()), "a tensor")))
