"""Hooks on the gradients of weights: told what they see here, and refused where they never run.

`weight.register_hook(lambda g: g * mask)` runs in the backward pass of every micro-batch, on every
rank, before anything is summed; and the loss is a sum over targets, not a mean. A factor or a mask
computes what it would in one process. A clamp does not: it sees other numbers. Under fsdp, and
where tp cuts a weight, what gets the gradient is a part or a copy: the hook would be left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from shoal.base.errors import PlanError
from shoal.parallel.program import Program
from shoal.trainer._torch import gradient_hooks


def hooked(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of those that have a hook on their gradient."""
    return [name for name, parameter in parameters.items() if gradient_hooks(parameter)]


def check_hooks(names: Collection[str], program: Program) -> list[str]:
    """Tell what hooks see under the program's layout, in a line, if there are any.

    names    of `hooked`, when the module was not divided yet
    Errors   PlanError for one that would never run
    """
    layout = program.plan.layout
    for name in names:
        here = program.parameters.get(name)
        if here is None:
            continue  # it trains on another rank, with its hook
        divided = layout.zero == 3 or layout.threads > 1 or name in program.cuts
        if divided or not gradient_hooks(here):
            raise PlanError(
                f"model: {name} has a gradient hook (register_hook), and under {layout.text()} the "
                f"gradient goes to a part or a copy of it, so the hook would be left out; nearest: "
                f"clip=… of shoal.parallelize in the place of a clamp, or layout=zero2"
            )
    if not names:
        return []
    count = f"{len(names)} weight{'s' if len(names) > 1 else ''}"
    return [
        f"model: {count} with a gradient hook, first {next(iter(names))}: it sees sums over the "
        f"targets of one micro-batch, and no mean; a factor or a mask is right, a clamp is not: "
        f"nearest: clip=… of shoal.parallelize"
    ]
