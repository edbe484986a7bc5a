"""Number formats: what forward and backward passes compute in, and what stays fp32 beneath them.

    fp64        the module itself; exists to prove layouts
    fp32        the module as it is
    bf16, fp16  matrix products in the narrow format under torch.autocast; weights, gradients' sums
                and optimizer state stay fp32 (masters). Weights of linear layers and convolutions
                are copied to the narrow format once per step instead of once per pass; embeddings,
                and heads tied to them, keep fp32. So does the residual stream, but for
                `precision.residual=bf16` (`residual.py`)
    fp16        needs a loss scale (trainer), since small gradients vanish below 6e-8. A CPU has no
                fast fp16: there operands and results are rounded to fp16 and multiplied in fp32,
                which gives fp16's values and none of its speed

Source: Micikevicius et al. 2018 (mixed precision: masters, loss scale)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.base.plans.plan import Plan
from shoal.fabric.device import get_device_capabilities, is_accelerator
from shoal.parallel._torch import Convolution, pytree
from shoal.parallel.program import Program
from shoal.trace.find.blocks import residual_blocks

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_format(compute: str, device: torch.device) -> str:
    """Return the format that `auto` stands for: bf16 on GPUs that support it, else fp32.

    On a CPU fp32 stays the default, because results are then comparable between machines.
    """
    if compute != "auto":
        return compute
    if is_accelerator(device) and get_device_capabilities(device).bf16:
        return "bf16"
    return "fp32"


def convert_weights(module: nn.Module, compute: str) -> nn.Module:
    """Cast the weights to float64 for fp64; return the module unchanged for every other format."""
    return module.double() if compute == "fp64" else module


def list_narrow_copies(module: nn.Module, plan: Plan, device: torch.device) -> dict[str, str]:
    """Return the trainable parameters that forward passes read as narrow copies: name → dtype.

    These are the weights of linear layers and convolutions, whose products autocast makes narrow
    anyway, and under a narrow residual stream all weights of blocks. There are none if fp16 is only
    emulated, and none that an embedding reads as well.
    """
    compute = plan.compute
    if compute not in NARROW or is_emulated(compute, device):
        return {}
    wide: set[int] = set()
    narrow: set[int] = set()
    for part in module.modules():
        chosen = narrow if isinstance(part, nn.Linear | Convolution) else wide
        chosen.update(id(p) for p in part.parameters(recurse=False) if p.dtype == torch.float32)
    copied = narrow - wide
    if plan.residual == "bf16":
        from shoal.trace.isolation.narrow_blocks import list_narrow_weights  # for this alone

        copied |= list_narrow_weights(module, residual_blocks(module, plan).values())
    dtype = str(NARROW[compute]).removeprefix("torch.")
    return {
        name: dtype for name, p in module.named_parameters() if p.requires_grad and id(p) in copied
    }


def is_emulated(compute: str, device: torch.device) -> bool:
    """Return whether a format is emulated by rounding: fp16 on a CPU."""
    return compute == "fp16" and device.type == "cpu"


def apply(program: Program) -> Program:
    """Add autocast around the forward pass, or float64 inputs, as the plan's precision says."""
    device, compute = program.world.device, program.plan.compute
    if compute == "fp64":
        return replace(program, prepare=(*program.prepare, _cast_floats(torch.float64)))
    if is_emulated(compute, device):
        program.notices.append(
            "precision.compute = fp16: this CPU has no fast fp16: operands and results are rounded "
            "to fp16 and multiplied in fp32; for speed: precision.compute=bf16"
        )
        from shoal.trace.isolation.rounded_products import emulate_half  # for this alone

        return replace(program, autocast=emulate_half)
    if compute not in NARROW:
        return program
    if device.type == "cpu" and program.plan.layout.zero == 3:
        allow_narrow_norm_weights()  # fsdp gathers a unit's vectors in the dtype of its matrices
    autocast = functools.partial(torch.autocast, device.type, dtype=NARROW[compute])
    own = _DirectCallAutocast(autocast, device.type)
    hooks = [
        program.module.register_forward_pre_hook(own.enter, prepend=True),
        program.module.register_forward_hook(own.exit, always_call=True),
    ]
    return replace(
        program,
        autocast=autocast,
        on_close=(*program.on_close, *(hook.remove for hook in hooks)),
    )


NORMS = {"layer_norm": (2, 3), "group_norm": (2, 3), "batch_norm": (1, 2), "instance_norm": (1, 2)}
"""Norm function → positions of the operands that are weights."""


@functools.cache
def allow_narrow_norm_weights() -> torch.library.Library:
    """Let the CPU's autocast compute norms with narrow weights, as the GPU's does.

    Without it torch raises "mixed dtype (CPU): expect parameter to have scalar type of Float".
    Norms whose operands have one dtype, and all code outside of autocast, are unchanged.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, places in NORMS.items():
        norm = functools.partial(_norm_with_wide_weights, getattr(torch, name), places)
        library.impl(name, norm, "AutocastCPU")
    return library


def _norm_with_wide_weights(
    norm: Callable[..., torch.Tensor], places: tuple[int, ...], *operands: Any
) -> torch.Tensor:
    others = [one for place, one in enumerate(operands) if place not in places]
    if any(isinstance(one, torch.Tensor) and one.dtype == torch.float32 for one in others):
        operands = tuple(
            one.float() if place in places and isinstance(one, torch.Tensor) else one
            for place, one in enumerate(operands)
        )
    with torch.autocast("cpu", enabled=False):
        return norm(*operands)


class _DirectCallAutocast:
    """Hooks that enter autocast if the user calls the module, with its narrow weights, directly."""

    def __init__(
        self, autocast: Callable[[], AbstractContextManager[Any]], device_type: str
    ) -> None:
        self.autocast, self.device_type = autocast, device_type
        self.entered: list[AbstractContextManager[Any] | None] = []

    def enter(self, module: nn.Module, inputs: Any) -> None:
        context = None if torch.is_autocast_enabled(self.device_type) else self.autocast()
        if context is not None:
            context.__enter__()
        self.entered.append(context)

    def exit(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        context = self.entered.pop() if self.entered else None
        if context is not None:
            context.__exit__(None, None, None)


def _cast_floats(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return lambda batch: pytree.tree_map(cast, batch)
