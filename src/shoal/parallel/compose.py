"""The table of contents: the order in which techniques turn a module into a program, and why.

    prepare       the whole module, equal on all ranks
    record        its forward pass on a sample, if the layout is derived from that
    place         placements: which rank holds, sums and steps each tensor
    materialise   the part of the module that this rank holds
    wrap          everything around it: generators, recompute, sums of gradients

Each line is one technique, one file and one verb. None of them knows another. Techniques that a
plan does not use are not imported: a start pays only for the techniques that it uses.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.layouts.policies import (
    CompilePolicy,
    CompressPolicy,
    OffloadPolicy,
    RecomputePolicy,
    ResidualPolicy,
)
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.fabric.device import missing_capabilities_line, to_device
from shoal.machine.process_memory import is_read_ahead_disabled, read_ahead
from shoal.parallel import ALONG_AXES, compare_weights, dropout_rng, precision
from shoal.parallel._torch import BatchNorm, pytree
from shoal.parallel.placement_rows import ModelDivision, count_block_calls, derive_placements
from shoal.parallel.program import Program, bind_placements, make_undivided_program

if TYPE_CHECKING:
    from shoal.base.plans.comm_volume import CommVolume
    from shoal.trace.flow.forward_record import ForwardRecord


class SampleForward(Protocol):
    """Protocol of a function that runs a module's forward pass on a few prepared samples."""

    @property
    def samples(self) -> int:
        """Return the number of samples."""

    def __call__(self, program: Program, module: nn.Module) -> Any:
        """Return the module's outputs for the samples."""

    def place(self, program: Program) -> tuple[Program, ModelDivision]:
        """Place every tensor by this pass, as `place` does."""


def prepare(module: nn.Module, plan: Plan, world: World) -> Program:
    """Make a program of the whole module and give every rank rank 0's weights; nothing is cut yet.

    Args:
        module: whole, in the plan's parameter format; on the host if ranks will hold parts of it.

    Raises:
        PlanError: ranks hold different models, or a policy is impossible here. Policies are checked
            first, since the record of the model takes seconds.
    """
    _check_forward(module, plan)
    if plan.layout.zero or plan.layout.tp > 1:
        compare_weights.refuse_shared_memory(module, plan.layout.text())
    for technique in _enabled_techniques(plan, AROUND_BLOCKS):
        if check := getattr(technique, "check", None):
            check(plan, world.device)
    if plan.layout.threads > 1:
        from shoal.parallel.data_parallel.device_replicas import check_replicas

        check_replicas(plan, world.device)
    program = make_undivided_program(module, plan, world)
    if "transformers" in sys.modules:
        from shoal.parallel.build.pretrained import disable_kv_cache

        program = replace(program, on_close=(*program.on_close, disable_kv_cache(module)))
    # First, since everything after it assumes equal tensors on all ranks.
    program = compare_weights.apply(program)
    # Inputs: to the device before any cast, so that the cast runs there.
    program = precision.apply(_to_device(program))
    if any(isinstance(part, BatchNorm) for part in module.modules()):
        from shoal.parallel.buffers import sync_batch_norm

        # Before the model is recorded: torch's SyncBatchNorm does not run on every device.
        program = sync_batch_norm.apply(program)
    return program


def _check_forward(module: nn.Module, plan: Plan) -> None:
    """Raise PlanError for a module without a forward pass that a layout would have to change."""
    layout = plan.layout
    changes = layout.zero == 3 or max(layout.tp, layout.cp, layout.pp, layout.ep) > 1
    if changes and type(module).forward is nn.Module.forward:
        raise PlanError(
            f"model: {type(module).__name__} has no forward() of its own, and layout "
            f"{layout.text()} works on the model's forward passes; try: a module whose forward() "
            f"calls the parts, or layout=zero2"
        )


def record_forward(program: Program, look: SampleForward | None) -> ForwardRecord | None:
    """Make the record of the model's forward pass from which a layout is derived.

    The record runs its passes when it is read.

    Args:
        look: does one forward pass on a sample; None: nothing is derived.

    Returns:
        The record of the module for tp, pp, cp and ep. For zero 3 alone, the record of its copy on
        the meta device, or of the module itself if the model reads values. None if neither runs.
    """
    layout = program.plan.layout
    if look is None:
        return None
    from shoal.trace.flow.forward_record import ForwardRecord
    from shoal.trace.isolation.module_copies import copy_to_meta
    from shoal.trace.isolation.stream_weights import stream_weights

    run, plan = partial(look, program), program.plan
    if layout.is_derived:
        return ForwardRecord(program.module, run, plan)
    # zero 3 needs the number of calls of each block. Most models run on shapes alone; the others
    # read values. A model that fails here fails again in its first step, with its own error.
    shown = ForwardRecord(copy_to_meta(program.module), run, plan)
    if shown.is_runnable():
        return shown
    real = ForwardRecord(program.module, run, plan)
    real.passes.update(shown.passes)

    with stream_weights(program.module, program.world.device, read_ahead):
        return real if real.is_runnable() else None


