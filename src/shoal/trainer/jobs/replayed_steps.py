"""Steps of an earlier run that the main job trains again, each observed, up to the last one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import StepResult


class StepObserver(Protocol):
    """Observer of the steps of a replay; every rank has one and calls it (collective)."""

    def begin(self, run: Run) -> None:
        """Observe a run before its first step."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """Observe a step that was just taken, before the next one."""

    def after_rewind(self, run: Run) -> None:
        """Observe a run that went back to a checkpoint, before its next step."""


class ReplayEnd(Exception):
    """Raised after the last step of a replay, on every rank."""


@dataclass
class ReplayedSteps:
    """Steps of an earlier run that are trained again, to be looked at.

    Attributes:
        last_step: the run stops after it, without a validation; schedules keep the run's length.
        observer: of each step.
        rewinds: returns to a checkpoint that the run made from there on, (from step, to step) each.
            The last step ended the run's last pass over it, so earlier passes do not end a replay.
    """

    last_step: int
    observer: StepObserver
    rewinds: tuple[tuple[int, int], ...] = ()
    _is_begun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Count the returns that the run made after it had taken the last step once."""
        self._returns_left = sum(start >= self.last_step > to for start, to in self.rewinds)

    def run_step(self, run: Run, batch: Any) -> StepResult:
        """Take and observe a step.

        Raises:
            ReplayEnd: it was the last one.
        """
        if not self._is_begun:
            self._is_begun = True
            self.observer.begin(run)
        result = run.step(batch)
        self.observer.after_step(run, result)
        if run.step_count >= self.last_step and not self._returns_left:
            raise ReplayEnd
        return result

    def needs_save(self, step: int) -> bool:
        """Return whether the run later went back to its checkpoint of a step."""
        return any(to == step for _, to in self.rewinds)

    def count_rewind(self, run: Run, step: int) -> None:
        """Count a return to a checkpoint that this replay repeated after `step`."""
        self._returns_left -= step >= self.last_step
        self.observer.after_rewind(run)
