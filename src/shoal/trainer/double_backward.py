"""Refuses gradients of gradients where a layout's collectives can be differentiated once only.

torch passes a second derivative through an all-reduce as if there were none: under tp the gradient
of a penalty would be another one, with a warning at most. fsdp frees what it would need.

    allowed   ddp, zero1, zero2, one process: nothing of theirs is inside of the graph
    told by   a hook on the model's outputs: gradients arrive there with grad mode on
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.policies import CompilePolicy
from shoal.parallel.program import Program
from shoal.trainer._torch import pytree


def once_only(program: Program) -> str:
    """Name what of a plan can be differentiated once only; "" for nothing."""
    layout = program.plan.layout
    for axis in ("tp", "cp", "ep", "pp"):
        if getattr(layout, axis) > 1:
            return f"layout.{axis} = {getattr(layout, axis)}"
    if layout.zero == 3:
        return f"layout.strategy = {layout.strategy}"
    return "train.compile = blocks" if program.plan.asks(CompilePolicy) else ""


def watched(outputs: Any, what: str) -> Any:
    """Outputs whose gradient must not be differentiated again, in the place of `outputs`.

    what   of the plan is in the way, by name
    Gives  aliases: derivatives by the outputs themselves pass through nothing of a layout's
    """

    def refuse(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"loss: a gradient of a gradient (create_graph=True) passes through the model, and "
                f"{what} can be differentiated once only; try: layout.strategy=ddp, zero1 or "
                f"zero2, without train.compile"
            )

    def watch(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        leaf.register_hook(refuse)
        return leaf.view_as(leaf)

    return pytree.tree_map(watch, outputs)


@contextmanager
def watching(program: Program) -> Iterator[None]:
    """Watch the outputs of every forward pass of the program's module inside."""
    what = once_only(program)
    if not what:
        yield
        return

    def after(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        return watched(outputs, what) if torch.is_grad_enabled() else None

    handle = program.module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
