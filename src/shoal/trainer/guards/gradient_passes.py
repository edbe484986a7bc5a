"""Refuse changes that user code makes to gradients between two calls of a run.

    run.backward … the end of the loop     a rank's gradients are sums over its own samples
    the passes … run.update                `guards/gradient_halves.py`
    step hooks of the optimizer            the mean gradient, in parts where a layout has them

A norm, a clamp or noise differs on such partial sums, and ranks diverge. That ends the run, with an
error that names the right call: after the loop. So does `optimizer.zero_grad()` inside of it.

torch's write counters show the writes: the check reads no number, and waits for no device. Writes
through `.data` are not counted: norms show them in steps 1, 2, 4, 8, …, read after the step's one
wait. torch's own clipping functions ask before they act (`_torch.intercept_gradient_clipping`):
under zero2 parameters have no gradient there, and clipping would silently do nothing. With a limit
that no gradient reaches they are called for the norm alone, which changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.base.errors import BugError, ConfigError
from shoal.base.plans.placement import find_lowest_copies
from shoal.fabric.device import copy_numbers_to_device
from shoal.parallel.program import Program, Reducer
from shoal.trainer._torch import get_step_pre_hooks
from shoal.trainer.guards._torch import (
    REDUCTIONS,
    Found,
    make_gradient_placeholder,
)
from shoal.trainer.guards.checksums import (
    Marks,
    fingerprint,
    has_nonzero_gradient,
    is_value_check_step,
    list_changed_gradients,
    local_part,
    read_gradient_marks,
)
from shoal.trainer.guards.gradient_halves import WATCHED, watch_clipping
from shoal.trainer.guards.reports.writes_report import (
    CLIP,
    dropped_gradients_error,
    refuse_dropped_gradients,
    unlike_changes_error,
)
from shoal.trainer.step.optimizer_step import sum_of_squares
from shoal.trainer.step.whole_gradients import WholeGradients


class PassGradients:
    """Gradients of a step whose passes are written out, as the run's last call left them.

    Args:
        program: the run's.
        graded: parameters whose gradients are checked: all, or some of them.
        step: the current step, from 1.
        scale: factor of its losses.
    """

    def __init__(
        self, program: Program, graded: Sequence[nn.Parameter], step: int, scale: float
    ) -> None:
        self.graded, self.step, self.scale = graded, step, scale
        self.own = {id(p) for p in program.parameters.values()}
        self.whole = WholeGradients(program)
        self.alone = program.world.size == 1
        self.passes, self.means = 0, False
        self._reads, self._norms = is_value_check_step(step), list[torch.Tensor]()
        self._pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._elsewhere = {
            p: make_gradient_placeholder(p, self._write_error)
            for p in _buffered_parameters(program)
        }
        self.record_marks()
        watch_clipping(self)

    def record_marks(self) -> None:
        """Record the marks and norms of the gradients that the run made."""
        self._marks: Marks = read_gradient_marks(self.graded)
        self._norms = self._gradient_norms()

    @contextmanager
    def backward(self, reducer: Reducer, rounds: int, *, counted: bool) -> Iterator[None]:
        """Wrap a backward pass of the run.

        Args:
            reducer: makes gradients anew that were removed before the first backward pass.
            rounds: micro-batches of the busiest rank.
            counted: the loss came with a count; else it is a share of the step's mean.
        """
        self.check()
        if not self.passes and any(p.grad is None for p in self._changed_parameters()):
            reducer.start_step(rounds)  # zero_grad at the top of a loop: nothing is lost
        self.remove_placeholders()
        yield
        for parameter, gradient in self._elsewhere.items():
            parameter.grad = gradient
        self.passes += 1
        self.means = not counted and self.scale == 1.0
        self.record_marks()

    def remove_placeholders(self) -> None:
        """Remove the placeholders of gradients that the run stores in other buffers."""
        for parameter, gradient in self._elsewhere.items():
            if parameter.grad is gradient:
                parameter.grad = None

    def check(self) -> None:
        """Check what user code did since the run's last call.

        Raises:
            ConfigError: gradients were removed or changed.
        """
        changed = self._changed_parameters()
        if not changed and self._norms and not self._is_mean():
            self._pairs.append((self._norms, self._gradient_norms()))
        if not changed:
            return
        if self.passes:
            weights = [p for p in self.graded if id(p) in self.own]
            refuse_dropped_gradients(weights, self._marks, self.step, "run.backward")
        if has_nonzero_gradient(changed) and not self._is_mean():
            raise self._write_error()

    def compare(self) -> None:
        """Compare norms from before and after user code, once the host has waited.

        Raises:
            ConfigError: gradients were changed through `.data`.
        """
        pairs, self._pairs = self._pairs, []
        for before, after in pairs:
            if torch.stack(before).tolist() != torch.stack(after).tolist():
                raise self._write_error()

    def find_owner(self, name: str, tensors: Sequence[Any]) -> Found:
        """Raise ConfigError for torch's clipping of sums over this rank's own samples."""
        names = self.whole.list_names(tensors)
        if name and names and self.passes and not self._is_mean():
            raise self.refusal(f"{name} was called")
        return (OwnSums(tensors), names) if names and not name else None

    def close(self) -> None:
        """Check the gradients a last time before the update, and stop watching."""
        self.check()
        self.remove_placeholders()
        WATCHED.discard(self)

    def refusal(self, what: str) -> ConfigError:
        """Return the error that ends the run, for a change described by `what`."""
        return ConfigError(
            f"step {self.step}: {what} inside of the loop over run.micro_batches, where each rank "
            f"has sums over its own samples: a norm, a clamp or noise is not that of the step's "
            f"mean gradient; try: the same after the loop, before run.update"
        )

    def _gradient_norms(self) -> list[torch.Tensor]:
        """Return norms of gradients in progress; none in most steps, and before the first pass."""
        if not (self._reads and self.passes):
            return []
        held = [local_part(p.grad) for p in self.graded if id(p) in self.own and p.grad is not None]
        return [norm.nan_to_num().double() for norm in torch._foreach_norm(held)] if held else []

    def _write_error(self, operation: str = "") -> ConfigError:
        if "zero_" in operation:
            return dropped_gradients_error(self.step, "run.backward")
        return self.refusal("gradients were changed")

    def _changed_parameters(self) -> list[nn.Parameter]:
        """Return parameters whose gradient user code changed; a stepped part may lose its own."""
        changed = list_changed_gradients(self._marks, self.graded)
        return [p for p in changed if id(p) in self.own or p.grad is not None]

    def _is_mean(self) -> bool:
        """Return whether the gradients are the step's mean, as in plain PyTorch: in one process."""
        return self.alone and self.means


