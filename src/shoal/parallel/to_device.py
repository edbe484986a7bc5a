"""Moves a batch, whatever its structure, to the device on which this rank computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shoal.parallel._torch import pytree
from shoal.parallel.program import Program


def apply(program: Program) -> Program:
    """Place every tensor of a batch on the world's device; nothing to do on the CPU."""
    device = program.world.device
    if device.type == "cpu":
        return program

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return replace(program, prepare=(*program.prepare, lambda b: pytree.tree_map(move, b)))
