"""Context parallelism: ranks share a sequence, each with a part of its tokens, and all weights.

It serves sequences whose activations do not fit on one rank. The token dim of each tensor is
derived from the layers (`spmd/`, with all parameters whole), so positions, tables and masks mean
what they mean on one device. Layers pass each other their own tokens (`token_shard.py`); only
attention reads the tokens of other ranks:

    ring       keys and values travel around the ranks (ring.py)
    ulysses    ranks split the heads for its time (ulysses.py)
    gather     every rank gathers keys and values: used where attention is written by hand, has a
               mask of its own or drops out weights

All ranks of a group see the same micro-batches. A rank's gradient of a parameter is a summand, from
its own tokens. It is summed over the group once a step, with the sum over data-parallel ranks.

Source: Liu et al. 2023 (2310.01889), Jacobs et al. 2023 (2309.14509)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shoal.base.errors import PlanError
from shoal.fabric.exchanges.ring_exchange import Ring
from shoal.parallel.context_parallel.sharded_forward import (
    ContextEmbedding,
    ContextForward,
    ContextHead,
    ContextPrograms,
)
from shoal.parallel.context_parallel.split_units import SequenceUnits, plan_sequence_units
from shoal.parallel.context_parallel.token_shard import ContextShard
from shoal.parallel.program import Program
from shoal.parallel.spmd.block_check import check_class
from shoal.parallel.spmd.rewrite import Shared
from shoal.parallel.spmd.split_block import BlockClass, ModelSplit
from shoal.parallel.spmd.stage_crossing import ShardKind
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.isolation.replaced_forward import ReplacedForward


def select_attention(context: str) -> Shared | None:
    """Return the attention function of `layout.context`: ring, ulysses, or None for gather.

    Args:
        context: ring, ulysses, gather, or auto, which is ring.

    Returns:
        the function with which the ranks compute attention together on sharded queries, keys and
        values; None: each rank gathers all keys and values.
    """
    if context == "gather":
        return None
    if context == "ulysses":
        from shoal.parallel.context_parallel.ulysses import ulysses_attention

        return ulysses_attention
    from shoal.parallel.context_parallel.ring import ring_attention

    return ring_attention


def plan(
    program: Program, record: ForwardRecord, tensor: ModelSplit | None = None
) -> SequenceUnits | None:
    """Plan and check which layers work on a part of the sequence, at every start (decision 12).

    Args:
        tensor: how tp divides the layers, planned before.

    Returns:
        None without context parallelism.

    Raises:
        PlanError: no layer can work on a part, or one cannot and the plan is strict.
    """
    world, policy = program.context, program.plan
    if world.size == 1:
        return None
    ring = Ring(world)
    units = plan_sequence_units(record, world.size, select_attention(policy.context), tensor)
    classes, failed = _check_classes(program, units, ring)
    whole = {**units.whole, **failed}
    if not classes:
        raise PlanError(_format_no_layer_error(program, units, whole))
    if whole and policy.strict:
        name, why = next(iter(whole.items()))
        raise PlanError(
            f"layout.cp = {world.size} with layout.strict: {name} {why}; try: "
            f"layout.strict=false, or layout.cp=1"
        )
    return replace(units, classes=tuple(classes), whole=whole, ring=ring)


def apply(program: Program, units: SequenceUnits | None) -> Program:
    """Let the module's layers work on this rank's tokens; parameters stay replicated."""
    if units is None or units.ring is None:
        return program
    ring = units.ring
    stand_ins: list[ReplacedForward] = []
    for one in units.classes:
        programs = ContextPrograms(one.split, one.bare, program.notices)
        programs.register_sample(one.call.args, one.call.kwargs)
        for name in one.names:
            part = program.module.get_submodule(name)
            inside = program.tensor if one.split.inner is not None else None
            stand_ins.append(ContextForward(name, part, programs, ring, inside))
    for name in units.heads:
        stand_ins.append(ContextHead(name, program.module.get_submodule(name), ring))
    for name in units.lookups:
        embedding = program.module.get_submodule(name)
        if isinstance(embedding, nn.Embedding):
            stand_ins.append(ContextEmbedding(name, embedding, ring))
    program.notices.extend(_format_notices(ring.world.size, units.classes, units.whole))
    undo = [one.restore for one in reversed(stand_ins)]
    return replace(program, on_close=(*program.on_close, *undo))


def kinds(units: SequenceUnits | None) -> list[ShardKind]:
    """Return the kinds of shards on the ranks of cp that may cross between stages."""
    return [] if units is None or units.ring is None else [(units.ring, ContextShard)]


def _check_classes(
    program: Program, units: SequenceUnits, ring: Ring
) -> tuple[list[BlockClass], dict[str, str]]:
    """Return the classes that pass the check, and per failed class the reason."""
    kept, failed = [], {}
    for one in units.classes:
        axes = (ring,) if one.split.inner is None else (ring, program.tensor)
        finding = check_class(program.module, one, *axes)
        if finding is None:
            kept.append(one)
        else:
            failed[one.names[0]] = f"runs whole on every rank: {finding.text()}"
    return kept, failed


def _format_no_layer_error(program: Program, units: SequenceUnits, whole: dict[str, str]) -> str:
    """Return the error text for a model without a layer that works on a sequence part."""
    degree, length = program.context.size, units.length
    kind = type(program.module).__name__
    if length and length % degree:
        fitting = max(n for n in range(1, degree) if length % n == 0)
        return (
            f"layout.cp = {degree}: {kind} works on {length} tokens, which do not divide into "
            f"{degree} equal parts; try: layout.cp={fitting}, or sequences of "
            f"{-(-length // degree) * degree}"
        )
    none = "it has no layer that repeats on [batch, tokens, dim]"
    why = " ".join(next(iter(whole.items()), (none,)))
    return f"layout.cp = {degree}: no layer of {kind} can share a sequence: {why}; try: layout.cp=1"


def _format_notices(degree: int, classes: Sequence[BlockClass], whole: dict[str, str]) -> list[str]:
    """Return notices: how attention is computed, what is gathered, and what runs unsplit."""
    lines = []
    for one in classes:
        like = f" (and {len(one.names) - 1} like it)" if len(one.names) > 1 else ""
        gathered = [e for e in one.split.exchanges if (e.kind, e.when) == ("all_gather", "forward")]
        if gathered:
            values = ", ".join(dict.fromkeys(e.after for e in gathered))
            mib = sum(e.payload_bytes for e in gathered) / 2**20
            lines.append(
                f"layout.cp = {degree}: {one.names[0]}{like} gathers {values} on every rank, "
                f"{mib:.1f} MiB of all tokens"
            )
    for name, why in whole.items():
        lines.append(f"layout.cp = {degree}: {name} {why}")
    return lines