def compare_changes(program: Program, step: int, changed: bool, operands: int = 0) -> float:
    """Return the norm of the gradients before an update; refuse changes that differ by rank.

    Every rank calls it once a step, in loops that write out the passes. It compares gradients that
    several ranks hold. Rows that a rank steps alone may differ from those of others.

    Args:
        program: the run's.
        step: the current step.
        changed: user code changed gradients of this rank since the passes.
        operands: checksum of the plain tensors that it combined with parts of gradients.

    Returns:
        The norm over all parts on all ranks; nan if some gradient is.

    Raises:
        ConfigError: ranks changed the same gradients differently; the same on all ranks.
    """
    world, whole = program.world, WholeGradients(program)
    held = whole.by_copies(list(program.local))
    square = sum(sum_of_squares(some) / number for number, some in held.items())
    copies, codes = _list_gradient_copies(program), [float(operands)]
    gradients = dict(whole.held(list(program.local)))
    for names, _ in copies:
        some = [gradients[name] for name in names if changed and name in gradients]
        codes.append(float(fingerprint(some, whole=True)) if some else 0.0)
    own = copy_numbers_to_device(world.device, [0.0, float(changed), *codes])
    own[0] = square
    rows = world.all_gather(own).tolist()
    firsts = [[0] * world.size, *(ranks for _, ranks in copies)]
    for column, lowest in enumerate(firsts, start=2):
        for rank, first in enumerate(lowest):
            if rows[rank][column] != rows[first][column]:
                flags = [bool(row[1]) for row in rows]
                raise unlike_changes_error(step, (first, rank), flags)
    total = sum(row[0] for row in rows)
    return math.sqrt(total) if total >= 0 else math.nan


