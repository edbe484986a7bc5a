"""The step's mean gradient as the user holds it: its true norm on any layout, and clipping by it.

    between the passes and run.update      `.grad` is the step's mean gradient
    ddp                                    whole, on every rank
    zero1, zero2, fsdp                     rows, on the tensors that the optimizer steps
    tp, pp, ep                             this rank's part of the model

Each rank adds up the elements that it holds, each divided by the number of ranks that hold it, and
one all-reduce makes this the norm of the whole gradient. So every rank must make the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from shoal.base.errors import ConfigError
from shoal.parallel.program import Program
from shoal.trainer.step.optimizer_step import (
    StepTotals,
    mean_coefficient,
    reducer_of,
    sum_of_squares,
)


def average_gradients(program: Program, tally: StepTotals, scale: float) -> StepTotals:
    """Turn gradient sums into the step's mean gradient, in place, and return the step's totals.

    It is clipped already if the plan says so, by one multiplication as in `run.step`: so the bits
    are the same, and what user code adds afterwards, such as noise, is not clipped.

    Args:
        program: the run's.
        tally: totals of the step.
        scale: factor of the loss before backward.

    Returns:
        The totals, marked as averaged; unchanged if the step will be skipped.
    """
    if tally.broken or tally.count <= 0:
        return tally
    norm = tally.norm / (tally.count * scale)
    if not math.isfinite(norm):
        return tally
    if sums := reducer_of(program).sums():
        torch._foreach_mul_(sums, mean_coefficient(tally, program.plan.clip, scale, norm))
    return replace(tally, averaged=True)


class WholeGradients:
    """Norms and clipping of gradients of which this rank may hold parts.

    Args:
        program: the run's.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = {id(p): name for name, p in program.parameters.items()}
        self.names |= {id(one.parameter): name for name, one in program.local.items()}
        if program.pipe.size > 1:  # other stages call with weights that this one has not
            named = program.module.named_parameters()
            self.names |= {id(p): name for name, p in named if p.is_meta}

    def list_names(self, tensors: Sequence[Any]) -> list[str]:
        """Return the names of parameters or gradients of the run, each once; [] if none is."""
        names = self.names
        if not any(id(one) in names for one in tensors):
            held = [*self.program.parameters.items()]
            held += [(name, one.parameter) for name, one in self.program.local.items()]
            names = {id(p.grad): name for name, p in held if p.grad is not None}
        here = [names[id(one)] for one in tensors if id(one) in names]
        absent = ["" for one in tensors if one.is_meta and id(one) not in names]
        return list(dict.fromkeys(here + absent))

    def held(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """Return the parts of gradients that this rank steps, by name."""
        local = self.program.local
        found = [(name, local[name].parameter.grad) for name in names if name in local]
        return [
            (name, grad.to_local() if hasattr(grad, "to_local") else grad.detach())
            for name, grad in found
            if grad is not None
        ]

    def by_copies(self, names: Sequence[str]) -> dict[int, list[torch.Tensor]]:
        """Return the parts that this rank steps, by the number of ranks that hold each."""
        found: dict[int, list[torch.Tensor]] = {}
        for name, grad in self.held(names):
            found.setdefault(self.program.copies_of_sum[name], []).append(grad)
        return found

    @torch.no_grad()
    def total_norm(
        self, names: Sequence[str], norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Return the norm of the gradients of some parameters, over every part on every rank.

        Args:
            names: of the parameters; ranks of a pipeline pass those that they hold.
            norm_type: p of the p-norm; inf: the largest absolute value.
            error_if_nonfinite: raise for nan and inf.

        Returns:
            A float64 scalar on the run's device, equal on all ranks.

        Raises:
            ConfigError: norm_type ≤ 0.
            RuntimeError: the norm is not finite, with torch's own words.
        """
        world = self.program.world
        if not norm_type > 0:
            raise ConfigError(f"clipping: norm_type = {norm_type:g}; try: 2.0, or inf")
        own = torch.zeros((), dtype=torch.float64, device=world.device)
        for copies, tensors in self.by_copies(names).items():
            if math.isinf(norm_type):
                largest = torch.stack(
                    [norm.double() for norm in torch._foreach_norm(tensors, math.inf)]
                )
                own = torch.maximum(own, largest.max().to(own))
            elif norm_type == 2.0:
                own = own + sum_of_squares(tensors) / copies
            else:
                norms = torch.stack([n.double() for n in torch._foreach_norm(tensors, norm_type)])
                own = own + norms.pow(norm_type).sum().to(own) / copies
        if math.isinf(norm_type):
            own = world.all_gather(own).max()
        else:
            world.all_reduce(own)
            own = own.pow(1.0 / norm_type)
        if error_if_nonfinite and not bool(own.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                f"non-finite, so it cannot be clipped. To disable this error and scale the "
                f"gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return own

    @torch.no_grad()
    def scale(self, names: Sequence[str], max_norm: float, total_norm: torch.Tensor) -> None:
        """Scale gradients by min(1, max_norm / (total_norm + 1e-6)), as torch's clipping does.

        Args:
            names: of the parameters.
            max_norm: largest norm.
            total_norm: as `total_norm` returned it.
        """
        tensors = [grad for _, grad in self.held(names)]
        if tensors:
            coefficient = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(tensors, coefficient.to(tensors[0]))

    @torch.no_grad()
    def clip_value(self, names: Sequence[str], clip_value: float) -> None:
        """Clamp every element of some gradients to [−clip_value, clip_value].

        Args:
            names: of the parameters.
            clip_value: the largest absolute value.
        """
        for _, grad in self.held(names):
            grad.clamp_(-clip_value, clip_value)


def _plain(gradient: Any) -> torch.Tensor:
    """Return this rank's part of a gradient, without the marks that it has in user code."""
    for method in ("to_local", "to_part"):  # a DTensor · `guards/_torch_parts.py`
        if hasattr(gradient, method):
            return cast("torch.Tensor", getattr(gradient, method)())
    return cast("torch.Tensor", gradient.detach())