def place(
    program: Program, record: ForwardRecord | None, samples: int = 0
) -> tuple[Program, ModelDivision]:
    """Place every tensor: derive the division of the model, check it on the ranks, bind placements.

    Every rank calls it: checks are collective, and process groups are made. Nothing is cut yet.

    Args:
        record: if None, nothing is derived from the model.
        samples: number of samples that the record's pass ran.

    Raises:
        PlanError: the model cannot be divided as the layout asks.
    """
    module, plan, derived = program.module, program.plan, ModelDivision()
    if record is not None and plan.layout.is_derived:
        # Imported here: other layouts do not need these modules.
        from shoal.parallel.residual import list_narrow_blocks
        from shoal.trace.isolation.module_copies import copy_to_meta
        from shoal.trace.isolation.stream_weights import share_first_weights, stream_weights

        device = program.world.device
        with (
            stream_weights(module, device, read_ahead),
            share_first_weights(module, is_read_ahead_disabled),
        ):
            derived = _derive_division(program, record)
        if plan.layout.cp == plan.layout.ep == 1:  # the traffic of cp and ep is not predicted yet
            # Not the program, whose whole parameters would outlive the cut.
            travel = partial(_predict_traffic, derived, samples, list_narrow_blocks(program))
            program = replace(program, travel=travel)
        program = replace(program, twin=copy_to_meta(module))
    elif record is not None and plan.layout.zero == 3:
        derived = replace(derived, called=count_block_calls(record))
    if record is not None:
        calls = tuple(record.first_pass.begun) if plan.layout.zero == 3 else ()
        program = replace(program, passes=record.passes, recorded=calls)
    rows = derive_placements(module, plan, derived, program.world.device)
    return bind_placements(program, rows.values()), derived


def _derive_division(program: Program, record: ForwardRecord) -> ModelDivision:
    """Derive and check the division along each axis, in the order of `ALONG_AXES`."""
    along, found = dict(_along_axes(program.plan)), ModelDivision()
    if "ep" in along:
        found = replace(found, experts=along["ep"].plan(program, record))
    if "pp" in along:
        found = replace(found, cut=along["pp"].plan(program, record))
    if "tp" in along:
        found = replace(found, split=along["tp"].plan(program, record))
    if "cp" in along:  # cp may divide layers that tp has divided: it then starts from the tp parts
        found = replace(found, units=along["cp"].plan(program, record, found.split))
    if program.plan.layout.zero == 3:  # on some ranks this is the first use of the record
        found = replace(found, called=count_block_calls(record))
    return found


def _predict_traffic(derived: ModelDivision, samples: int, narrow: tuple[str, ...]) -> CommVolume:
    from shoal.parallel.exchange_rows import predict_traffic  # needed only to predict a run

    return predict_traffic(derived.split, derived.cut, samples, narrow)


def materialise(program: Program, derived: ModelDivision) -> Program:
    """Cut the module in place to what this rank holds under tp, pp and ep, and free the rest.

    The remaining part moves from the host to the device, which never holds more. Under zero 3 that
    waits for `fully_shard`, which moves and shards unit by unit. From then on layers compute their
    parts, under cp too, which cuts nothing. Every rank calls it.

    Args:
        derived: the result of `place`; the program holds the placements.
    """
    plan, device = program.plan, program.world.device
    if plan.layout.is_derived:
        program = _cut_module(program, derived)
    elif plan.layout.serves:
        from shoal.parallel.data_parallel import embedding_tables

        program = embedding_tables.cut_tables(program)
    if plan.layout.zero < 3 and not streams_from_host(plan, device):
        _move_to_device(program.module, device)
    return program


def _move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move a module's tensors to a device, one at a time, except those on the meta device."""
    module._apply(lambda t: t if t.is_meta else t.to(device))


def _cut_module(program: Program, derived: ModelDivision) -> Program:
    along, kinds = dict(_along_axes(program.plan)), []
    if "tp" in along:
        program = along["tp"].apply(program, derived.split)
        kinds += along["tp"].kinds(program)
    if "cp" in along:
        program = along["cp"].apply(program, derived.units)
        kinds += along["cp"].kinds(derived.units)
    if "pp" in along:
        from shoal.parallel.spmd.stage_crossing import StageCodec

        program = along["pp"].apply(program, derived.cut, StageCodec(kinds))
    if "ep" in along:
        # After the last forward pass of a single rank: from here on ep ranks exchange tokens.
        program = along["ep"].apply(program, derived.experts)
    return program


