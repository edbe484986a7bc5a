"""Number formats: fp64 and fp32 change the module, bf16 keeps fp32 weights and casts inside.

bf16 runs matrix products in bfloat16 under torch.autocast while parameters, gradients and optimizer
state stay fp32: no loss scale is needed since bf16 has fp32's range. fp64 exists to prove layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shoal.parallel._torch import pytree
from shoal.parallel.program import Program


def resolve(compute: str, device: torch.device) -> str:
    """The format that `auto` means: bf16 on GPUs that have it, else fp32.

    On a CPU fp32 stays the default, because results are then comparable between machines.
    """
    if compute != "auto":
        return compute
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return "bf16"
    return "fp32"


def convert(module: torch.nn.Module, compute: str) -> torch.nn.Module:
    """Cast the weights for fp64; every other format trains the weights as they are, in place."""
    return module.double() if compute == "fp64" else module


def apply(program: Program) -> Program:
    """Autocast around the forward pass, or float64 inputs, as the plan's precision says."""
    device = program.world.device.type
    if program.plan.precision == "bf16":
        return replace(program, autocast=lambda: torch.autocast(device, dtype=torch.bfloat16))
    if program.plan.precision == "fp64":
        return replace(program, prepare=(*program.prepare, _floats_to(torch.float64)))
    return program


def _floats_to(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return lambda batch: pytree.tree_map(cast, batch)