def _list_gradient_copies(program: Program) -> list[tuple[list[str], list[int]]]:
    """Return gradients that the same ranks hold alike, and by rank the lowest of these ranks."""
    found: dict[Any, list[str]] = {}
    for name in program.names:
        row = program.rows[name]
        outer, inner = row.data_axes
        axes = {"whole": (outer, inner), "states": (), "rows": (outer,)}[row.data]
        inside = ("cp",) if row.tp_cut else ("cp", "tp")
        stages = row.stages if len(row.stages) > 1 else ()
        found.setdefault(((*axes, *inside), stages), []).append(name)
    layout, size = program.plan.layout, program.world.size
    return [(names, find_lowest_copies(layout, size, *kind)) for kind, names in found.items()]


def _buffered_parameters(program: Program) -> list[nn.Parameter]:
    """Return parameters whose gradient the run stores in a buffer after each pass."""
    plan, parameters = program.plan, program.parameters
    if plan.layout.zero == 3:
        return []
    every = plan.sums_parts_each_pass
    names = [name for one in plan.buckets if every or one.compute for name in one.names]
    return [parameters[name] for name in names]


class HookGradients:
    """Gradients while the user's step hooks run, under a layout that steps parts of weights.

    A hook may change single elements, or read a norm; doing both uses the norm of a part.
    """

    def __init__(self, program: Program, stepped: Sequence[nn.Parameter], step: int) -> None:
        self.layout, self.stepped, self.step = program.plan.layout.text(), stepped, step
        self.whole = WholeGradients(program)

    def find_owner(self, name: str, tensors: Sequence[Any]) -> Found:
        """Return what clips the gradients of these parameters, or of stepped parts of them."""
        names = self.whole.list_names(tensors)
        return (self.whole, names) if names else None

    @contextmanager
    def watch_hooks(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Wrap a call of `optimizer.step`; only its hooks are watched."""
        reads, marks = _ReductionMode(), dict[int, tuple[int, int]]()

        def before_step(*_what: Any) -> None:
            marks.update(read_gradient_marks(self.stepped))
            watch_clipping(self)
            reads.__enter__()

        def end(*_what: Any) -> None:
            stop_watching()
            if reads.found and has_nonzero_gradient(list_changed_gradients(marks, self.stepped)):
                raise self._hook_error(f"reads {reads.found} and changes gradients")

        def stop_watching() -> None:
            if self in WATCHED:
                WATCHED.discard(self)
                reads.__exit__(None, None, None)

        first = optimizer.register_step_pre_hook(before_step)
        get_step_pre_hooks(optimizer).move_to_end(first.id, last=False)
        last = optimizer.register_step_pre_hook(end)
        try:
            yield
        finally:
            stop_watching()
            first.remove()
            last.remove()

    def _hook_error(self, what: str) -> ConfigError:
        return ConfigError(
            f"step {self.step}: a step hook of the optimizer (register_step_pre_hook) {what}, and "
            f"under {self.layout} a rank steps parts of the weights, so that its norm is another "
            f"one than all gradients'; {CLIP}"
        )


class OwnSums:
    """Gradients during the passes, whose norm alone is asked for: that of this rank's own sums.

    Args:
        tensors: parameters, or their gradients.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        held = (t.grad if isinstance(t, nn.Parameter) else t for t in tensors)
        self.gradients = [one for one in held if one is not None]

    def total_norm(
        self, names: Sequence[str], norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Return the norm of this rank's own sums until now."""
        return nn.utils.get_total_norm(self.gradients, norm_type, error_if_nonfinite)

    def scale(self, names: Sequence[str], max_norm: float, total_norm: torch.Tensor) -> None:
        """Refused before it is called."""
        raise BugError("clipping of a rank's own sums was not refused")

    def clip_value(self, names: Sequence[str], clip_value: float) -> None:
        """Refused before it is called."""
        raise BugError("clipping of a rank's own sums was not refused")


class _ReductionMode(TorchFunctionMode):
    """Mode that notes the first reduction of torch that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in REDUCTIONS:
            self.found = self.found or name
        return func(*args, **(kwargs or {}))
