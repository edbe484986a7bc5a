"""The table of contents: in which order techniques turn a module into a program, and why.

Each line is one technique, one file and one verb. None of them knows another.
"""

from __future__ import annotations

from torch import nn

from shoal.base.facts import ParameterFacts
from shoal.base.plan import Plan
from shoal.fabric import World
from shoal.parallel import (
    batch_norm,
    ddp,
    dp,
    loose_buffers,
    placement,
    precision,
    randomness,
    same_weights,
    single,
    zero,
)
from shoal.parallel.program import Program, aliases, frozen, trainable


def compose(module: nn.Module, plan: Plan, world: World, *, seed: int) -> Program:
    """The program that runs `module` by `plan` on `world`.

    module    already on the world's device and in the plan's parameter format
    Errors    PlanError when ranks hold different models
    """
    program = Program(module, world, plan, trainable(module), aliases(module), frozen(module))
    # First of all, since everything after it assumes that the ranks mean the same tensors.
    program = same_weights.apply(program)
    # Inputs: to the device before any cast, so that the cast runs there.
    program = placement.apply(program)
    program = precision.apply(program)
    # Around a micro-batch: generators outermost, so that nothing draws before they are keyed.
    program = randomness.apply(program, seed)
    program = batch_norm.apply(program)
    # After BatchNorm's rule: what is left over has no rule.
    program = loose_buffers.apply(program)
    # Last: who holds, sums and steps what. It takes over parameters and `.grad`, so nothing may
    # replace them after it.
    layout = plan.layout
    if layout.zero == 3:
        from shoal.parallel import fsdp  # half a second of imports that other layouts do without

        return fsdp.apply(program)
    if layout.zero:
        return zero.apply(program)
    if layout.processes > 1:
        return ddp.apply(program)
    return dp.apply(program) if layout.threads > 1 else single.apply(program)


def facts(module: nn.Module) -> list[ParameterFacts]:
    """What the planner needs to know of the trainable parameters."""
    return [
        ParameterFacts(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.element_size())
        for name, p in trainable(module).items()
    ]
