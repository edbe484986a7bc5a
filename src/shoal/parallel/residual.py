"""Residual stream in bf16: blocks pass bf16 to each other, and save bf16 for their backward pass.

    h ──► block ──► h ──► block ──►       fp32 residuals: 4 bytes an element, and under autocast a
         bf16            bf16             narrow copy of a norm's output for every product
                                          bf16 residuals: 2 bytes, and no copies

Under full recompute a block's input is all that it keeps, so this halves what is kept; a pipeline
sends half the bytes. Weights of blocks are read as bf16 copies, norms' too (`list_narrow_copies`);
masters, sums of gradients and optimizer state stay fp32, and so does everything outside of blocks.

The cast of a block's inputs is a hook, outside of recompute, which then saves bf16. The rest lies
inside of recompute, so that both of its runs compute alike, and outside of compiled code.

Source: torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype, cast_forward_inputs)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shoal.parallel.program import Program, layered_blocks
from shoal.trace.find.blocks import residual_blocks
from shoal.trace.isolation.narrow_blocks import (
    NarrowForward,
    NarrowNorm,
    list_stream_norms,
    narrow_inputs,
)
from shoal.trace.isolation.replaced_forward import restore_all


def apply(program: Program) -> Program:
    """Run every block of this rank in bf16, between compiled code and recompute."""
    found = layered_blocks(program)
    blocks = residual_blocks(program.module, program.plan)
    if not blocks:
        program.notices.append(
            "precision.residual = bf16: there is no residual stream: the model has no ModuleList "
            "or Sequential whose entries are blocks of several layers; try: layout.blocks=NAME"
        )
    device = program.world.device.type
    wrapped = [NarrowForward(name, block, device) for name, block in found]
    wrapped += [
        NarrowNorm(name, norm, device)
        for name, norm in list_stream_norms(program.module, blocks.values()).items()
        if blocks and not any(p.is_meta for p in norm.parameters())
    ]
    hooks = [block.register_forward_pre_hook(narrow_inputs, with_kwargs=True) for _, block in found]
    undo: tuple[Callable[[], None], ...] = (
        partial(restore_all, wrapped),
        *(hook.remove for hook in hooks),
    )
    return replace(program, on_close=(*program.on_close, *undo))


def list_narrow_blocks(program: Program) -> tuple[str, ...]:
    """Return the names of the blocks whose outputs are bf16, on any rank; () if they are fp32."""
    if program.plan.residual != "bf16":
        return ()
    return tuple(residual_blocks(program.module, program.plan))
