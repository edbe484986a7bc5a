"""State of an optimizer that steps parts of weights, found by the weights of the user's model.

    optimizer.state[w]["exp_avg"]      fsdp: as a whole tensor, like w itself
                                       zero1, zero2: this rank's part, which a line says once
                                       pp: of a weight on another stage: no numbers

The optimizer's own keys are the parts that it steps. A look-up of theirs costs what it did.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from shoal.optim.named_state import inner_optimizers
from shoal.parallel.program import Program
from shoal.trainer.guards import reports
from shoal.trainer.guards._torch import ABSENT, mark_absent
from shoal.trainer.guards._torch_parts import mark_partial_gradient


class StateByWeight(defaultdict[Any, Any]):
    """An optimizer's state; a weight of the model that is no key of it finds its part's.

    Args:
        state: by part.
        program: the run's.
        notice: prints a line, by rank 0.
    """

    def __init__(
        self, state: dict[Any, Any], program: Program, notice: Callable[[str], None]
    ) -> None:
        super().__init__(dict, state)
        self.local, self.notice = program.local, notice
        self.layout, self._told = program.plan.layout.text(), False
        self.names = {id(p): name for name, p in program.module.named_parameters()}
        for one in program.local.values():
            self.names.pop(id(one.parameter), None)

    def __missing__(self, key: Any) -> Any:
        found = self._find(key)
        return super().__missing__(key) if found is None else found

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or bool(self._find(key))

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def _find(self, weight: Any) -> dict[str, Any] | None:
        """Return the state of a weight's part; None for what is no weight of the model."""
        name = self.names.get(id(weight))
        if name is None:
            return None
        part = self.local[name].parameter if name in self.local else None
        entries = self.get(part) if part is not None else next(iter(self.values()), None)
        return {
            key: self._wrap(weight, part, value)
            if isinstance(value, torch.Tensor) and value.ndim
            else value
            for key, value in (entries or {}).items()
        }

    def _wrap(self, weight: Any, part: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
        """Return a part of the state as user code may see it."""
        if id(weight) in ABSENT:
            return mark_absent(value.new_empty(weight.shape, device="meta"), ABSENT[id(weight)])
        if hasattr(weight, "device_mesh"):
            from shoal.parallel.data_parallel.sharded_weights import wrap_rows

            rows = value if part is not None else value.new_empty(0)
            return wrap_rows(weight, rows)
        return mark_partial_gradient(value if part is not None else value.new_empty(0), self)

    def read_part(self, function: str) -> None:
        """Print a line, once, for a reduction of a part."""
        if not self._told:
            self._told = True
            self.notice(reports.optimizer_report.part_of_state_line(function, self.layout))

    def compute_with_part(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Do nothing: the result is watched, too."""

    def note_operand(self, tensor: torch.Tensor) -> None:
        """Do nothing: the state of ranks is compared by nobody."""


LIBRARIES = ("torch", "shoal", "lightning", "pytorch_lightning", "accelerate", "transformers")
"""Packages whose own saves know what a rank has of an optimizer's state."""


def _called_by_script() -> bool:
    """Return whether a script, and no library, called `optimizer.state_dict`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] not in LIBRARIES


def watch_state(
    program: Program, optimizer: torch.optim.Optimizer, notice: Callable[[str], None]
) -> None:
    """Let an optimizer's state be found by the weights of the model, also after it was loaded.

    A script's own `optimizer.state_dict()` is refused: no optimizer could load this rank's part.

    Args:
        program: the run's.
        optimizer: the run's.
        notice: prints a line, by rank 0.
    """

    def install(_optimizer: torch.optim.Optimizer) -> None:
        before = optimizer.state
        if isinstance(before, StateByWeight):
            return
        sharing = [one for one in inner_optimizers(optimizer) if one.state is before]
        for one in (optimizer, *sharing):
            one.state = (
                StateByWeight(before, program, notice) if one is optimizer else optimizer.state
            )

    def refuse(_optimizer: torch.optim.Optimizer) -> None:
        if _called_by_script():
            raise reports.optimizer_report.own_state_error(program.plan.layout.text())

    install(optimizer)
    optimizer.register_state_dict_pre_hook(refuse)
    optimizer.register_load_state_dict_post_hook(install)
