"""Protect gradients between run.forward_backward and run.update, and after the update.

    run.forward_backward … run.update      sums over all ranks, in parts where a layout has them
    run.update … the next step             none: what is done to them is lost

If a layout shards gradients, a norm, a clamp or a mask on the visible gradients is none on the
stepped ones. That ends the run, with an error that names the right call. torch's own clipping
functions ask before they act (`_torch.ask_before_clipping`). With a limit that no gradient reaches
they are called for the norm alone, which changes nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.parallel.program import Program
from shoal.trainer._torch import intercept_gradient_clipping, make_gradient_placeholder
from shoal.trainer.guards import reports
from shoal.trainer.guards.checksums import is_value_check_step, local_part


class HalfStepGradients:
    """Gradients between run.forward_backward and run.update, where ranks step parts of the sums.

    Under zero 1 and 2 parameters have no gradient there: a placeholder in `.grad` refuses writes.

    Under zero 3 they have their rows, which may be scaled. Another tensor, or none, in their place
    would change nothing, since the optimizer steps over the rows. torch's functions for lists
    (`_foreach_…`) leave no trace in the counters of a DTensor: the norms of steps 1, 2, 4, 8 and
    so on show them. Under tp and pp a rank has gradients of its own parts, whose norm is not that
    of the whole.

    Args:
        program: the run's.
    """

    def __init__(self, program: Program) -> None:
        self.layout = program.plan.layout
        self.parameters = [p for p in program.parameters.values() if p.requires_grad]
        self.names = {id(p) for p in self.parameters}
        self.step, self._over = 0, False
        self._stand_ins: dict[nn.Parameter, torch.Tensor] = {}
        self._is_part = bool(program.cuts) or program.pipe.size > 1
        if self.layout.zero in (1, 2):
            self._stand_ins = {
                p: make_gradient_placeholder(p, self._write_error) for p in self.parameters
            }
        self._held: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._norms: list[torch.Tensor] = []

    def open(self, step: int) -> None:
        """Start to protect the gradients after the first half of a step."""
        self.step, self._over = step, False
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is None:
                parameter.grad = stand_in
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
        norms, self._norms = self._norms, []
        changed = bool(norms) and not all(map(torch.equal, norms, self._row_norms()))
        held, self._held = self._held, []
        gone = [p for p, _ in held if p.grad is None]
        others = [p for p, gradient in held if p.grad is not None and p.grad is not gradient]
        for parameter in self._stand_ins:
            parameter.grad = None
        if gone and len(gone) == len(held):
            raise reports.writes_report.dropped_gradients_error(self.step, "run.forward_backward")
        if gone or others:
            raise self._change_error("set to None" if gone else "replaced")
        return changed

    def _row_norms(self) -> list[torch.Tensor]:
        """Return norms of the rows, without gradients that are gone."""
        held = [local_part(p.grad) for p, _ in self._held if p.grad is not None]
        return [norm.nan_to_num() for norm in torch._foreach_norm(held)] if held else []

    def forbid_clipping(self) -> None:
        """Refuse clipping after a step, until the next one: it would change nothing."""
        self._over = True
        watch_clipping(self)

    def release(self) -> None:
        """Stop protecting the gradients, since another step begins or the run is closed."""
        WATCHED.discard(self)

    def check_clipping(self, name: str, parameters: Sequence[Any]) -> None:
        """Raise ConfigError for torch's clipping if it would change nothing."""
        if self._over:
            raise reports.writes_report.foreign_change_error()
        if self._stand_ins:
            raise self._change_error(f"given to {name}")
        if self._is_part and "norm" in name:
            raise reports.writes_report.partial_norm_error(self.step, name, self.layout.text())

    def _write_error(self, operation: str) -> ConfigError:
        if operation == "zero_":
            return reports.writes_report.dropped_gradients_error(self.step, "run.forward_backward")
        return self._change_error("changed")

    def _change_error(self, what: str) -> ConfigError:
        return reports.writes_report.half_step_change_error(self.step, what, self.layout.text())


class ClippingWatcher(Protocol):
    """Object that protects the gradients of some parameters from clipping."""

    names: set[int]

    def check_clipping(self, name: str, parameters: Sequence[Any]) -> None:
        """Check a call of torch's clipping function `name` on some of these parameters."""


WATCHED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose `asked` is called."""


def watch_clipping(one: ClippingWatcher) -> None:
    """Register an object whose `asked` runs before torch's clipping of its gradients."""
    _install()
    WATCHED.add(one)


@functools.cache
def _install() -> None:
    intercept_gradient_clipping(WATCHED, _notify_watchers)


def _notify_watchers(name: str, parameters: Sequence[Any]) -> bool:
    """Call `asked` of the owners of these parameters; return whether only the norm is wanted."""
    asked = [one for one in WATCHED if any(id(p) in one.names for p in parameters)]
    for one in asked if name else ():
        one.check_clipping(name, parameters)
    return bool(asked) and not name
