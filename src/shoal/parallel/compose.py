"""The table of contents: in which order techniques turn a module into a program, and why.

Each line is one technique, one file and one verb. None of them knows another.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.base.facts import ParameterFacts
from shoal.base.plan import Plan
from shoal.fabric import World
from shoal.parallel import (
    batch_norm,
    compiling,
    compress,
    ddp,
    dp,
    loose_buffers,
    offload,
    placement,
    precision,
    randomness,
    recompute,
    same_weights,
    single,
    zero,
)
from shoal.parallel.program import Program, aliases, dtype_of, frozen, trainable


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
    # Innermost: nothing that a layout adds to a block becomes part of its compiled code.
    program = compiling.apply(program, plan.compile)
    # Inside of what gathers parameters, which then gathers for the second forward too.
    program = recompute.apply(program, plan.recompute)
    program = offload.apply(program, plan.offload)
    # Last: who holds, sums and steps what. It takes over parameters and `.grad`, so nothing may
    # replace them after it.
    layout = plan.layout
    if layout.zero == 3:
        from shoal.parallel import fsdp  # half a second of imports that other layouts do without

        return fsdp.apply(program)
    copied = any(bucket.compute for bucket in plan.buckets)
    if layout.zero:
        program = zero.apply(program)
    elif layout.threads > 1:
        program = dp.apply(program)
    else:
        summed = layout.processes > 1 or copied
        program = ddp.apply(program) if summed else single.apply(program)
    # After the reducer is there: it goes between the reducer and the wire.
    return compress.apply(program)


def facts(module: nn.Module, compute: str, device: torch.device) -> list[ParameterFacts]:
    """What the planner needs to know of the trainable parameters."""
    narrow = precision.copies(module, compute, device)
    return [
        ParameterFacts(name, tuple(p.shape), dtype_of(p), p.element_size(), narrow.get(name, ""))
        for name, p in trainable(module).items()
    ]
