"""Can one process train this model beside the others? What it needs, and the words where it cannot.

The proof needs a twin: weights, gradients and optimizer state in float64, in one process, and both
sides' gradients of every step to compare. Where memory or time forbid it, or an operation has no
float64 kernel, nothing is proven and nothing is refused: the reason is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil
import torch

from shoal.base.units import bytes_text, seconds_text
from shoal.fabric import World
from shoal.trace.alone import CollectiveAlone
from shoal.trainer.run import Run

T = TypeVar("T")
STATES = 5
"""Copies of the parameters that one training process holds: weights, gradients, two states, one
temporary."""


class CannotProve(Exception):
    """The twin cannot run; the text is the reason, and no fault of the layout."""


class NoFloat64(CannotProve):
    """The model does not run in float64: it may in another format."""


def check_memory(run: Run, steps: int, beside: int) -> None:
    """Called with the twin's run as it is made. Errors: CannotProve when memory will not do.

    Needed   the twin's states, its record and the layout's (steps + 2 copies each), and two copies
             in every process beside it on this machine, which gathers whole gradients
    """
    elements = run.plan.parameters
    size_bytes = next(iter(run.program.parameters.values())).element_size()
    records = 2 * (steps + 2)
    needed_bytes = elements * size_bytes * (STATES + records + 2 * beside)
    available_bytes = psutil.virtual_memory().available
    if needed_bytes > available_bytes:
        raise CannotProve(
            f"memory: one process with the gradients of {steps} steps needs "
            f"{bytes_text(needed_bytes)}, {bytes_text(available_bytes)} are free"
        )


class Clock:
    """Stops a twin that would take too long, as soon as that can be told."""

    def __init__(self, budget_s: float | None, steps: int) -> None:
        self.budget_s = budget_s
        self.steps = steps
        self.began_s = time.perf_counter()
        self.taken = 0

    def step(self) -> None:
        """After every step. Errors: CannotProve if all steps will exceed the budget."""
        self.taken += 1
        expected_s = (time.perf_counter() - self.began_s) / self.taken * self.steps
        if self.budget_s is not None and expected_s > self.budget_s:
            raise CannotProve(
                f"time: {self.steps} steps in one process would take {seconds_text(expected_s)}, "
                f"{seconds_text(self.budget_s)} are allowed"
            )


def on_all(world: World, work: Callable[[], T]) -> T:
    """Do what may fail on every rank. Errors: CannotProve on all of them if it did on one."""
    try:
        result, failed = work(), ""
    except Exception as failure:
        result, failed = None, reason(failure)
    told = next((text for text in world.gather_json(failed) if text), "")
    if told or result is None:
        raise CannotProve(told)
    return result


def reason(failure: Exception) -> str:
    """Why the twin broke down, as one line."""
    if isinstance(failure, CannotProve):
        return str(failure)
    waits = collective(failure)
    if waits is not None:
        return (
            f"the model takes part in a collective of its own ({waits.name} at {waits.where}), "
            f"which one process cannot do alone; what it computes on several ranks has no "
            f"reference in one"
        )
    line = str(failure).strip().splitlines()[0] if str(failure).strip() else ""
    if isinstance(failure, torch.OutOfMemoryError | MemoryError):
        return f"memory: {line}"
    return f"the model does not run in this precision: {type(failure).__name__}: {line}"


def of_format(failure: Exception) -> bool:
    """Whether another number format may help."""
    other = CannotProve | torch.OutOfMemoryError | MemoryError
    return not isinstance(failure, other) and collective(failure) is None


def collective(failure: BaseException | None) -> CollectiveAlone | None:
    """The collective at which it broke down, whatever a library made of that."""
    while failure is not None and not isinstance(failure, CollectiveAlone):
        failure = failure.__cause__ or failure.__context__
    return failure
