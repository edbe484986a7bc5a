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

from dataclasses import replace

from shoal.parallel.program import Program, own_blocks
from shoal.trace.find.blocks import is_single_layer, residual_blocks
from shoal.trace.isolation.narrow_blocks import (
    NarrowForward,
    NarrowNorm,
    list_stream_norms,
    narrow_inputs,
)


def apply(program: Program) -> Program:
    """Run every block of this rank in bf16, between compiled code and recompute."""
    found = {id(b): (n, b) for n, b in own_blocks(program) if not is_single_layer(b)}
    blocks = residual_blocks(program.module, program.plan)
    if not blocks:
        program.notices.append(
            "precision.residual = bf16: there is no residual stream: the model has no ModuleList "
            "or Sequential whose entries are blocks of several layers; try: layout.blocks=NAME"
        )
    device = program.world.device.type
    wrapped = [NarrowForward(name, block, device) for name, block in found.values()]
    wrapped += [
        NarrowNorm(name, norm, device)
        for name, norm in list_stream_norms(program.module, blocks.values()).items()
        if blocks and not any(p.is_meta for p in norm.parameters())
    ]
    hooks = [
        block.register_forward_pre_hook(narrow_inputs, with_kwargs=True)
        for _, block in found.values()
    ]

    def undo() -> None:
        for one in wrapped:
            one.restore()
        for hook in hooks:
            hook.remove()

    return replace(program, on_close=(*program.on_close, undo))


def list_narrow_blocks(program: Program) -> tuple[str, ...]:
    """Return the names of the blocks whose outputs are bf16, on any rank; () if they are fp32."""
    if program.plan.residual != "bf16":
        return ()
    return tuple(residual_blocks(program.module, program.plan))