def _along_axes(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Import the technique of each axis of the plan's layout; yield (axis, technique)."""
    for axis, name in ALONG_AXES:
        if getattr(plan.layout, axis) > 1:
            yield axis, importlib.import_module(f"shoal.parallel.{name}")


AROUND_BLOCKS: tuple[tuple[type, str], ...] = (
    # Innermost: nothing that a layout adds to a block becomes part of its compiled code.
    (CompilePolicy, "compiling"),
    # Inside recompute, whose second run then has the formats of the first.
    (ResidualPolicy, "residual"),
    # Inside the parameter gather (FSDP), which then gathers for the recomputed forward too.
    (RecomputePolicy, "recompute"),
    (OffloadPolicy, "offload"),
)
"""(policy, technique) of the optional wrappers around a block, the innermost first."""

AROUND_SUMS: tuple[tuple[type, str], ...] = (
    # After the reducer exists: compression goes between the reducer and the network.
    (CompressPolicy, "data_parallel.compress"),
)
"""(policy, technique) of the optional wrappers around the gradient reduction."""


def _enabled_techniques(plan: Plan, optional: tuple[tuple[type, str], ...]) -> Iterator[Any]:
    """Import the techniques of the policies that have a key off its default, and no others."""
    for policy, technique in optional:
        if plan.differs_from_default(policy):
            yield importlib.import_module(f"shoal.parallel.{technique}")


def check_here(plan: Plan, device: torch.device) -> None:
    """Refuse policies that this kind of device cannot run under any layout.

    Raises:
        PlanError: so far only for offload to files on an accelerator.
    """
    for technique in _enabled_techniques(plan, AROUND_BLOCKS):
        if check := getattr(technique, "check_here", None):
            check(plan, device)


def streams_from_host(plan: Plan, device: torch.device) -> bool:
    """Return whether the module stays on the host because one device cannot hold it."""
    techniques = [
        one
        for one in _enabled_techniques(plan, AROUND_BLOCKS)
        if hasattr(one, "streams_parameters")
    ]
    return any(one.streams_parameters(plan, device) for one in techniques)


def offload_optimizer(program: Program, optimizer: torch.optim.Optimizer) -> Program:
    """Let memory.offload=optimizer take over the optimizer once it steps this rank's parts.

    Returns:
        The program, with the additions of the technique if the plan uses it.
    """
    for technique in _enabled_techniques(program.plan, AROUND_BLOCKS):
        if give := getattr(technique, "hand_over", None):
            program = give(program, optimizer)
    return program


def wrap(program: Program) -> Program:
    """Wrap this rank's module as the plan asks: dropout keys, recompute, compile, gradient sums."""
    plan = program.plan
    # Around a micro-batch: generators outermost, so that nothing draws before they are seeded.
    program = dropout_rng.apply(program, plan.seed)
    if any(isinstance(part, BatchNorm) for part in program.module.modules()):
        from shoal.parallel.buffers import batch_norm

        program = batch_norm.apply(program)
    if next(program.module.buffers(), None) is not None:
        from shoal.parallel.buffers import sync_buffers

        # After batch_norm: it syncs the buffers that batch_norm does not cover.
        program = sync_buffers.apply(program)
    for technique in _enabled_techniques(plan, AROUND_BLOCKS):
        program = technique.apply(program)
    # Last: the technique that holds, sums and steps parameters. It takes over parameters and
    # `.grad`, so nothing may replace them after it.
    with ExitStack() as around:
        for technique in _enabled_techniques(plan, AROUND_BLOCKS):
            if enter := getattr(technique, "allocating", None):
                around.enter_context(enter(program))
        program = _apply_data_parallel(program)
    for technique in _enabled_techniques(plan, AROUND_SUMS):
        program = technique.apply(program)
    return program


def _apply_data_parallel(program: Program) -> Program:
    plan, layout = program.plan, program.plan.layout
    if streams_from_host(plan, program.world.device):
        from shoal.parallel.offload.parameters import apply
    elif layout.threads > 1:
        if program.world.device.type == "cpu":
            from shoal.parallel.data_parallel.thread_replicas import apply
        else:
            from shoal.parallel.data_parallel.device_replicas import apply
    elif layout.servers:
        if layout.serves:
            from shoal.parallel.data_parallel.embedding_tables import apply
        else:
            from shoal.parallel.data_parallel.parameter_server import apply
    elif layout.zero == 3:
        from shoal.parallel.data_parallel.fsdp import apply
    elif layout.zero:
        from shoal.parallel.data_parallel.zero import apply
    elif layout.processes > 1 or any(bucket.compute for bucket in plan.buckets):
        from shoal.parallel.data_parallel.ddp import apply
    else:
        from shoal.parallel.data_parallel.single import apply
    return apply(program)


def _to_device(program: Program) -> Program:
    """Move every tensor of a batch to the world's device; do nothing on the CPU."""
    device = program.world.device
    if device.type == "cpu":
        return program
    program.notices.extend(line for line in [missing_capabilities_line(device)] if line)

    return replace(program, prepare=(*program.prepare, partial(_move_batch, device)))


def _move_batch(device: torch.device, batch: Any) -> Any:
    def move(leaf: Any) -> Any:
        return to_device(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(move, batch)
