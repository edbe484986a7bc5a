"""Resources that the one-process reference needs, and the messages if they are lacking.

The proof needs a twin: weights, gradients and optimizer state in float64, in one process, and room
on a disk for its gradients of every step. If memory, disk or time forbid it, or an operation has
no float64 kernel, nothing is proven and nothing is refused: the reason is printed.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from shoal.base.text.units import bytes_text, seconds_text
from shoal.fabric import World
from shoal.proof.tensor_spill import IN_MEMORY_BYTES
from shoal.trace.isolation.collective_ban import ForbiddenCollective
from shoal.trainer.run import Run

T = TypeVar("T")
STATES = 5
"""Copies of the parameters that one training process holds: weights, gradients, two states, one
temporary."""

GATHERED = 4
"""Copies of the largest tensor: gathered, one process's beside it, and their difference."""


class CannotProveError(Exception):
    """Exception: the reference run cannot run; the text is the reason, no fault of the layout."""


class NoFloat64Error(CannotProveError):
    """CannotProve: the model does not run in float64; it may in another format."""


def check_resources(run: Run, room: ProofResources) -> None:
    """Refuse the reference run, as it is made, if memory or disk are too small.

    Raises:
        CannotProveError: there is too little.
    """
    sizes = [p.numel() * p.element_size() for p in run.program.parameters.values()]
    if lacking := room.find_shortage(sizes):
        raise CannotProveError(lacking)


@dataclass(frozen=True)
class ProofResources:
    """Resources of rank 0's machine that a proof shares.

    Attributes:
        beside: processes of the layout there.
        sharing: how many of them divide one copy of the model.
        steps: whose gradients are kept.
        folder: of the files that keep them.
    """

    beside: int
    sharing: int
    steps: int
    folder: Path | None

    @staticmethod
    def of(
        world: World, layout: str | Mapping[str, Any], steps: int, folder: Path | None
    ) -> ProofResources:
        """Return the room for the proof of a layout."""
        return ProofResources(world.local_size, ranks_sharing(layout, world.size), steps, folder)

    def find_shortage(self, sizes: Sequence[int]) -> str:
        """Return the reason if memory or disk are too small for parameters of these bytes; else "".

        Memory    the twin's states or, once it is freed, those of the layout's processes here; the
                  largest tensor gathered on top
        Disk      the twin's gradients of every step, its weights before and after
        """
        copy_bytes = sum(sizes)
        copies = STATES * max(1.0, self.beside / self.sharing)
        needed_bytes = int(copies * copy_bytes) + GATHERED * max(sizes, default=0)
        available_bytes = psutil.virtual_memory().available
        if needed_bytes > available_bytes:
            return (
                f"memory: one process, and after it {self.beside} of the layout, need "
                f"{bytes_text(needed_bytes)}, {bytes_text(available_bytes)} are free"
            )
        record_bytes = (self.steps + 2) * copy_bytes
        where = self.folder or Path(tempfile.gettempdir())
        if record_bytes > max(IN_MEMORY_BYTES, shutil.disk_usage(where).free):
            return (
                f"disk: what one process computes in {self.steps} steps takes "
                f"{bytes_text(record_bytes)} in {where}, "
                f"{bytes_text(shutil.disk_usage(where).free)} are free"
            )
        return ""


def ranks_sharing(layout: str | Mapping[str, Any], processes: int) -> int:
    """Return how many ranks divide one copy of weights, gradients and states; 1 if unknown.

    >>> ranks_sharing("fsdp", 4), ranks_sharing("ddp", 4), ranks_sharing({"tp": 2, "pp": 2}, 4)
    (4, 1, 4)
    """
    if isinstance(layout, str):
        return processes if layout == "fsdp" else 1
    shards = layout.get("dp_shard", 1) if layout.get("zero") == 3 else 1
    return max(1, int(layout.get("tp", 1)) * int(layout.get("pp", 1)) * int(shards))


class TimeBudget:
    """Time limit of a reference run, which ends it once its total time can be predicted."""

    def __init__(self, budget_s: float | None, steps: int) -> None:
        self.budget_s = budget_s
        self.steps = steps
        self.began_s = time.perf_counter()
        self.taken = 0

    def step(self) -> None:
        """Count a finished step, and end the reference run if all its steps exceed the budget.

        Raises:
            CannotProveError: all steps together will exceed the budget.
        """
        self.taken += 1
        expected_s = (time.perf_counter() - self.began_s) / self.taken * self.steps
        if self.budget_s is not None and expected_s > self.budget_s:
            raise CannotProveError(
                f"time: {self.steps} steps in one process would take {seconds_text(expected_s)}, "
                f"{seconds_text(self.budget_s)} are allowed"
            )


def run_on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Run `work` on every rank.

    Raises:
        CannotProveError: on all ranks if `work` raised it on one.
    """
    try:
        result, failed = work(), ""
    except Exception as failure:
        result, failed = None, failure_reason(failure)
    told = next((text for text in world.gather_json(failed) if text), "")
    if told or result is None:
        raise CannotProveError(told)
    return result


def failure_reason(failure: Exception) -> str:
    """Return the reason why the reference run failed, as one line."""
    if isinstance(failure, CannotProveError):
        return str(failure)
    waits = find_collective(failure)
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


def is_dtype_failure(failure: Exception) -> bool:
    """Return whether another number format may help."""
    other = CannotProveError | torch.OutOfMemoryError | MemoryError
    return not isinstance(failure, other) and find_collective(failure) is None


def find_collective(failure: BaseException | None) -> ForbiddenCollective | None:
    """Return the collective at which the reference failed, also in a library's exception."""
    while failure is not None and not isinstance(failure, ForbiddenCollective):
        failure = failure.__cause__ or failure.__context__
    return failure
