"""Protect gradients between a step's passes and run.update, and after the update.

    the passes … run.update        the step's mean gradient, in parts where a layout has them
    run.update … the next step     none: what is done to them is lost

torch's own functions on gradients (`clip_grad_norm_`, `clip_grad_value_`, `get_total_norm`) ask
before they act (`_torch.intercept_gradient_clipping`). Where ranks hold parts they get the norm of
all parts, and clip the tensors that are stepped. Any other norm, clamp or mask on gradients that
are not the stepped ones ends the run, with an error that names the right call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.parallel.program import Program
from shoal.trainer.guards import reports
from shoal.trainer.guards._torch import (
    PARTS,
    Found,
    intercept_gradient_clipping,
    make_gradient_placeholder,
    mark_stage_gradient,
)
from shoal.trainer.guards._torch_parts import CUTS, mark_partial_gradient
from shoal.trainer.guards.checksums import is_value_check_step, local_part
from shoal.trainer.step.whole_gradients import WholeGradients


class HalfStepGradients:
    """Gradients between a step's passes and run.update, where ranks step parts of them.

    Under zero 1 and 2 parameters have no gradient there: a placeholder in `.grad` refuses writes,
    and a line says that it reads as zeros.

    Under zero 3 they have their rows, which may be scaled. Another tensor, or none, in their place
    would change nothing, since the optimizer steps over the rows. torch's functions for lists
    (`_foreach_…`) leave no trace in the counters of a DTensor: the norms of steps 1, 2, 4, 8 and
    so on show them. Under tp and pp a rank has gradients of its own parts.

    Args:
        program: the run's.
        notice: prints a line, by rank 0.
    """

    def __init__(self, program: Program, notice: Callable[[str], None]) -> None:
        self.layout, self.whole = program.plan.layout, WholeGradients(program)
        self.parameters = [p for p in program.parameters.values() if p.requires_grad]
        self.step, self.call, self._over = 0, "run.forward_backward", False
        self._stand_ins: dict[nn.Parameter, torch.Tensor] = {}
        if self.layout.zero in (1, 2):
            read = functools.cache(lambda: notice(reports.writes_report.ZEROS))
            # Weak: a gradient's reference to its weight's run is a cycle that no collector sees.
            write_error = weakref.WeakMethod(self._write_error)

            def refuse(operation: str) -> ConfigError | None:
                known = write_error()
                return known(operation) if known else reports.writes_report.foreign_change_error()

            self._stand_ins = {
                p: make_gradient_placeholder(p, refuse, read) for p in self.parameters
            }
        self._part = functools.cache(lambda: notice(reports.writes_report.PART))
        self._cut = [
            program.parameters[name] for name in program.cuts if name in program.parameters
        ]
        self._of_stage = self.parameters if program.pipe.size > 1 else []
        self._aliases: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        self._held: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._norms: list[torch.Tensor] = []

    def open(self, step: int, call: str) -> None:
        """Start to protect the gradients after the passes of a step, which `call` ended."""
        self.step, self.call, self._over = step, call, False
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is None:
                parameter.grad = stand_in
        for parameter in self._cut:
            if (gradient := parameter.grad) is not None and type(gradient) is torch.Tensor:
                cut = CUTS.get(id(parameter))
                alias = parameter.grad = mark_partial_gradient(gradient, self, cut, owned=True)
                self._aliases.append((parameter, alias, gradient))
        for parameter in self._of_stage:
            gradient, reader = parameter.grad, PARTS.get(id(parameter))
            if type(gradient) is torch.Tensor and reader is not None:
                alias = parameter.grad = mark_stage_gradient(gradient, reader)
                self._aliases.append((parameter, alias, gradient))
        held = self.parameters if self.layout.zero else []
        self._held = [(p, p.grad) for p in held if p.grad is not None]
        self._norms = [] if self._stand_ins or not is_value_check_step(step) else self._row_norms()
        watch_clipping(self)

    def close(self) -> bool:
        """Check the gradients before the second half; return whether they were changed in place.

        Raises:
            ConfigError: gradients were removed or replaced.
        """
        WATCHED.discard(self)
        self._remove_aliases()
        norms, self._norms = self._norms, []
        changed = bool(norms) and not all(map(torch.equal, norms, self._row_norms()))
        held, self._held = self._held, []
        gone = [p for p, _ in held if p.grad is None]
        others = [p for p, gradient in held if p.grad is not None and p.grad is not gradient]
        for parameter in self._stand_ins:
            parameter.grad = None
        if gone and len(gone) == len(held):
            raise reports.writes_report.dropped_gradients_error(self.step, self.call)
        if gone or others:
            raise self._change_error("set to None" if gone else "replaced")
        return changed

    def read_part(self, function: str) -> None:
        """Print a line, once, for a reduction of a part of a gradient."""
        self._part()

    def compute_with_part(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Do nothing: the result is watched, too."""

    def note_operand(self, tensor: torch.Tensor) -> None:
        """Note a plain tensor that meets a part of a gradient, so that ranks compare."""
        for parameter in self._cut[:1]:
            PARTS[id(parameter)].note_operand(tensor)

    def _remove_aliases(self) -> None:
        """Put the gradients of split weights back in place of their aliases."""
        aliases, self._aliases = self._aliases, []
        for parameter, alias, gradient in aliases:
            if parameter.grad is alias:
                parameter.grad = gradient

    def _row_norms(self) -> list[torch.Tensor]:
        """Return the norms of this rank's parts of the gradients that are not None."""
        held = [local_part(p.grad) for p, _ in self._held if p.grad is not None]
        return [norm.nan_to_num() for norm in torch._foreach_norm(held)] if held else []

    def forbid_clipping(self) -> None:
        """Refuse clipping after a step, until the next one: it would change nothing."""
        self._over = True
        for parameter, stand_in in self._stand_ins.items():
            parameter.grad = stand_in
        watch_clipping(self)

    def release_if_over(self) -> None:
        """Stop protecting the gradients after an update, since another run begins a step."""
        if self._over:
            self.release()

    def release(self) -> None:
        """Stop protecting the gradients, since another step begins or the run is closed."""
        WATCHED.discard(self)
        self._remove_aliases()
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is stand_in:
                parameter.grad = None

    def find_owner(self, name: str, tensors: Sequence[Any]) -> Found:
        """Return what clips these gradients; raise ConfigError if clipping would change nothing."""
        names = self.whole.list_names(tensors)
        if names and name and self._over:
            raise reports.writes_report.foreign_change_error()
        return (self.whole, names) if names else None

    def _write_error(self, operation: str) -> ConfigError | None:
        if self._over:  # zero_grad changes nothing; what else is done would be lost
            zeroes = operation == "zero_"
            return None if zeroes else reports.writes_report.foreign_change_error()
        if operation == "zero_":
            return reports.writes_report.dropped_gradients_error(self.step, self.call)
        return self._change_error("changed")

    def _change_error(self, what: str) -> ConfigError:
        return reports.writes_report.half_step_change_error(
            self.step, what, self.call, self.layout.text()
        )


class ClippingWatcher(Protocol):
    """Object that protects the gradients of some parameters from clipping."""

    def find_owner(self, name: str, tensors: Sequence[Any]) -> Found:
        """Return what clips the tensors of a call of torch's function `name`, or raise."""


WATCHED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose `find_owner` is called."""


def watch_clipping(one: ClippingWatcher) -> None:
    """Register an object whose `find_owner` runs before torch's clipping of its gradients."""
    _install()
    WATCHED.add(one)


@functools.cache
def _install() -> None:
    intercept_gradient_clipping(WATCHED, _find_owner)


def _find_owner(name: str, tensors: Sequence[Any]) -> Found:
    """Return what clips the tensors of a call, parameters or gradients; None: torch itself."""
    return next((found for one in list(WATCHED) if (found := one.find_owner(name, tensors))), None)
