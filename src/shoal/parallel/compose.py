"""The table of contents: in which order techniques turn a module into a program, and why.

Each line is one technique, one file and one verb. None of them knows another. What a plan does not
ask for is not imported: a start pays for the techniques that it uses.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shoal.base.plan import Plan
from shoal.base.policies import CompilePolicy, CompressPolicy, OffloadPolicy, RecomputePolicy
from shoal.fabric import World
from shoal.parallel import (
    batch_norm,
    compare_weights,
    dropout_rng,
    precision,
    sync_buffers,
)
from shoal.parallel._torch import pytree
from shoal.parallel.place import Derived, place
from shoal.parallel.program import Program, bind, undivided


class Look(Protocol):
    """Runs a module's forward pass on a few samples, as the program prepares them."""

    @property
    def samples(self) -> int:
        """How many."""

    def __call__(self, program: Program, module: nn.Module) -> Any:
        """What the module gives for them."""


def divide(module: nn.Module, plan: Plan, world: World, look: Look | None = None) -> Program:
    """The part of `module` that this rank holds under `plan`; the rest of it is free afterwards.

    module    whole, on the world's device and in the plan's parameter format
    look      needed for tp, pp, cp and ep, which are derived from what the model does
    Errors    PlanError when ranks hold different models, where this one cannot be divided so, and
              for a policy that cannot hold here: said first, since tracing takes seconds
    """
    for technique in _asked(plan, AROUND_BLOCKS):
        if check := getattr(technique, "check", None):
            check(plan, world.device)
    program = undivided(module, plan, world)
    if look is not None:
        from shoal.trace.flops import meta_twin

        program = replace(program, twin=meta_twin(module))
    # First of all, since everything after it assumes that the ranks mean the same tensors.
    program = compare_weights.apply(program)
    # Inputs: to the device before any cast, so that the cast runs there.
    program = _to_device(program)
    program = precision.apply(program)
    if look is None:
        return bind(program, place(module, plan, Derived(), world.device).values())
    # Modules that other layouts do without.
    from shoal.parallel import context_parallel, expert_parallel, pipeline, tensor_parallel
    from shoal.parallel.comm_volume import travel_of

    run = partial(look, program)
    # Experts are found by how whole parts of the model call each other.
    experts = expert_parallel.plan(program, run)
    # Where stages end is seen on whole layers; what a stage then holds of a layer is its part.
    cut = pipeline.plan(program, run)
    split = tensor_parallel.plan(program, run, cut.trunk if cut else None)
    # Before anything is cut, so that every technique cuts by the same rows.
    rows = place(module, plan, Derived(split, cut, experts), world.device)
    program = bind(program, rows.values())
    program = tensor_parallel.apply(program, split)
    if plan.layout.cp == plan.layout.ep == 1:  # theirs is not stated yet
        travel = travel_of(split, cut, look.samples)
        program = replace(program, travel=travel)
    program = context_parallel.apply(program, run)
    program = pipeline.apply(program, cut, tensor_parallel.Crossing(program.tensor))
    # After the last forward pass of a single rank: from here on tokens travel.
    return expert_parallel.apply(program, experts)


AROUND_BLOCKS: tuple[tuple[type, str], ...] = (
    # Innermost: nothing that a layout adds to a block becomes part of its compiled code.
    (CompilePolicy, "compiling"),
    # Inside of what gathers parameters, which then gathers for the second forward too.
    (RecomputePolicy, "recompute"),
    (OffloadPolicy, "offload"),
)
"""What only some plans ask for, in the order in which it goes around a block: policy, technique."""

AROUND_SUMS: tuple[tuple[type, str], ...] = (
    # After the reducer is there: it goes between the reducer and the wire.
    (CompressPolicy, "data_parallel.compress"),
)
"""The same for what goes around the sums of gradients."""


def _asked(plan: Plan, optional: tuple[tuple[type, str], ...]) -> Iterator[Any]:
    """Import the techniques whose policy has a key that is not at its default; no others."""
    for policy, technique in optional:
        if plan.asks(policy):
            yield importlib.import_module(f"shoal.parallel.{technique}")


def check_here(plan: Plan, device: torch.device) -> None:
    """Ask compile, recompute and offload whether this device rules them out under any layout.

    Errors: PlanError; so far for offload on a CPU
    """
    for technique in _asked(plan, AROUND_BLOCKS):
        if check := getattr(technique, "check_here", None):
            check(plan, device)


def hand_to_policies(program: Program, optimizer: torch.optim.Optimizer) -> Program:
    """Give optional techniques the optimizer, after it holds this rank's parts."""
    for technique in _asked(program.plan, AROUND_BLOCKS):
        if give := getattr(technique, "hand_over", None):
            program = give(program, optimizer)
    return program


def compose(program: Program) -> Program:
    """What `divide` left to this rank, made ready to run by the program's plan."""
    plan = program.plan
    # Around a micro-batch: generators outermost, so that nothing draws before they are keyed.
    program = dropout_rng.apply(program, plan.seed)
    program = batch_norm.apply(program)
    # After BatchNorm's rule: what is left over has no rule.
    program = sync_buffers.apply(program)
    for technique in _asked(plan, AROUND_BLOCKS):
        program = technique.apply(program)
    # Last: who holds, sums and steps what. It takes over parameters and `.grad`, so nothing may
    # replace them after it.
    program = _by_layout(program)
    for technique in _asked(plan, AROUND_SUMS):
        program = technique.apply(program)
    return program


def _by_layout(program: Program) -> Program:
    layout = program.plan.layout
    if layout.zero == 3:
        from shoal.parallel.data_parallel import fsdp

        return fsdp.apply(program)
    if layout.threads > 1:
        from shoal.parallel.data_parallel import threads

        return threads.apply(program)
    if layout.zero:
        from shoal.parallel.data_parallel import zero

        return zero.apply(program)
    if layout.processes > 1 or any(bucket.compute for bucket in program.plan.buckets):
        from shoal.parallel.data_parallel import ddp

        return ddp.apply(program)
    from shoal.parallel.data_parallel import single

    return single.apply(program)


def _to_device(program: Program) -> Program:
    """Place every tensor of a batch on the world's device; nothing to do on the CPU."""
    device = program.world.device
    if device.type == "cpu":
        return program

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return replace(program, prepare=(*program.prepare, lambda b: pytree.tree_map(move, b)))
